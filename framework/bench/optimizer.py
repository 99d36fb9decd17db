"""`counterflow bench optimizer`: what a pipeline gains where no rank waits for the others between two steps.

Stages sleep, so that ranks run side by side; norms, updates, validation and rollback are the trainer's own, on a
small parameter per stage. Steps are timed in a row, for it is between them that something is gained.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.framework.bench.compute import timed
from counterflow.framework.bench.sleeping import SleepCosts, Sleeper, SleepingStage
from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.optimizer import ModelOptimizer
from counterflow.parallel.collectives import Axis
from counterflow.parallel.groups import new_groups
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.pipeline.schedules.registry import generate
from counterflow.parallel.zero.config import ZeroConfig
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.stage import ShardedStage

_SHAPE = (1, 8, 64)
_WIDTH = 64
_RATE = 1e-3


class Mode(StrEnum):
    """WAITS: the ordinary step. AHEAD: post-validation, nothing clipped. REDONE: the same, where every other step
    has to be clipped, so that the one is undone and made again, and the next one waits."""

    WAITS = "waits"
    AHEAD = "ahead"
    REDONE = "redone"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """One schedule; times are seconds of a step, over rows of steps.

    theory_makespan_s, theory_span_s: from the first action anywhere to the last, and of the rank that takes
        longest from its own first to its own last: what a step takes where the ranks wait, and the least that it
        can take where they do not.
    step_s: by mode, of each row of steps.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    theory_makespan_s: float
    theory_span_s: float
    step_s: dict[str, tuple[float, ...]]

    def median_s(self, mode: Mode) -> float:
        return statistics.median(self.step_s[mode])

    def ratio(self, mode: Mode) -> float:
        """Median over the interleaved rows of the step time over that of the ordinary step."""
        pairs = zip(self.step_s[mode], self.step_s[Mode.WAITS], strict=True)
        return statistics.median(mine / waits for mine, waits in pairs)


def measure_optimizer(
    schedules: Sequence[str],
    num_ranks: int,
    num_microbatches: int,
    action_s: float,
    num_steps: int,
    repeats: int,
    report: Callable[[OptimizerRow], None] | None = None,
) -> list[OptimizerRow]:
    """Measure on the ranks of the default process group; every rank calls this, all get the rows.

    num_steps: in a row; the last one waits, as ahead of a checkpoint. repeats: counted rows of each mode, the
    modes by turns, after one that is not.
    """
    torch.set_num_threads(1)
    rows: list[OptimizerRow] = []
    for name in schedules:
        schedule = generate(name, num_ranks, num_microbatches)
        simulation = simulate(lower(schedule, zero_stage=0, early_sends=True), Costs())
        step_s: dict[str, list[float]] = {mode.value: [] for mode in Mode}
        runs = {mode: _run(name, num_ranks, num_microbatches, action_s, num_steps, mode) for mode in Mode}
        for repeat in range(repeats + 1):
            for mode, run in runs.items():
                seconds = timed(run) / num_steps
                if repeat > 0:
                    step_s[mode].append(seconds)
        row = OptimizerRow(
            schedule=name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            theory_makespan_s=simulation.makespan * action_s,
            theory_span_s=max(simulation.span) * action_s,
            step_s={mode: tuple(times) for mode, times in step_s.items()},
        )
        rows.append(row)
        if report is not None and dist.get_rank() == 0:
            report(row)
    return rows


def _run(
    name: str, num_ranks: int, num_microbatches: int, action_s: float, num_steps: int, mode: Mode
) -> Callable[[], None]:
    """A row of steps."""
    schedule = lower(generate(name, num_ranks, num_microbatches), zero_stage=0, early_sends=True)
    costs = SleepCosts(forward_s=action_s, input_gradient_s=action_s, weight_gradient_s=action_s)
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    mirrors = [(each, num_ranks - 1 - each) for each in range(num_ranks // 2)]
    mirror = new_groups(mirrors, "mirror") if schedule.num_directions > 1 else None
    replica = Axis(group=mirror, name="data")
    sleeper = Sleeper()
    stages: dict[int, Stage] = {}
    sharded: list[ShardedStage] = []
    for index in sorted(schedule.stages_of(rank)):
        stages[index] = SleepingStage(index, costs, _SHAPE, sleeper)
        module = nn.Linear(_WIDTH, _WIDTH, bias=False)
        sharded.append(
            ShardedStage(module, ZeroContext(config=ZeroConfig(stage=0), replica=ReplicaAxes.of(replica)))
        )
        stages[index].parameters = sharded[-1]
    runtime = Runtime(stages, schedule, group=group)
    optimizer = ModelOptimizer(
        sharded,
        OptimizerConfig(post_validation=mode is not Mode.WAITS),
        tensor=Axis(),
        world=Axis(group=group, name="world"),
    )
    microbatches = [torch.zeros(_SHAPE)] * num_microbatches

    def run() -> None:
        for step in range(num_steps):
            validate = (lambda: optimizer.validate().is_redone) if optimizer.is_ahead else None
            if validate is None:
                dist.barrier()
            runtime.step(microbatches, microbatches, _zero_loss, share_losses=False, validate=validate)
            is_clipped = mode is Mode.REDONE and step % 2 == 0
            for owned in optimizer.owned:
                owned.fragment.grad.fill_(float(is_clipped))
            if optimizer.can_step_ahead and step < num_steps - 1:
                optimizer.step_ahead(_RATE)
            else:
                optimizer.step(_RATE)

    return run


def _zero_loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.zeros(())
