"""What a rank did in a step, and when: the measured counterpart of the simulated timeline."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch


class Activity(StrEnum):
    """What an interval was spent on."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    RECEIVE_WAIT = "receive_wait"
    SEND_WAIT = "send_wait"
    UNSHARD_WAIT = "unshard_wait"
    REDUCE_WAIT = "reduce_wait"


COMPUTE_ACTIVITIES = frozenset(
    {Activity.FORWARD, Activity.BACKWARD, Activity.INPUT_GRADIENT, Activity.WEIGHT_GRADIENT}
)


class Interval(NamedTuple):
    """One activity; times in seconds from the start of the step on this rank."""

    activity: Activity
    stage: int
    microbatch: int | None
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One rank's step. span_s: from the start of the step to the end of its last interval."""

    intervals: tuple[Interval, ...] = ()
    peak_live_activations: int = 0
    peak_held_weight_grad_bytes: int = 0

    @property
    def span_s(self) -> float:
        return max((interval.end_s for interval in self.intervals), default=0.0)

    @property
    def busy_s(self) -> float:
        """Time in forward, backward and weight gradient."""
        return self.seconds_in(*COMPUTE_ACTIVITIES)

    def seconds_in(self, *activities: Activity) -> float:
        return sum(interval.duration_s for interval in self.intervals if interval.activity in activities)


@dataclass(slots=True)
class Recorder:
    """Marks the intervals of one step: wall clock on a CPU, events on a CUDA stream (no synchronisation)."""

    device: torch.device
    _start: Any = None
    _marks: list[tuple[Activity, int, int | None, Any, Any]] = field(
        default_factory=lambda: list[tuple[Activity, int, int | None, Any, Any]]()
    )

    def start(self) -> None:
        self._marks.clear()
        self._start = self._now()

    @contextmanager
    def record(self, activity: Activity, stage: int, microbatch: int | None) -> Generator[None]:
        begin = self._now()
        yield
        self._marks.append((activity, stage, microbatch, begin, self._now()))

    def intervals(self) -> tuple[Interval, ...]:
        """The intervals since `start`. On CUDA this waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return tuple(
            Interval(activity, stage, microbatch, self._since_start(begin), self._since_start(end))
            for activity, stage, microbatch, begin, end in self._marks
        )

    def _now(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _since_start(self, mark: Any) -> float:
        if self.device.type == "cuda":
            return float(self._start.elapsed_time(mark)) / 1e3
        return float(mark - self._start)
