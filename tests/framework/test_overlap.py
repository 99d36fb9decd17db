"""A mixture of experts trained with overlapped pairs and without: the same losses and parameters, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import seed_everything
from counterflow.framework.trainer.measure import step_record
from counterflow.framework.trainer.step import train_step
from counterflow.parallel.pipeline.ir.action import Kind
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, tiny_config

NUM_STEPS = 2


class Layout(NamedTuple):
    schedule: str
    mixture: str
    zero: int
    data: int = 2
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"

    @property
    def world_size(self) -> int:
        return 2 * self.data * self.tensor


LAYOUTS = [
    Layout("dualpipe", "deepseek_v3", 3),
    Layout("dualpipe_v", "mixtral", 0),
    Layout("dualpipe_v", "qwen3_moe", 3, data=1, tensor=2, sequence_parallel=True),
    Layout("interleaved_1f1b", "qwen3_moe", 0, data=1, tensor=2),
    *(
        pytest.param(layout, marks=pytest.mark.slow)
        for layout in (
            Layout("dualpipe", "mixtral", 0, tensor=2),
            Layout("dualpipe", "qwen3_moe", 3, tensor=2, sequence_parallel=True),
            Layout("dualpipe", "deepseek_v3", 0),
            Layout("dualpipe", "deepseek_v3", 3, recompute="full"),
            Layout("interleaved_1f1b", "mixtral", 0, data=1, tensor=2, recompute="full"),
            Layout("interleaved_1f1b", "deepseek_v3", 3),
            Layout("dualpipe_v", "deepseek_v3", 3, tensor=2),
            Layout("interleaved_1f1b", "mixtral", 3, tensor=2, sequence_parallel=True),
        )
    ),
]


class Outcome(NamedTuple):
    losses: list[float]
    norms: list[float]
    masters: list[Tensor]
    num_pairs: int
    num_handovers: int
    expert_wait_s: tuple[float, ...]


def train_tiny(layout: Layout, overlap: bool, data: PreparedData) -> Outcome:
    config = tiny_config(
        pp=2,
        dp=layout.data,
        tp=layout.tensor,
        schedule=layout.schedule,
        num_microbatches=6,
        zero=layout.zero,
        model=MIXTURES[layout.mixture] | {"num_layers": 6},
        recompute={"mode": layout.recompute},
        parallel={"expert_parallel_size": 2, "sequence_parallel": layout.sequence_parallel},
    )
    config = replace(config, schedule=replace(config.schedule, overlap=overlap))
    seed_everything(config.seed, deterministic=True)
    assembly = build(config, data, torch.device("cpu"))
    losses: list[float] = []
    norms: list[float] = []
    record: Any = None
    for step in range(NUM_STEPS):
        outcome = train_step(assembly, step)
        record = step_record(assembly, outcome)
        losses.append(record.loss)
        norms.append(outcome.judgement.grad_norm)
    interleaver = assembly.runtime.interleaver
    assert interleaver is not None
    return Outcome(
        losses,
        norms,
        [unit.master for stage in assembly.stages.values() for unit in stage.units],
        sum(
            each.kind is Kind.OVERLAP_F_B
            for each in assembly.schedule.actions[assembly.mesh.coordinate.pipeline]
        ),
        interleaver.num_handovers,
        record.time_s["expert_wait"],
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_is_the_same_with_and_without_overlap(
    ranks: RankPool, tiny_data: PreparedData, layout: Layout
) -> None:
    together = ranks.run(train_tiny, layout.world_size, layout, True, tiny_data)
    apart = ranks.run(train_tiny, layout.world_size, layout, False, tiny_data)
    for with_overlap, without in zip(together, apart, strict=True):
        assert with_overlap.losses == without.losses
        assert with_overlap.norms == without.norms
        for one, other in zip(with_overlap.masters, without.masters, strict=True):
            assert torch.equal(one, other)
        assert with_overlap.num_pairs > 0
        assert with_overlap.num_handovers > 0
        assert without.num_handovers == 0
        assert all(seconds > 0 for seconds in (*with_overlap.expert_wait_s, *without.expert_wait_s))
    # Halves that ran one after the other would hand nothing over; a stage without experts has no points.
    assert sum(each.num_handovers for each in together) > 2 * sum(each.num_pairs for each in together)
    # Ranks of one stage, which exchange tokens, switch equally often.
    per_stage = layout.data * layout.tensor
    for first in (0, per_stage):
        of_stage = together[first : first + per_stage]
        assert len({each.num_handovers for each in of_stage}) == 1
