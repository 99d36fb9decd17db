"""Gathers and frees the parameters of a stage block by block while its passes run (Note [Gathers ahead] in blocks.py).

Note [Where a block begins]
A forward comes to a block when one of its modules is called. A backward comes to it when the gradient of what such a
module returned is there: an identity behind the module is the first of its nodes. A module whose forward is run again
in the backward (recomputation) is a part of a block or the inside of one, so it is whole by then. Passes of one stage
may be two at once, the halves of an overlapped pair; they run in turns, and a block that either is at stays whole.

Ranks gather in one order: that of their passes, which the schedule fixes, and of the blocks within them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from counterflow.parallel.pipeline.ir.trace import Activity, Recorder
from counterflow.parallel.zero.blocks import Block, first_order, next_blocks, position_of
from counterflow.parallel.zero.unit import FlatUnit

Direction = Literal["forward", "backward"]


@dataclass(slots=True)
class _Pass:
    """A pass under way. order: what is expected. seen: where it has been. position: in `order`."""

    order: tuple[int, ...]
    stage: int
    microbatch: int
    recorder: Recorder
    seen: list[int] = field(default_factory=list)
    current: int | None = None
    position: int = -1

    def coming(self) -> Sequence[int]:
        return self.order[self.position + 1 :]


class BlockGathers:
    """The blocks of one stage under ZeRO-3; units_of: those of each block.

    prefetch, reshard_after: see `ZeroConfig`. half_way: called once in each forward, at the middle one of its blocks.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        units_of: Sequence[Sequence[FlatUnit]],
        *,
        prefetch: int,
        reshard_after: str,
        half_way: Callable[[], None] | None = None,
    ) -> None:
        self._blocks, self._units_of = tuple(blocks), tuple(map(tuple, units_of))
        self._prefetch, self._reshard_after = prefetch, reshard_after
        self._half_way = half_way
        self._orders: dict[tuple[Direction, bool], tuple[int, ...]] = {}
        self._announced: deque[Direction] = deque()
        self._passes: dict[Direction, _Pass] = {}
        self._num_waiting = 0  # forwards whose backward has not been
        self._is_training = True
        self._handles: list[RemovableHandle] = []
        # Modules outlive the stage, and hold their hooks.
        own: weakref.ref[BlockGathers] = weakref.ref(self)
        for index, block in enumerate(self._blocks):
            for module in block.modules:
                self._handles += _hooked(module, own, index, reads_in_backward=block.reads_in_backward)

    def close(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def unshard(self, passes: Sequence[Direction]) -> None:
        """UNSHARD: these passes come before the next RESHARD; start to gather what the first needs first."""
        self._announced.extend(passes)
        self._go_on()

    def reshard(self) -> None:
        """RESHARD: nothing stays whole; what was announced and has not come is not expected any more."""
        self._announced.clear()
        for units in self._units_of:
            for unit in units:
                unit.reshard()

    def discard(self) -> None:
        """Forget the passes under way, after a step that failed."""
        self._passes.clear()
        self._announced.clear()
        self._num_waiting = 0

    @contextmanager
    def running(
        self, direction: Direction, stage: int, microbatch: int, recorder: Recorder
    ) -> Generator[None]:
        """A pass runs within; waits for parameters go to `recorder`."""
        assert direction not in self._passes, f"two passes of one direction at once on stage {stage}"
        if self._announced and self._announced[0] == direction:
            self._announced.popleft()
        # Not later: autograd computes without gradients.
        self._is_training = torch.is_grad_enabled()
        if direction == "backward":
            self._num_waiting -= 1
        order = self._expected(direction)
        each = self._passes[direction] = _Pass(order, stage, microbatch, recorder)
        try:
            yield
        finally:
            self._passes.pop(direction, None)
        self._orders[direction, self._is_training] = tuple(each.seen)
        if direction == "forward" and self._is_training:
            self._num_waiting += 1
        self._go_on()

    def reach(self, index: int, direction: Direction) -> None:
        """A pass comes to a block: it is whole on return, and the next ones are on their way."""
        each = self._passes.get(direction)
        assert each is not None, f"block {self._blocks[index].name} is used outside of a pass"
        if each.current == index:
            return
        each.current = index
        each.position = position_of(index, each.order, each.position + 1)
        each.seen.append(index)
        self._go_on(index)
        begin = each.recorder.now()
        waited = [unit.wait_unshard() for unit in self._units_of[index]]
        if any(waited):
            each.recorder.add(Activity.GATHER_WAIT, each.stage, each.microbatch, begin)
        if direction == "forward" and index == len(self._blocks) // 2 and self._half_way is not None:
            self._half_way()

    def _go_on(self, reached: int | None = None) -> None:
        """Free what is needed neither now nor next, and start to gather what is. reached: first of all, this block."""
        passes = list(self._passes.values())
        current = {each.current for each in passes if each.current is not None}
        later = chain.from_iterable(self._expected(direction) for direction in self._announced)
        # Of two passes at once neither knows what the other comes to next, so each has its own.
        coming = [
            next_blocks(
                each.current, chain(each.coming(), later if each is passes[-1] else ()), self._prefetch
            )
            for each in passes
        ] or [next_blocks(None, later, 1 + self._prefetch)]
        wanted = list(dict.fromkeys(chain.from_iterable(coming)))
        needed = {id(unit) for index in (*current, *wanted) for unit in self._units_of[index]}
        if self._frees():
            for unit in chain.from_iterable(self._units_of):
                if id(unit) not in needed:
                    unit.reshard()
        for index in (*([] if reached is None else [reached]), *wanted):
            for unit in self._units_of[index]:
                unit.unshard()

    def _expected(self, direction: Direction) -> tuple[int, ...]:
        known = self._orders.get((direction, self._is_training))
        return known or first_order(
            [block.reads_in_backward for block in self._blocks], is_backward=direction == "backward"
        )

    def _frees(self) -> bool:
        """Whether what is not needed next is freed now, or RESHARD does it."""
        if self._reshard_after == "use" or not self._is_training:
            return True
        return self._reshard_after == "backward" and self._num_waiting == 0 and "forward" not in self._passes


class _Reached(torch.autograd.Function):
    """The identity; its backward calls `reach` first."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reach: Callable[[], None]) -> Tensor:
        ctx.reach = reach
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.reach()
        return grads[0], None


def _hooked(
    module: nn.Module, gathers: weakref.ref[BlockGathers], index: int, *, reads_in_backward: bool
) -> list[RemovableHandle]:
    def found() -> BlockGathers:
        each = gathers()
        assert each is not None, "a module outlived the stage that gathers its parameters"
        return each

    def before(_: nn.Module, __: Any) -> None:
        found().reach(index, "forward")

    def behind(_: nn.Module, __: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not output.requires_grad:
            return output
        apply = cast(Callable[..., Tensor], _Reached.apply)  # pyright: ignore[reportUnknownMemberType]
        return apply(output, lambda: found().reach(index, "backward"))

    handles = [module.register_forward_pre_hook(before)]
    return [*handles, module.register_forward_hook(behind)] if reads_in_backward else handles
