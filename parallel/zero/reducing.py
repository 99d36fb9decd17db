"""Reduces the gradients of a stage block by block, as soon as a micro-batch's are complete (`zero.reduce=microbatch`).

Note [When a block is complete]
Weight gradients come block after block, in the order of the backward: in a B, or in the W that an I left them to. So a
block's are complete when the first of another block's come, and the last ones when the pass ends. Gradients of what is
no linear layer come in the I; those of a block that has nothing else (an embedding, a head whose loss is computed in
chunks) are complete when it ends. A unit
that several blocks share, or that a pass comes back to, is complete at the end only. None of this depends on values,
so all replicas reduce in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.ir.trace import Activity, Recorder
from counterflow.parallel.zero.blocks import Block
from counterflow.parallel.zero.unit import FlatUnit

# Reductions of so many blocks are under way while the next block's gradients are computed.
_NUM_UNDER_WAY = 1


class BlockReductions:
    """The reductions of one stage; units_of: those of each block, some in several of them."""

    def __init__(self, blocks: Sequence[Block], units_of: Sequence[Sequence[FlatUnit]]) -> None:
        self._owner: dict[int, int] = {}
        self._at_end: set[int] = set()
        self._deferred: set[int] = set()
        self._units: list[FlatUnit] = []
        for index, (block, units) in enumerate(zip(blocks, units_of, strict=True)):
            for unit in units:
                if id(unit) in self._owner or block.is_revisited:
                    self._at_end.add(id(unit))
                if id(unit) not in self._owner:
                    self._owner[id(unit)] = index
                    self._units.append(unit)
                if block.defers:
                    self._deferred.add(id(unit))
        self._units.reverse()  # in the order of a backward
        self._current: int | None = None
        self._done: set[int] = set()
        self._under_way: deque[tuple[FlatUnit, ...]] = deque()
        self._recorder: Recorder | None = None
        self._where = (-1, -1)

    @contextmanager
    def running(self, kind: Kind, stage: int, microbatch: int, recorder: Recorder) -> Generator[None]:
        """A B, an I or a W runs within, and its gradients are reduced."""
        later = self._deferred if kind is Kind.I else set[int]()
        for unit in self._units:
            unit.is_early = id(unit) in later
        self._current, self._done = None, set()
        self._recorder, self._where = recorder, (stage, microbatch)
        try:
            yield
        finally:
            for unit in self._units:
                unit.is_early = False
        due = [unit for unit in self._units if self._is_due(unit, kind) and id(unit) not in self._done]
        for unit in due:
            self._start((unit,))
        self._recorder = None

    def _is_due(self, unit: FlatUnit, kind: Kind) -> bool:
        """Whether its gradients of a micro-batch are complete after `kind`."""
        return kind is Kind.B or (kind is Kind.W) == (id(unit) in self._deferred)

    def touch(self, unit: FlatUnit) -> None:
        """A weight gradient of `unit` is about to be added."""
        owner = self._owner[id(unit)]
        if owner == self._current:
            return
        done, self._current = self._current, owner
        if done is None:
            return
        complete = tuple(
            unit for unit in self._units if self._owner[id(unit)] == done and id(unit) not in self._at_end
        )
        if complete:
            self._start(complete)
            self._done.update(map(id, complete))

    def _start(self, units: tuple[FlatUnit, ...]) -> None:
        assert self._recorder is not None, "a gradient comes outside of a pass"
        begin = self._recorder.now()
        # One that is still under way is of the micro-batch before.
        for earlier in list(self._under_way):
            if any(unit in units for unit in earlier):
                self.finish(earlier)
        for unit in units:
            unit.reduce_grad()
        self._under_way.append(units)
        while len(self._under_way) > _NUM_UNDER_WAY:
            self.finish(self._under_way[0])
        self._recorder.add(Activity.REDUCE, *self._where, begin)

    def finish(self, units: tuple[FlatUnit, ...] | None = None) -> None:
        """Wait for the reduction of `units`, or of all that are under way."""
        for each in [units] if units is not None else list(self._under_way):
            for unit in each:
                unit.advance_reduction()
            for unit in each:
                unit.wait_reduction()
            self._under_way.remove(each)

    def discard(self) -> None:
        """Forget what was accumulated and not reduced, after a step that failed."""
        self._current, self._done, self._recorder = None, set(), None
        self._under_way.clear()
        for unit in self._units:
            unit.discard_gradients()
