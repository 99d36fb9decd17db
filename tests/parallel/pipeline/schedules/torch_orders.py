"""torch.distributed.pipelining's own multi-stage schedules, built without processes and exported to its CSV."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

INTERLEAVED, ZERO_BUBBLE = ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
ZBV, DUALPIPE_V = ScheduleZBVZeroBubble, ScheduleDualPipeV


def build(torch_class: Any, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Any:
    """The schedule object of rank 0; stages are stand-ins with what the constructor reads."""
    num_stages = num_ranks * num_chunks
    in_a_v = torch_class in (ZBV, DUALPIPE_V)
    held = [0, num_stages - 1] if in_a_v else range(0, num_stages, num_ranks)
    stages = [
        SimpleNamespace(
            group_size=num_ranks,
            group_rank=0,
            num_stages=num_stages,
            stage_index=index,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            has_backward=True,
            submod=torch.nn.Identity(),
        )
        for index in held
    ]
    return torch_class(stages, num_microbatches, loss_fn=lambda *_: 0)


def exported(schedule: Any, folder: Path, form: str) -> str:
    """Its CSV in the form `compute_only` or `compute_comms`, as torch writes it."""
    path = folder / f"{form}.csv"
    schedule._dump_csv(str(path), form)
    return path.read_text()
