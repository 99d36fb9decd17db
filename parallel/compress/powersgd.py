"""PowerSGD: sums of gradients as factors of low rank, which can be added to on their way.

Every matrix M of a rank goes as left = M right and, with that sum's columns made orthonormal, right = M' left; both are
summed by an all-reduce, and left right' stands for the sum of the M. The right factor starts the next sum (one step
of a power iteration). Vectors, and matrices too small to gain, go whole beside the left factors. Method: Vogels et
al., arXiv 1905.13727, algorithms 1 and 2. All ranks must compute the same orthonormal factor from the same sum, so
they have to be machines of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from counterflow.parallel.collectives import Axis, all_reduce
from counterflow.parallel.compress.reduction import PendingReduction, ReductionReport, Steps, fp32_bytes

# Factors have to be smaller than the matrix by this.
_LEAST_GAIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """`num` matrices of rows x columns in a flat buffer, from element `start` on, and the ranks of their factors.

    left, right: where their factors begin, [num, rows, rank] and [num, columns, rank], in flat buffers of those.
    """

    start: int
    num: int
    rows: int
    columns: int
    rank: int
    left: int
    right: int

    @property
    def stop(self) -> int:
        return self.start + self.num * self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.num, self.rows, self.columns)

    def left_of(self, flat: Tensor) -> Tensor:
        size = self.num * self.rows * self.rank
        return flat[self.left : self.left + size].view(self.num, self.rows, self.rank)

    def right_of(self, flat: Tensor) -> Tensor:
        size = self.num * self.columns * self.rank
        return flat[self.right : self.right + size].view(self.num, self.columns, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorPlan:
    """What of a flat buffer goes as factors, and what whole.

    vectors: ranges (start, stop) of the buffer that go whole, in order, behind the left factors.
    """

    matrices: tuple[Matrices, ...]
    vectors: tuple[tuple[int, int], ...]
    num_left: int
    num_right: int

    @property
    def num_whole(self) -> int:
        return sum(stop - start for start, stop in self.vectors)


def plan_factors(shapes: Sequence[tuple[int, ...]], rank: int) -> FactorPlan:
    """The plan for parameters of `shapes` laid end to end; all but the last two dims count matrices (experts)."""
    matrices: list[Matrices] = []
    vectors: list[tuple[int, int]] = []
    position = num_left = num_right = 0
    for shape in shapes:
        size = math.prod(shape)
        rows, columns = (1, *shape)[-2:]
        num = size // max(1, rows * columns)
        used = min(rank, rows, columns)
        if num and _LEAST_GAIN * used * (rows + columns) < rows * columns:
            matrices.append(
                Matrices(
                    start=position,
                    num=num,
                    rows=rows,
                    columns=columns,
                    rank=used,
                    left=num_left,
                    right=num_right,
                )
            )
            num_left += num * rows * used
            num_right += num * columns * used
        elif vectors and vectors[-1][1] == position:
            vectors[-1] = (vectors[-1][0], position + size)
        else:
            vectors.append((position, position + size))
        position += size
    return FactorPlan(
        matrices=tuple(matrices), vectors=tuple(vectors), num_left=num_left, num_right=num_right
    )


class PowerSGDReduction:
    """A `Reduction` by factors of the matrices that `plan` finds in the buffer."""

    def __init__(
        self,
        plan: FactorPlan,
        axis: Axis,
        *,
        num_elements: int,
        error_feedback: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self._plan, self._axis = plan, axis
        self._right = torch.empty(plan.num_right, device=device)
        self._error: Tensor | None = None
        if error_feedback and axis.size > 1:
            self._error = torch.zeros(num_elements, device=device)
        self.reset()

    def start(self, buffer: Tensor, out: Tensor | None) -> PendingReduction:
        return PendingReduction(self._steps(buffer, out))

    def _steps(self, buffer: Tensor, out: Tensor | None) -> Steps:
        axis, plan, size = self._axis, self._plan, self._axis.size
        begin = 0 if out is None else axis.rank * out.numel()
        result = buffer if out is None else out
        if size == 1:
            if out is not None:
                out.copy_(buffer)
            zero = buffer.new_zeros(())
            return ReductionReport(sent_bytes=0, fp32_bytes=0, error_squares=zero, squares=zero)

        wanted = buffer.clone() if self._error is None else self._error
        first = buffer.new_empty(plan.num_left + plan.num_whole)
        position = plan.num_left
        for start, stop in plan.vectors:
            first[position : position + stop - start] = buffer[start:stop]
            position += stop - start
        squares = torch.dot(first[plan.num_left :], first[plan.num_left :])
        for each in plan.matrices:
            matrix = each.of(wanted)
            if self._error is not None:
                matrix += each.of(buffer)
            squares += matrix.square().sum()
            torch.bmm(matrix, each.right_of(self._right), out=each.left_of(first))
        yield all_reduce(first, axis, async_op=True)

        second = buffer.new_empty(plan.num_right)
        error_squares = buffer.new_zeros(())
        for each in plan.matrices:
            left, matrix = each.left_of(first), each.of(wanted)
            left.copy_(torch.linalg.qr(left).Q)
            right = each.right_of(second)
            torch.bmm(matrix.mT, left, out=right)
            matrix.baddbmm_(left, right.mT, alpha=-1)
            error_squares += matrix.square().sum()
        if self._error is not None:
            self._error.nan_to_num_(0.0, 0.0, 0.0)
        yield all_reduce(second, axis, async_op=True)

        result.zero_()
        position = plan.num_left
        for start, stop in plan.vectors:
            _put(result, begin, first[position : position + stop - start], start)
            position += stop - start
        for each in plan.matrices:
            if each.start < begin + result.numel() and each.stop > begin:
                approximation = torch.bmm(each.left_of(first), each.right_of(second).mT)
                _put(result, begin, approximation.flatten(), each.start)
        self._start_next_with(second)
        num_bytes = sum(2 * (size - 1) * each.nbytes // size for each in (first, second))
        return ReductionReport(
            sent_bytes=num_bytes,
            fp32_bytes=fp32_bytes(buffer.numel(), size, is_everywhere=out is None),
            error_squares=error_squares,
            squares=squares,
        )

    def _start_next_with(self, summed: Tensor) -> None:
        """Keep the right factors, scaled to norm 1; those that vanished or are not finite begin anew."""
        self._right.copy_(self._initial_right())
        for each in self._plan.matrices:
            factor = each.right_of(summed)
            norm = torch.linalg.matrix_norm(factor, keepdim=True)
            is_sound = (norm > 0) & norm.isfinite()
            kept = each.right_of(self._right)
            kept.copy_(torch.where(is_sound, factor / norm, kept))

    def _initial_right(self) -> Tensor:
        # Of a seed of its own: the same on every rank, and no draw from the run's generators.
        return torch.randn(self._plan.num_right, generator=torch.Generator().manual_seed(0))

    def state(self) -> dict[str, Tensor]:
        return {"right": self._right} | ({} if self._error is None else {"error": self._error})

    def reset(self) -> None:
        self._right.copy_(self._initial_right())
        if self._error is not None:
            self._error.zero_()


def _put(result: Tensor, begin: int, values: Tensor, start: int) -> None:
    """Copy the part of flat `values`, which begin at element `start`, that lies in `result`, which does at `begin`."""
    low, high = max(begin, start), min(begin + result.numel(), start + values.numel())
    if low < high:
        result[low - begin : high - begin] = values[low - start : high - start]
