"""What a rank did in a step, and when: the measured counterpart of the simulated timeline.

Note [Where the time of a step goes]
A step is cut into categories that exclude each other and add up to it. Collectives of the tensor axis run
inside forward and backward and count as such. What no interval covers is `other`: reading the batch, zeroing
gradients, Python between two actions. An interval within another one (the wait for the gradient norm within
the optimizer, that for tokens or parameters within a forward) is taken out of it. The halves of an overlapped pair
are recorded in slices, each from when the half is let run to when it lets the other run: two never cover the same
moment.
"""

from __future__ import annotations

import os
import platform
import time
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from counterflow.parallel.pipeline.ir.host_lead import HostLead, Issued, host_lead


class Activity(StrEnum):
    """What an interval was spent on; its name in lower case is the category of the account.

    SEND_WAIT: handing a message over, and waiting for room or for its arrival.
    GATHER_WAIT: gathering parameters, as far as no computation hides it.
    COLLECTIVE_WAIT: what every rank waits for: the gradient norm.
    EXPERT_WAIT: tokens on their way to experts and back, as far as no computation hides it.
    OFFLOAD_WAIT: activations on their way: out, before a forward that has no room, or back, before their backward.
    REDUCE: reducing gradients over the copies of a stage and over both ends of a tie, as far as it is waited for.
    OPTIMIZER: clipping, the update, and publishing the new parameters.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    RECEIVE_WAIT = "receive_wait"
    SEND_WAIT = "send_wait"
    GATHER_WAIT = "gather_wait"
    COLLECTIVE_WAIT = "collective_wait"
    EXPERT_WAIT = "expert_wait"
    OFFLOAD_WAIT = "offload_wait"
    REDUCE = "reduce"
    OPTIMIZER = "optimizer"

    @property
    def category(self) -> str:
        return self.name.lower()


OTHER = "other"
CATEGORIES = (*(activity.category for activity in Activity), OTHER)
COMPUTE_ACTIVITIES = frozenset(
    {Activity.FORWARD, Activity.BACKWARD, Activity.INPUT_GRADIENT, Activity.WEIGHT_GRADIENT}
)
COMPUTE_CATEGORIES = tuple(activity.category for activity in Activity if activity in COMPUTE_ACTIVITIES)


class Interval(NamedTuple):
    """One activity; times in seconds from the start of the step on this rank. stage: -1 for the whole rank."""

    activity: Activity
    stage: int
    microbatch: int | None
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class CopyInterval(NamedTuple):
    """Activations on their way, beside what the rank does. kind: OFFLOAD or RELOAD. Times as in `Interval`."""

    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


class Inflation(NamedTuple):
    """What splitting the backward costs: the mean times of I + W and of B, summed over the stages that ran both."""

    split_s: float
    whole_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One rank's step.

    start_s: the clock of this rank's host at the start of the step (see `clock_id`). step_s: its length.
    pipeline_start_s, pipeline_end_s: from the first action to the end of the last gradient reduction.
    intervals: in the order of their ends, those within another one before it.
    peak_held_weight_grad_bytes: kept for deferred weight gradients, over all stages of the rank at once.
    copies: of offloaded activations, in the order of their ends; no part of the account.
    host_lead: how far the host ran ahead of a GPU; None on a CPU, which is its own host.
    """

    start_s: float = 0.0
    step_s: float = 0.0
    pipeline_start_s: float = 0.0
    pipeline_end_s: float = 0.0
    intervals: tuple[Interval, ...] = ()
    peak_live_activations: int = 0
    peak_held_weight_grad_bytes: int = 0
    copies: tuple[CopyInterval, ...] = ()
    host_lead: HostLead | None = None

    @property
    def pipeline_s(self) -> float:
        """How long the schedule ran on this rank."""
        return self.pipeline_end_s - self.pipeline_start_s

    @property
    def busy_s(self) -> float:
        """Time in forward, backward and weight gradient, without waits within them."""
        return sum(
            interval.duration_s
            for interval in exclusive(self.intervals)
            if interval.activity in COMPUTE_ACTIVITIES
        )

    @property
    def span_s(self) -> float:
        """From the start of the first compute action to the end of the last."""
        start = min((interval.start_s for interval in self.compute), default=0.0)
        return max((interval.end_s for interval in self.compute), default=0.0) - start

    @property
    def compute(self) -> list[Interval]:
        return [interval for interval in self.intervals if interval.activity in COMPUTE_ACTIVITIES]

    def account(self) -> dict[str, float]:
        """Seconds of the step in each of CATEGORIES; they add up to `step_s`."""
        return account(self.intervals, self.step_s)

    def inflation(self) -> Inflation | None:
        """I + W and B of the stages where this step ran all three; None where no stage did."""
        means = mean_seconds([self])
        stages = {stage for activity, stage in means if activity is Activity.BACKWARD}
        both = [
            stage
            for stage in stages
            if (Activity.INPUT_GRADIENT, stage) in means and (Activity.WEIGHT_GRADIENT, stage) in means
        ]
        if not both:
            return None
        return Inflation(
            split_s=sum(
                means[Activity.INPUT_GRADIENT, stage] + means[Activity.WEIGHT_GRADIENT, stage]
                for stage in both
            ),
            whole_s=sum(means[Activity.BACKWARD, stage] for stage in both),
        )


