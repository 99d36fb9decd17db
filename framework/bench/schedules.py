"""`counterflow bench schedules`: how close the runtime comes to its schedules, and to torch's runtime."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from counterflow.framework.bench.compute import timed
from counterflow.framework.bench.sleeping import TORCH_SCHEDULES, SleepCosts, Sleeper, our_step, torch_step
from counterflow.framework.trainer.collector import frozen_objects
from counterflow.parallel.pipeline.analysis.passes import send_early
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.schedules.registry import generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A schedule to measure. num_chunks: stages of a rank, where the schedule lets one choose."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int | None = None

    @property
    def label(self) -> str:
        return self.schedule if self.num_chunks is None else f"{self.schedule} v{self.num_chunks}"


class Timing(NamedTuple):
    """One step. step_s: from the earliest rank's start to the latest's end; slept_s: in actions, mean of ranks."""

    step_s: float
    slept_s: float

    @property
    def idle(self) -> float:
        """Share of the step outside of actions."""
        return 1 - self.slept_s / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured case: counted steps of ours and, where it has such a schedule, of torch's in turn.

    theory_idle: the simulator's makespan bubble of the schedule as published; executed_idle: of what the runtime
        executes, with early sends.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    theory_idle: float
    executed_idle: float
    ours: tuple[Timing, ...]
    torch: tuple[Timing, ...]

    @property
    def measured_idle(self) -> float:
        """Median of the steps."""
        return statistics.median(timing.idle for timing in self.ours)

    @property
    def best_idle(self) -> float:
        """Of the step that had least."""
        return min(timing.idle for timing in self.ours)

    @property
    def torch_idle(self) -> float | None:
        return statistics.median(timing.idle for timing in self.torch) if self.torch else None

    @property
    def ratio_to_torch(self) -> float | None:
        """Median over the interleaved pairs of our step time over torch's; None where torch has no such schedule."""
        if not self.torch:
            return None
        pairs = zip(self.ours, self.torch, strict=True)
        return statistics.median(ours.step_s / theirs.step_s for ours, theirs in pairs)


@frozen_objects()
def measure_sleeping(
    cases: Sequence[Case], action_s: float, repeats: int, report: Callable[[Row], None] | None = None
) -> list[Row]:
    """Measure every case on the ranks of the default process group; every rank calls this, all get the rows.

    action_s: time of one F, I or W of a stage. repeats: counted steps after a first one that is not (connections
    are made in it). Our steps and torch's alternate, each after a barrier.
    """
    torch.set_num_threads(1)
    rows: list[Row] = []
    group = dist.group.WORLD
    assert group is not None
    for case in cases:
        schedule = generate(case.schedule, case.num_ranks, case.num_microbatches, num_chunks=case.num_chunks)
        costs = SleepCosts(forward_s=action_s, input_gradient_s=action_s, weight_gradient_s=action_s)
        shape, sleeper = (1, 8, 64), Sleeper()
        steps = {"ours": our_step(schedule, costs, shape, group, sleeper)}
        if case.schedule in TORCH_SCHEDULES:
            steps["torch"] = torch_step(case.schedule, schedule, costs, shape, group, sleeper)
        timings: dict[str, list[Timing]] = {"ours": [], "torch": []}
        for repeat in range(repeats + 1):
            for name, step in steps.items():
                sleeper.slept_s = 0.0
                step_s = timed(step)
                slept_s = torch.tensor(sleeper.slept_s, dtype=torch.float64)
                dist.all_reduce(slept_s)
                if repeat > 0:
                    timings[name].append(Timing(step_s, float(slept_s) / case.num_ranks))
        row = Row(
            schedule=case.label,
            num_stages=schedule.num_stages,
            num_microbatches=case.num_microbatches,
            theory_idle=simulate(schedule, Costs()).bubble_makespan,
            executed_idle=simulate(send_early(schedule), Costs()).bubble_makespan,
            ours=tuple(timings["ours"]),
            torch=tuple(timings["torch"]),
        )
        rows.append(row)
        if report is not None and dist.get_rank() == 0:
            report(row)
    return rows
