"""Runs of ranks that several tests make."""

from __future__ import annotations

import torch
import torch.distributed as dist

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.metrics.record import StepRecord
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.checkpointing import resume, save_if_due
from counterflow.framework.trainer.loop import seed_everything, train
from counterflow.framework.trainer.run import RunContext


def run_steps(config: TrainConfig, run: RunContext, stop_after: int | None = None) -> list[StepRecord]:
    """Train, or go on, and stop after that many steps as a killed run would."""
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    records: list[StepRecord] = []
    for record in train(assembly, resume(assembly, run)):
        records.append(record)
        save_if_due(assembly, run, record.step + 1)
        if record.step + 1 == stop_after:
            break
    dist.barrier()
    return records