def account(intervals: Iterable[Interval], step_s: float) -> dict[str, float]:
    """Seconds in each of CATEGORIES, none negative, which add up to `step_s`.

    Intervals may lie within each other: a moment counts for the innermost. What they do not cover is `other`.
    """
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for interval in exclusive(intervals):
        seconds[interval.activity.category] += interval.duration_s
    seconds[OTHER] = max(0.0, step_s - sum(seconds.values()))
    return seconds


def mean_seconds(traces: Sequence[Trace]) -> dict[tuple[Activity, int], float]:
    """Mean time of each compute activity on each stage, over micro-batches and the ranks that hold the stage.

    All slices of an activity are one; waits within it are left out.
    """
    each: dict[tuple[Activity, int], dict[tuple[int, int | None], float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for rank, trace in enumerate(traces):
        for interval in exclusive(trace.intervals):
            if interval.activity in COMPUTE_ACTIVITIES:
                each[interval.activity, interval.stage][rank, interval.microbatch] += interval.duration_s
    return {key: sum(times.values()) / len(times) for key, times in each.items()}


def exclusive(intervals: Iterable[Interval]) -> list[Interval]:
    """`intervals` cut so that none overlaps another, in order of time; where they lay in each other, the innermost."""
    result: list[Interval] = []
    enclosing: list[Interval] = []
    position = 0.0

    def advance(until: float) -> None:
        nonlocal position
        if enclosing and until > position:
            result.append(enclosing[-1]._replace(start_s=position, end_s=until))
        position = max(position, until)

    for interval in sorted(intervals, key=lambda each: (each.start_s, -each.end_s)):
        while enclosing and enclosing[-1].end_s <= interval.start_s:
            advance(enclosing[-1].end_s)
            enclosing.pop()
        advance(interval.start_s)
        enclosing.append(interval)
    while enclosing:
        advance(enclosing[-1].end_s)
        enclosing.pop()
    return result


class _Mark(NamedTuple):
    """A moment on a GPU: an event of its stream, and when the host put it there."""

    event: torch.cuda.Event
    host_s: float


class Recorder:
    """Marks the intervals of one step, which begins where it is made.

    Wall clock on a CPU, events of the current stream on CUDA: nothing is synchronised until `trace`. A step on
    CUDA should begin with the device idle, so that its first event stands for the clock of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._marks: list[tuple[Activity, int, int | None, Any, Any]] = []
        self._copies: list[CopyInterval] = []
        self.peak_live_activations = 0
        self.peak_held_weight_grad_bytes = 0
        self._start_s = time.perf_counter()
        self._start = self._pipeline_start = self._pipeline_end = self._stop = self.now()

    @contextmanager
    def record(self, activity: Activity, stage: int = -1, microbatch: int | None = None) -> Generator[None]:
        """What runs within is an interval of `activity`."""
        begin = self.now()
        yield
        self.add(activity, stage, microbatch, begin)

    def add(self, activity: Activity, stage: int, microbatch: int | None, begin: Any) -> None:
        """An interval from `begin`, which `now` gave, until now: `record` without its overhead."""
        self._marks.append((activity, stage, microbatch, begin, self.now()))

    def add_copy(self, kind: str, stage: int, microbatch: int, start: float, end: float) -> None:
        """A copy from `start` to `end` on the host's clock (time.perf_counter); called by the thread that made it."""
        self._copies.append(CopyInterval(kind, stage, microbatch, start - self._start_s, end - self._start_s))

    @property
    def num_intervals(self) -> int:
        """So far."""
        return len(self._marks)

    def forget(self, begin: int, end: int) -> None:
        """Drop the intervals from number `begin` up to `end`: of work that was thrown away, whose time is `other`."""
        del self._marks[begin:end]

    @contextmanager
    def pipeline(self) -> Generator[None]:
        """The schedule runs within."""
        self._pipeline_start = self.now()
        yield
        self._pipeline_end = self.now()

    def stop(self) -> None:
        """The step ends here, or where this is called again."""
        self._stop = self.now()

    def trace(self) -> Trace:
        """The step so far. On CUDA this waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        return Trace(
            start_s=self._start_s,
            step_s=self._since_start(self._stop),
            pipeline_start_s=self._since_start(self._pipeline_start),
            pipeline_end_s=self._since_start(self._pipeline_end),
            intervals=tuple(
                Interval(activity, stage, microbatch, self._since_start(begin), self._since_start(end))
                for activity, stage, microbatch, begin, end in self._marks
            ),
            peak_live_activations=self.peak_live_activations,
            peak_held_weight_grad_bytes=self.peak_held_weight_grad_bytes,
            copies=tuple(self._copies),
            host_lead=self._host_lead() if self._is_cuda else None,
        )

    def _host_lead(self) -> HostLead | None:
        return host_lead(
            [
                Issued(self._since_start(begin), self._since_start(end), end.host_s - self._start_s)
                for activity, _, _, begin, end in self._marks
                if activity in COMPUTE_ACTIVITIES
            ]
        )

    def now(self) -> Any:
        """A mark of this moment, for `add`."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return _Mark(event, time.perf_counter())
        return time.perf_counter()

    def _since_start(self, mark: Any) -> float:
        if self._is_cuda:
            return float(self._start.event.elapsed_time(mark.event)) / 1e3
        return float(mark - self._start)


class Clock(NamedTuple):
    """How the clocks of ranks were brought together: `alignment` in words, and each rank's start on the common one."""

    alignment: str
    offsets_s: tuple[float, ...]


def align(start_s: Sequence[float], clock_ids: Sequence[int]) -> Clock:
    """A common time for steps that started at `start_s` on the clocks `clock_ids`; 0 is the first start.

    Ranks that share a clock keep their distances. Each other clock is shifted so that its first rank starts at
    0 too: the previous step ended in a collective of every rank, which bounds the error.
    """
    first = {
        clock: min(start for start, of in zip(start_s, clock_ids, strict=True) if of == clock)
        for clock in set(clock_ids)
    }
    offsets = tuple(start - first[clock] for start, clock in zip(start_s, clock_ids, strict=True))
    if len(first) == 1:
        return Clock("one clock for all ranks", offsets)
    return Clock("one clock on each host; hosts aligned by the start of the step", offsets)


def clock_id() -> int:
    """A number that processes have in common where `time.perf_counter` reads one clock: those of one host.

    The kernel's boot id where there is one, for containers of a host may have names of their own; below 2^53.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    name = boot_id.read_text() if os.access(boot_id, os.R_OK) else platform.node()
    return zlib.crc32(name.encode())
