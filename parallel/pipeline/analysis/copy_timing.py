"""When the copies of one rank begin and end in a simulation, and what its actions wait for.

The rules are those of parallel/offload/offloader.py: a copy starts once its rank has come to it and the one before it
in its direction is done; what comes in waits for its own way out and for room; a forward waits for room, and a backward
for its unit. Only copies on their way out make room while others wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterflow.parallel.pipeline.ir.action import COMPUTE, Action, Kind
from counterflow.parallel.pipeline.ir.dependencies import microbatch_of
from counterflow.parallel.pipeline.ir.offload_sizes import Unit, UnitBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyModel:
    """What a simulation knows of copies. sizes: by stage, measured or planned with. bytes_per_s: in each direction."""

    sizes: Sequence[UnitBytes]
    budget_bytes: int
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """action: an OFFLOAD or a RELOAD, from `start` to `end`."""

    action: Action
    start: float
    end: float


class RankCopies:
    """The copies of a rank; `before` and `after` are called for each of its compute actions in turn.

    actions: the rank's whole list. stall: time that compute actions have waited for copies so far.
    """

    def __init__(self, actions: Sequence[Action], model: CopyModel) -> None:
        self._model = model
        self._issued: list[list[Action]] = [[]]  # before each compute action
        for action in actions:
            if action.kind in (Kind.OFFLOAD, Kind.RELOAD):
                self._issued[-1].append(action)
            elif action.kind in COMPUTE:
                self._issued.append([])
        self._actions = [action for action in actions if action.kind in COMPUTE]
        self._committed = 0
        self._out_free = self._back_free = 0.0
        self._gone: list[tuple[float, int]] = []  # when bytes on their way out are, in order
        self._out_at: dict[Unit, float] = {}
        self._here_at: dict[Unit, float] = {}
        self._changes: list[tuple[float, int]] = []
        self.copies: list[Copy] = []
        self.stall = 0.0

    def before(self, position: int, free: float, ready: float) -> float:
        """When compute action `position` starts. free: when the rank has come to it; ready: when it could start."""
        for action in self._issued[position]:
            self._issue(action, free)
        start = ready
        for leaf in self._actions[position].leaves:
            if leaf.kind is Kind.F:
                self._committed += self._kept(leaf)
                start = self._room_at(start)
            elif leaf.kind in (Kind.B, Kind.I):
                start = max(start, self._here_at.get((leaf.stage, microbatch_of(leaf)), 0.0))
        self.stall += start - ready
        return start

    def after(self, position: int, end: float) -> None:
        """Compute action `position` has ended."""
        for leaf in self._actions[position].leaves:
            if leaf.kind is Kind.F:
                self._changes.append((end, self._kept(leaf)))
            elif leaf.kind in (Kind.B, Kind.I):
                self._committed -= self._kept(leaf)
                self._changes.append((end, -self._kept(leaf)))

    @property
    def peak_bytes(self) -> int:
        """The most that is there at once. What a forward keeps counts from its end."""
        there = most = 0
        for _, change in sorted(self._changes):
            there += change
            most = max(most, there)
        return most

    def _issue(self, action: Action, now: float) -> None:
        unit, num_bytes = (action.stage, microbatch_of(action)), self._kept(action)
        rate = self._model.bytes_per_s
        duration = 0.0 if rate is None else num_bytes / rate
        if action.kind is Kind.OFFLOAD:
            start = max(self._out_free, now)
            self._out_free = self._out_at[unit] = end = start + duration
            self._gone.append((end, num_bytes))
            self._changes.append((end, -num_bytes))
        else:
            self._committed += num_bytes
            start = self._room_at(max(self._back_free, now, self._out_at[unit]))
            self._back_free = self._here_at[unit] = end = start + duration
            self._changes.append((start, num_bytes))
        self.copies.append(Copy(action, start, end))

    def _room_at(self, time: float) -> float:
        """The first moment from `time` on at which enough has left; the last one where that is never enough."""
        while self._gone and (self._gone[0][0] <= time or self._committed > self._model.budget_bytes):
            end, num_bytes = self._gone.pop(0)
            self._committed -= num_bytes
            time = max(time, end)
        return time

    def _kept(self, leaf: Action) -> int:
        return self._model.sizes[leaf.stage].kept
