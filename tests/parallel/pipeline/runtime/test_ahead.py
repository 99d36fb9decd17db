"""What a rank may do before its parameters are validated: forwards, of which every message can be accounted for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.runtime.ahead import forwards_ahead, unused_receives
from counterflow.parallel.pipeline.runtime.plain_parameters import PlainParameters
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.rank_pool import RankPool


def test_1f1b_by_hand() -> None:
    """Rank r of 3 has 3 - r forwards before its first backward; the last one's first receive is part of what waits."""
    schedule = lower(generate("1f1b", 3, 4), zero_stage=0)
    ahead = [actions[:cut] for actions, cut in zip(schedule.actions, forwards_ahead(schedule), strict=True)]
    forwards = [[str(action) for action in of if action.kind is Kind.F] for of in ahead]
    assert forwards == [["0F0", "0F1"], ["1F0"], []]


@pytest.mark.parametrize("name", generated_schedules())
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_everything_on_its_way_is_accounted_for(name: str, zero_stage: int) -> None:
    for num_ranks in (2, 4, 6):
        schedule = lower(generate(name, num_ranks, 3 * num_ranks), zero_stage=zero_stage, early_sends=True)
        cuts = forwards_ahead(schedule)
        ahead = [actions[:cut] for actions, cut in zip(schedule.actions, cuts, strict=True)]
        assert cuts[0] > 0
        done = Counter(action.kind for of in ahead for action in of)
        assert set(done) <= {Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD}
        sent = {(each.stage + 1, each.microbatch) for of in ahead for each in of if each.kind is Kind.SEND_F}
        for rank, of in enumerate(ahead):
            received = {(each.stage, each.microbatch) for each in of if each.kind is Kind.RECV_F}
            assert received <= sent
            used = {(each.stage, each.microbatch) for each in of if each.kind is Kind.F}
            mine = {
                (stage, microbatch)
                for stage, microbatch in sent
                if microbatch is not None and schedule.rank_of(stage, microbatch) == rank
            }
            unused = unused_receives(schedule, cuts, rank)
            assert [each.kind for each in unused] == [Kind.RECV_F] * len(unused)
            assert {(each.stage, each.microbatch) for each in unused} == mine - used
            for stage in schedule.stages_of(rank):
                gathers = {
                    sum(each.kind is Kind.UNSHARD for each in ahead[r]) for r in schedule.replicas_of(stage)
                }
                assert len(gathers) == 1


def late_receives() -> Schedule:
    """Two ranks; the second posts no receive ahead of need, so a message of the first is out and not asked for."""
    text = (
        ("0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1", "0REDUCE_GRAD"),
        ("1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1", "1REDUCE_GRAD"),
    )
    return Schedule(
        name="late",
        num_stages=2,
        num_microbatches=2,
        placement=((0, 1),),
        actions=tuple(tuple(map(Action.parse, row)) for row in text),
    )


class Noisy(nn.Module):
    """Draws random numbers, as dropout does."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + torch.rand(3)


def losses_of_steps(corrected: bool) -> list[float]:
    """Two steps; the second is told in `validate` that the weight was to be halved, or has it halved before."""
    torch.manual_seed(3 + dist.get_rank())
    module = Noisy(2.0)
    stage = Stage(dist.get_rank(), module, PlainParameters(module))
    runtime = Runtime({stage.index: stage}, late_receives(), group=dist.group.WORLD)
    inputs = [torch.ones(3), 2 * torch.ones(3)]

    def halve() -> bool:
        module.weight.data.mul_(0.5)
        return True

    losses = runtime.step(inputs, inputs, lambda out, _: out.sum()).losses.tolist()
    if not corrected:
        halve()
    result = runtime.step(inputs, inputs, lambda out, _: out.sum(), validate=halve if corrected else None)
    assert module.weight.grad is not None
    trace = result.trace
    num_forwards = sum(interval.activity == "F" for interval in trace.intervals)
    return [*losses, *result.losses.tolist(), *module.weight.grad.tolist(), num_forwards]


def test_a_step_begun_on_wrong_parameters_is_begun_anew(ranks: RankPool) -> None:
    """Losses, gradients, random numbers and the count of forwards are those of a step that began on the right ones."""
    assert ranks.run(losses_of_steps, 2, True) == ranks.run(losses_of_steps, 2, False)
