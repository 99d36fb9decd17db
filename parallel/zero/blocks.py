"""Blocks of a stage: what ZeRO gathers and reduces at once, and in which order passes come to them. Pure.

Note [Gathers ahead]
A pass (a forward or a backward of one micro-batch) visits the blocks of its stage one after another. While one is
computed the next `prefetch_units` are on their way, over the end of a pass into the next one that the schedule's
UNSHARD has announced. Whole at once are the block that is computed and those; what is neither goes. The order is
that of the pass before, of the same kind; the first one has the order of the model, or its reverse. The loss and MTP
modules come to the head more than once: such an order is seen in the first pass and known from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Modules of a stage whose parameters come and go together; each is called on its own.

    reads_in_backward: whether their backward needs the parameters; that of an embedding does not.
    is_revisited: whether a pass comes back to it, so that its gradients are complete at the end of the pass only.
    defers: whether an I leaves weight gradients of it to its W.
    """

    name: str
    modules: tuple[nn.Module, ...]
    reads_in_backward: bool = True
    is_revisited: bool = False
    defers: bool = True

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each once for each of the modules that has it."""
        return chain.from_iterable(module.parameters() for module in self.modules)


def first_order(reads_in_backward: Sequence[bool], *, is_backward: bool) -> tuple[int, ...]:
    """The order in which a pass comes to the blocks of a stage, before one has been seen.

    reads_in_backward: of each block.
    """
    indices = range(len(reads_in_backward))
    if not is_backward:
        return tuple(indices)
    return tuple(index for index in reversed(indices) if reads_in_backward[index])


def next_blocks(current: int | None, coming: Iterable[int], count: int) -> tuple[int, ...]:
    """The first `count` blocks of `coming`, in order, each once, that are not `current`."""
    found: list[int] = []
    for block in coming:
        if len(found) == count:
            break
        if block != current and block not in found:
            found.append(block)
    return tuple(found)


def gathers(
    passes: Sequence[bool], reads_in_backward: Sequence[bool], *, prefetch: int, reshard_after: str
) -> list[int]:
    """The blocks that are gathered from an UNSHARD to its RESHARD, in order (Note [Gathers ahead]).

    passes: for each whether it is a backward. reads_in_backward: of each block of the stage.
    """
    orders = [first_order(reads_in_backward, is_backward=is_backward) for is_backward in passes]
    whole: set[int] = set()
    gathered: list[int] = []
    waiting = 0

    def go_on(current: int | None, coming: Iterable[int], count: int, *, frees: bool) -> None:
        wanted = next_blocks(current, coming, count)
        needed = dict.fromkeys((*(() if current is None else (current,)), *wanted))
        if frees:
            whole.intersection_update(needed)
        gathered.extend(block for block in needed if block not in whole)
        whole.update(needed)

    for number, (order, is_backward) in enumerate(zip(orders, passes, strict=True)):
        later = list(chain.from_iterable(orders[number + 1 :]))
        waiting -= is_backward
        frees = reshard_after == "use" or (reshard_after == "backward" and is_backward and waiting == 0)
        go_on(None, [*order, *later], 1 + prefetch, frees=frees)
        for position, block in enumerate(order):
            go_on(block, chain(order[position + 1 :], later), prefetch, frees=frees)
        waiting += not is_backward
    return gathered


def position_of(block: int, order: Sequence[int], after: int) -> int:
    """Where in `order`, from `after` on, a pass comes to `block`; from the beginning if not there; -1: nowhere."""
    for start in (after, 0):
        for position in range(start, len(order)):
            if order[position] == block:
                return position
    return -1
