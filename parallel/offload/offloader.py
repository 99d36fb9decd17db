"""Moves the activations of a rank's stages out and back while it computes, and keeps it within a budget.

Note [Who decides]
The rank's actions do (plan.py): OFFLOAD and RELOAD start copies, which two threads make, one for each direction. What
is measured may differ from what was planned with, where the tokens of experts are not shared out evenly, say. So the
budget is held once more here: a forward waits for copies under way where it would exceed it, and where that is not
enough the unit that was made last leaves too; a backward whose unit is away brings it back. Both are waited for, and
counted as such.

Note [Committed bytes]
`committed` are the bytes of what is there, of the forward under way (as many as the last one of its stage kept), and of
what is to come in; a unit on its way out counts until it is gone. Whoever needs room commits first, and then waits for
copies on their way out until what is committed is within the budget. Those never wait, so nothing waits for ever.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from threading import Condition

import torch
from torch import Tensor

from counterflow.parallel.offload.lane import Job, Lane
from counterflow.parallel.offload.tier import Region, Tier
from counterflow.parallel.offload.unit import SavedUnit, Shared
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.ir.offload_sizes import Unit
from counterflow.parallel.pipeline.ir.trace import Recorder

logger = logging.getLogger(__name__)


class _State(Enum):
    HERE = "here"
    AWAY = "away"  # or on its way out
    COMING = "coming"  # or about to, once it is out


class _Entry:
    """A unit and where it is. is_out: its copy out is done. away_bytes: what that freed.

    is_borrowed: it has come back, and the allocator does not know yet that the computation uses its memory.
    """

    __slots__ = ("away_bytes", "is_borrowed", "is_out", "region", "state", "unit")

    def __init__(self, unit: SavedUnit) -> None:
        self.unit = unit
        self.state = _State.HERE
        self.is_out = self.is_borrowed = False
        self.away_bytes = 0
        self.region: Region | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """What a rank moved in a step. num_uses: backwards; num_hits: those that found everything there.

    num_unplanned: moves out and back that were not among the actions. peak_bytes: the most that was kept for backwards
    at once; what deferred weight gradients keep after that is not in it.
    """

    out_bytes: int = 0
    back_bytes: int = 0
    num_uses: int = 0
    num_hits: int = 0
    num_unplanned: int = 0
    peak_bytes: int = 0


class Offloader:
    """Of one rank. unit_bytes: by stage, what a forward is taken to keep until one has run.

    budget_bytes: see Note [Committed bytes]. min_bytes: smaller storages stay. stay: parameters and buffers.
    bytes_per_s: the most that copies take in each direction.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        device: torch.device,
        budget_bytes: int,
        min_bytes: int,
        unit_bytes: Mapping[int, int],
        stay: Iterable[Tensor],
        bytes_per_s: float | None = None,
    ) -> None:
        self._tier, self._device, self._budget_bytes = tier, device, budget_bytes
        self._min_bytes, self._bytes_per_s = min_bytes, bytes_per_s
        self._shared = Shared(stay)
        self._expected = dict(unit_bytes)
        self._entries: dict[Unit, _Entry] = {}
        self._changed = Condition()  # guards all of the following
        self._out: Lane | None = None
        self._back: Lane | None = None
        self._failure: BaseException | None = None
        self._committed = self._here = self._num_leaving = 0
        self._is_demanded = self._is_closing = self._has_warned = False
        self._counts = Counter[str]()
        self._recorder: Recorder | None = None
        # One for each direction: a link carries both at once.
        self._out_stream, self._back_stream = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )

    @property
    def report(self) -> OffloadReport:
        """Of the step under way, or of the last one."""
        return OffloadReport(**self._counts)

    @contextmanager
    def step(self, recorder: Recorder | None = None) -> Generator[None]:
        """A step runs within; afterwards nothing is left, whether it failed or not. recorder: of its copies."""
        self._counts, self._recorder = Counter[str](), recorder
        try:
            yield
        finally:
            self.discard()
        over_bytes = self._counts["peak_bytes"] - self._budget_bytes
        if over_bytes > 0 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "offload: a rank held %d bytes of activations, %d above its budget of %d: what it worked on at once, "
                "tensors below offload.min_bytes=%d and those that something else holds need more; raise the budget",
                self._counts["peak_bytes"],
                over_bytes,
                self._budget_bytes,
                self._min_bytes,
            )

    def close(self) -> None:
        """Forget every unit and close the tier's file."""
        self.discard()
        self._tier.close()

    def discard(self) -> None:
        """Forget every unit: after a step, or where forwards are taken back."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for lane in (self._out, self._back):
            if lane is not None:
                lane.close()
        self._out = self._back = None
        for entry in self._entries.values():
            if entry.region is not None:
                self._tier.give_back(entry.region)
        self._entries.clear()
        self._failure = None
        self._committed = self._here = self._num_leaving = 0
        self._is_demanded = self._is_closing = False

    def reserve(self, stage: int) -> bool:
        """Before a forward of `stage`: returns once there is room for it; whether it had to wait.

        Raises what a copy failed with.
        """
        with self._changed:
            self._raise_failure()
            self._committed += self._expected[stage]
            if self._committed <= self._budget_bytes:
                return False
        self._make_room()
        return True

    @contextmanager
    def catching(self, stage: int, microbatch: int) -> Generator[None]:
        """What autograd saves within is the unit of `stage` and `microbatch`; `reserve` came before."""
        unit = SavedUnit(shared=self._shared, min_bytes=self._min_bytes, added=self._add)
        with torch.autograd.graph.saved_tensors_hooks(unit.pack, SavedUnit.unpack):
            yield
        with self._changed:
            self._committed += unit.num_bytes - self._expected[stage]
            self._expected[stage] = unit.num_bytes
            self._entries[stage, microbatch] = _Entry(unit)

    def offload(self, stage: int, microbatch: int) -> None:
        """OFFLOAD: start to move the unit out. Raises OSError: where there is no room to move it to."""
        entry = self._entries[stage, microbatch]
        with self._changed:
            self._raise_failure()
            num_bytes = entry.unit.region_bytes
            if entry.state is not _State.HERE or num_bytes == 0:
                return
            entry.region = region = self._tier.take(num_bytes)
            entry.state, entry.is_out = _State.AWAY, False
            self._num_leaving += 1
        if self._out is None:
            self._out = self._lane("activations out")
        stream = self._out_stream
        issued: torch.Event | None = None
        if stream is not None:
            issued = torch.cuda.current_stream(self._device).record_event()

        begin = 0.0

        def copy() -> int:
            nonlocal begin
            begin = time.perf_counter()
            with _copying(stream, issued):
                return entry.unit.copy_out(region.memory())

        def done() -> None:
            self._record(Kind.OFFLOAD, stage, microbatch, begin)
            with self._changed:
                entry.away_bytes = entry.unit.let_go()
                entry.is_out = True
                self._committed -= entry.away_bytes
                self._here -= entry.away_bytes
                self._num_leaving -= 1
                self._counts["out_bytes"] += entry.unit.moving_bytes
                self._changed.notify_all()

        self._out.put(Job(wait=_nothing, copy=copy, done=done))

    def reload(self, stage: int, microbatch: int) -> None:
        """RELOAD: start to bring the unit back, once it is out and there is room."""
        entry = self._entries[stage, microbatch]
        with self._changed:
            self._raise_failure()
            if entry.state is not _State.AWAY:
                return
            entry.state = _State.COMING
            promised = entry.away_bytes if entry.is_out else entry.unit.moving_bytes
            self._committed += promised
        if self._back is None:
            self._back = self._lane("activations back")
        region = entry.region
        assert region is not None

        def wait() -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or (entry.is_out and self._may_come_in))
                self._committed += entry.away_bytes - promised
                self._here += entry.away_bytes
                self._counts["peak_bytes"] = max(self._counts["peak_bytes"], self._here)

        begin = 0.0

        def copy() -> int:
            nonlocal begin
            begin = time.perf_counter()
            if self._is_over:
                return 0
            with _copying(self._back_stream):
                return entry.unit.copy_in(region.memory(), self._device)

        def done() -> None:
            self._record(Kind.RELOAD, stage, microbatch, begin)
            with self._changed:
                # Before its state, which a fetch reads without waiting.
                entry.region, entry.is_borrowed = None, True
                entry.state = _State.HERE
                self._tier.give_back(region)
                self._counts["back_bytes"] += entry.unit.moving_bytes
                self._changed.notify_all()

        self._back.put(Job(wait=wait, copy=copy, done=done))

    def fetch(self, stage: int, microbatch: int) -> bool:
        """Before a backward: returns once the unit is there; whether it had to be waited for.

        Raises what a copy failed with.
        """
        entry = self._entries[stage, microbatch]
        self._counts["num_uses"] += 1
        if entry.state is _State.HERE:
            self._counts["num_hits"] += 1
            self._keep_for_use(entry)
            return False
        if entry.state is _State.AWAY:
            self._counts["num_unplanned"] += 1
            self.reload(stage, microbatch)
            self._make_room(but=entry)
        with self._changed:
            self._is_demanded = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure is not None or entry.state is _State.HERE)
            self._is_demanded = False
            self._raise_failure()
        self._keep_for_use(entry)
        return True

    def _keep_for_use(self, entry: _Entry) -> None:
        """What has come back is in memory of the copying stream, which may use it again only after the backward."""
        if self._back_stream is not None and entry.is_borrowed:
            stream = torch.cuda.current_stream(self._device)
            for tensor in entry.unit.memories():
                tensor.record_stream(stream)
            entry.is_borrowed = False

    def release(self, stage: int, microbatch: int) -> None:
        """After a backward: the unit is gone."""
        entry = self._entries.pop((stage, microbatch))
        with self._changed:
            self._committed -= entry.unit.num_bytes
            self._here -= entry.unit.num_bytes
            self._changed.notify_all()

    def _make_room(self, but: _Entry | None = None) -> None:
        """Wait for what is on its way out and, where that is not enough, send more of what is there after it."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._failure is not None or self._is_within or self._num_leaving == 0
                )
                self._raise_failure()
                if self._is_within:
                    return
                there = [
                    key
                    for key, entry in self._entries.items()
                    if entry.state is _State.HERE and entry is not but and entry.unit.region_bytes > 0
                ]
            if not there:
                return
            self._counts["num_unplanned"] += 1
            self.offload(*there[-1])

    def _add(self, num_bytes: int) -> None:
        with self._changed:
            self._here += num_bytes
            self._counts["peak_bytes"] = max(self._counts["peak_bytes"], self._here)

    @property
    def _is_within(self) -> bool:
        return self._committed <= self._budget_bytes

    @property
    def _may_come_in(self) -> bool:
        return self._is_within or (self._is_demanded and self._num_leaving == 0)

    @property
    def _is_over(self) -> bool:
        return self._is_closing or self._failure is not None

    def _record(self, kind: Kind, stage: int, microbatch: int, begin: float) -> None:
        if self._recorder is not None:
            self._recorder.add_copy(kind.value, stage, microbatch, begin, time.perf_counter())

    def _lane(self, name: str) -> Lane:
        return Lane(name, bytes_per_s=self._bytes_per_s, failed=self._fail)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


@contextmanager
def _copying(stream: torch.cuda.Stream | None, issued: torch.Event | None = None) -> Generator[None]:
    """Copies made within are complete at its end. issued: what must be through before they begin."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        if issued is not None:
            stream.wait_event(issued)
        yield
    stream.synchronize()


def _nothing() -> None: ...
