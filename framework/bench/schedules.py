"""`counterflow bench schedules`: how close the runtime comes to its schedules, and to torch's runtime."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from framework.bench.compute import timed
from framework.bench.sleeping import TORCH_SCHEDULES, SleepCosts, our_step, torch_step
from parallel.pipeline.generate import generate
from parallel.pipeline.simulate import Costs, simulate


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured case.

    step_s, torch_step_s: wall time of each counted step, from the earliest rank's start to the latest's end.
    theory_idle: the simulator's makespan bubble. busy_s: time that one rank's actions take.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    theory_idle: float
    busy_s: float
    step_s: tuple[float, ...]
    torch_step_s: tuple[float, ...]

    def idle(self, step_s: float) -> float:
        """1 - busy / step: what is not sleep."""
        return 1 - self.busy_s / step_s

    @property
    def measured_idle(self) -> float:
        """Of the median step."""
        return self.idle(statistics.median(self.step_s))

    @property
    def best_idle(self) -> float:
        """Of the fastest step."""
        return self.idle(min(self.step_s))

    @property
    def torch_idle(self) -> float | None:
        return self.idle(statistics.median(self.torch_step_s)) if self.torch_step_s else None

    @property
    def ratio_to_torch(self) -> float | None:
        """Median over the interleaved pairs of our step time over torch's; None where torch has no such schedule."""
        if not self.torch_step_s:
            return None
        return statistics.median(
            ours / theirs for ours, theirs in zip(self.step_s, self.torch_step_s, strict=True)
        )


def measure_sleeping(
    cases: Sequence[Case], action_s: float, repeats: int, report: Callable[[Row], None] | None = None
) -> list[Row]:
    """Measure every case on the ranks of the default process group; every rank calls this, all get the rows.

    action_s: time of one F, I or W of a stage. repeats: counted steps after a first one
    that is not (connections are made in it). Our steps and torch's alternate, each after a barrier.
    """
    # Interrupts between threads are what a busy machine adds; the bench keeps one thread to a rank.
    torch.set_num_threads(1)
    rows: list[Row] = []
    group = dist.group.WORLD
    assert group is not None
    for case in cases:
        chunks = {} if case.num_chunks is None else {"num_chunks": case.num_chunks}
        schedule = generate(case.schedule, case.num_ranks, case.num_microbatches, **chunks)
        costs = SleepCosts(forward_s=action_s, input_gradient_s=action_s, weight_gradient_s=action_s)
        shape = (1, 8, 64)
        steps = {"ours": our_step(schedule, costs, shape, group)}
        if case.schedule in TORCH_SCHEDULES:
            steps["torch"] = torch_step(case.schedule, schedule, costs, shape, group)
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        for repeat in range(repeats + 1):
            for name, step in steps.items():
                elapsed = timed(step)
                if repeat > 0:
                    times[name].append(elapsed)
        simulation = simulate(schedule, Costs())
        row = Row(
            schedule=case.label,
            num_stages=schedule.num_stages,
            num_microbatches=case.num_microbatches,
            theory_idle=simulation.bubble_makespan,
            busy_s=3 * case.num_microbatches * schedule.num_stages // schedule.num_ranks * action_s,
            step_s=tuple(times["ours"]),
            torch_step_s=tuple(times["torch"]),
        )
        rows.append(row)
        if report is not None and dist.get_rank() == 0:
            report(row)
    return rows
