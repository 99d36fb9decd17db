"""Gradients of experts that have copies, summed over the copies and over the replicas of each, equal to the bit.

Note [One order]
Copies are updated each by its own optimizer, and stay equal only if their gradients do, to the last bit. Floating-point
sums depend on their order, so every copy's is made in the same one: first, within each group of ranks that exchange
tokens, over the copies in order of rank; then over these groups, the replicas, in order too. A collective that sums
promises no order, and may choose one by where in the buffer an element is, which differs between copies. So where
there are more than two terms the parts travel in an all-to-all and are added up here; bytes on the wire are the same.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.parallel.collectives import Axis, all_gather_into, all_to_all_into
from counterflow.parallel.compress.reduction import (
    PendingReduction,
    PlainReduction,
    ReductionReport,
    Steps,
    fp32_bytes,
)
from counterflow.parallel.expert.copies import ExpertCopies


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack of experts in a flat buffer: from element `start` on, `expert_numel` for each slot of `copies`."""

    start: int
    expert_numel: int
    copies: ExpertCopies

    def of(self, buffer: Tensor) -> Tensor:
        """[slots, expert_numel]: a view."""
        num_slots = len(self.copies.is_first)
        return buffer[self.start : self.start + num_slots * self.expert_numel].view(
            num_slots, self.expert_numel
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """An expert of a stack that is in other slots too. slots: those here. ranks: all that hold it, ascending."""

    stack: Stack
    slots: tuple[int, ...]
    ranks: tuple[int, ...]


class CopiesReduction:
    """A `Reduction` of the gradients of experts, some with copies (Note [One order]).

    replica: the ranks that hold the same experts in the same slots. expert: those that exchange tokens, over which
    copies are spread. `place` says which, and again whenever they have moved.
    """

    def __init__(self, replica: Axis, expert: Axis) -> None:
        self._replica, self._expert = replica, expert
        self._plain = PlainReduction(replica)
        self._shared: tuple[_Shared, ...] = ()

    def place(self, stacks: Sequence[Stack]) -> None:
        """stacks: in the same order on every rank of the expert axis."""
        self._shared = tuple(shared for stack in stacks for shared in _shared_of(stack))

    def start(self, buffer: Tensor, out: Tensor | None) -> PendingReduction:
        """See `Reduction.start`. Group: the expert axis, then the replicas."""
        return PendingReduction(self._steps(buffer, out))

    def state(self) -> dict[str, Tensor]:
        return {}

    def reset(self) -> None:
        pass

    def _steps(self, buffer: Tensor, out: Tensor | None) -> Steps:
        sent = yield from self._add_copies(buffer)
        report = yield from (self._plain.steps if self._replica.size <= 2 else self._in_order)(buffer, out)
        return ReductionReport(
            sent_bytes=report.sent_bytes + sent,
            fp32_bytes=report.fp32_bytes + sent,
            error_squares=report.error_squares,
            squares=report.squares,
        )

    def _add_copies(self, buffer: Tensor) -> Generator[dist.Work | None, None, int]:
        """Bring the sum over its copies to every slot of an expert; the bytes sent. Group: the expert axis."""
        own_rank, size = self._expert.rank, self._expert.size
        own: list[Tensor] = []
        leaving: list[list[Tensor]] = [[] for _ in range(size)]
        for shared in self._shared:
            rows = shared.stack.of(buffer)
            first, *others = (rows[slot] for slot in shared.slots)
            total = _added([first, *others]) if others else first
            own.append(total)
            for rank in shared.ranks:
                if rank != own_rank:
                    leaving[rank].append(total)
        # What this rank sends another about an expert, that one sends it about the same.
        splits = [sum(tensor.numel() for tensor in tensors) for tensors in leaving]
        flat = torch.cat([buffer.new_empty(0), *(tensor for tensors in leaving for tensor in tensors)])
        arriving = torch.empty_like(flat)
        yield all_to_all_into(
            arriving, flat, self._expert, output_splits=splits, input_splits=splits, async_op=True
        )
        parts = [
            iter(part.split([tensor.numel() for tensor in tensors]))
            for part, tensors in zip(arriving.split(splits), leaving, strict=True)
        ]
        for shared, mine in zip(self._shared, own, strict=True):
            total = _added(mine if rank == own_rank else next(parts[rank]) for rank in shared.ranks)
            rows = shared.stack.of(buffer)
            for slot in shared.slots:
                rows[slot].copy_(total)
        return flat.nbytes

    def _in_order(self, buffer: Tensor, out: Tensor | None) -> Steps:
        """As `PlainReduction.steps`, added up in order of rank. Group: the replicas."""
        axis = self._replica
        received = torch.empty_like(buffer)
        yield all_to_all_into(received, buffer, axis, async_op=True)
        total = _added(received.chunk(axis.size))
        if out is None:
            yield all_gather_into(buffer, total, axis, async_op=True)
        else:
            out.copy_(total)
        sent = fp32_bytes(buffer.numel(), axis.size, is_everywhere=out is None)
        zero = buffer.new_zeros(())
        return ReductionReport(sent_bytes=sent, fp32_bytes=sent, error_squares=zero, squares=zero)


def _shared_of(stack: Stack) -> Iterator[_Shared]:
    own_rank = stack.copies.rank
    for places in stack.copies.shared:
        yield _Shared(
            stack=stack,
            slots=tuple(slot for rank, slot in places if rank == own_rank),
            ranks=tuple(sorted({rank for rank, _ in places})),
        )


def _added(terms: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    """The sum of one or more terms, from the first on, in a tensor of its own."""
    first, *rest = terms
    total = first.clone()
    for term in rest:
        total += term
    return total
