"""Collectives over one mesh axis: metered calls, and autograd pairs for the tensor-parallel layers.

Every call takes an `Axis` and passes through here, so the bytes each axis moves are counted in one place.
On an axis of size 1 a collective is the identity and touches no process group.

The autograd pairs follow Megatron-LM (arXiv 1909.08053, section 3) and its sequence parallelism
(Korthikanti et al., arXiv 2205.05198, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


class ByteMeter:
    """Counts the bytes that this rank sends, by the name of the axis.

    The convention is the payload this rank puts on the wire under a ring algorithm over n ranks, whatever
    algorithm the backend picks, for a whole (gathered, reduced) tensor of b bytes:

    - all-gather, reduce-scatter: (n - 1) / n * b
    - all-reduce: 2 * (n - 1) / n * b
    - all-to-all: what is addressed to the other ranks
    - broadcast: b, except on the last rank of the ring
    - send: b
    """

    def __init__(self) -> None:
        self._sent_bytes: dict[str, int] = {}
        # A backward on a device runs in autograd's own thread.
        self._lock = Lock()

    def add(self, axis_name: str, num_bytes: int) -> None:
        """Count `num_bytes` sent along `axis_name`."""
        with self._lock:
            self._sent_bytes[axis_name] = self._sent_bytes.get(axis_name, 0) + num_bytes

    def sent_bytes(self) -> dict[str, int]:
        """Bytes sent since the last reset, by axis name."""
        with self._lock:
            return dict(self._sent_bytes)

    def reset(self) -> None:
        """Start counting from zero again."""
        with self._lock:
            self._sent_bytes.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One rank's view of a mesh axis.

    group: the ranks along the axis; None where there is one process and no process group.
    name: what the meter counts under.
    """

    group: dist.ProcessGroup | None = None
    name: str = "tensor"
    meter: ByteMeter | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """This rank's index along the axis."""
        return 0 if self.group is None else self.group.rank()

    def count(self, num_bytes: int) -> None:
        """Count `num_bytes` sent along this axis, where a meter is attached."""
        if self.meter is not None:
            self.meter.add(self.name, num_bytes)


def set_timeout(group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """How long operations of `group` that begin from now on wait for its ranks; None is a single process."""
    if group is not None:
        group.set_timeout(timedelta(seconds=timeout_s))


@contextmanager
def named(operation: str, axis: Axis) -> Iterator[None]:
    """An error within says which operation of which ranks it was: a time-out of gloo names neither."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(_note(operation, axis))
        raise


def barrier(axis: Axis) -> None:
    """Return once every rank of the axis has come here."""
    if axis.size > 1:
        with named("barrier", axis):
            dist.barrier(group=axis.group)


class _NamedWork:
    """torch's work, whose wait says in an error which operation of which ranks it was."""

    __slots__ = ("_axis", "_operation", "_work")

    def __init__(self, work: dist.Work, operation: str, axis: Axis) -> None:
        self._work, self._operation, self._axis = work, operation, axis

    def wait(self, *args: Any) -> Any:
        try:
            return self._work.wait(*args)
        except RuntimeError as error:
            error.add_note(_note(self._operation, self._axis))
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _called(operation: str, axis: Axis, call: Callable[[], dist.Work | None]) -> dist.Work | None:
    try:
        work = call()
    except RuntimeError as error:
        error.add_note(_note(operation, axis))
        raise
    return None if work is None else cast(dist.Work, _NamedWork(work, operation, axis))


def _note(operation: str, axis: Axis) -> str:
    assert axis.group is not None
    try:
        ranks = dist.get_process_group_ranks(axis.group)
    except (RuntimeError, ValueError, KeyError):  # the group has been destroyed meanwhile
        return f"in {operation} over the {axis.name} axis"
    shown = [*map(str, ranks[:8]), *([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])]
    return f"in {operation} over the {axis.name} axis, of ranks {', '.join(shown)}"


def all_gather_into(out: Tensor, tensor: Tensor, axis: Axis, *, async_op: bool = False) -> dist.Work | None:
    """Fill `out` with every rank's `tensor`, in rank order along dim 0.

    `out` has n times the elements of `tensor`; both are contiguous. Returns the work to wait for where
    `async_op` and the axis has several ranks, else None: it is done.
    """
    if axis.size == 1:
        out.copy_(tensor.view_as(out))
        return None
    axis.count((axis.size - 1) * tensor.nbytes)
    # Flat, because gloo takes only concatenations along dim 0, not stacks.
    return _called(
        "all-gather",
        axis,
        lambda: dist.all_gather_single(out.view(-1), tensor.view(-1), group=axis.group, async_op=async_op),
    )


def reduce_scatter_into(
    out: Tensor,
    tensor: Tensor,
    axis: Axis,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """Fill `out` with this rank's slice, along dim 0, of the reduction of every rank's `tensor`.

    `tensor` has n times the elements of `out`; both are contiguous. Returns as `all_gather_into` does.
    """
    if axis.size == 1:
        out.copy_(tensor.view_as(out))
        return None
    axis.count((axis.size - 1) * out.nbytes)
    return _called(
        "reduce-scatter",
        axis,
        lambda: dist.reduce_scatter_single(
            out.view(-1), tensor.view(-1), op=op, group=axis.group, async_op=async_op
        ),
    )


def all_reduce(
    tensor: Tensor,
    axis: Axis,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce `tensor` over the axis in place. Returns as `all_gather_into` does."""
    if axis.size == 1:
        return None
    axis.count(2 * (axis.size - 1) * tensor.nbytes // axis.size)
    return _called(
        "all-reduce",
        axis,
        lambda: dist.all_reduce(tensor, op=op, group=axis.group, async_op=async_op),
    )


def broadcast(tensor: Tensor, axis: Axis, *, source: int = 0, async_op: bool = False) -> dist.Work | None:
    """Copy `tensor` of the rank at index `source` of the axis to every rank, in place.

    Returns as `all_gather_into` does.
    """
    if axis.size == 1:
        return None
    if axis.rank != (source - 1) % axis.size:
        axis.count(tensor.nbytes)
    return _called(
        "broadcast",
        axis,
        lambda: dist.broadcast(tensor, group=axis.group, group_src=source, async_op=async_op),
    )


def all_to_all_into(
    out: Tensor,
    tensor: Tensor,
    axis: Axis,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Send slice j of `tensor` (along dim 0) to rank j; fill `out` with what the ranks sent here, in order.

    The splits are rows per rank; None cuts evenly. Returns as `all_gather_into` does.
    """
    if axis.size == 1:
        out.copy_(tensor)
        return None
    if input_splits is None:
        kept_bytes = tensor.nbytes // axis.size
    else:
        kept_bytes = input_splits[axis.rank] * (tensor.nbytes // max(1, tensor.shape[0]))
    axis.count(tensor.nbytes - kept_bytes)
    return _called(
        "all-to-all",
        axis,
        lambda: dist.all_to_all_single(
            out,
            tensor,
            None if output_splits is None else list(output_splits),
            None if input_splits is None else list(input_splits),
            group=axis.group,
            async_op=async_op,
        ),
    )


def _all_reduced(tensor: Tensor, axis: Axis) -> Tensor:
    # A copy: the tensor may be an activation or a gradient that someone else still reads.
    out = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce(out, axis)
    return out


def _all_gathered(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    tensor, dim = tensor.contiguous(), dim % tensor.dim()
    out = tensor.new_empty(axis.size, *tensor.shape)
    all_gather_into(out, tensor, axis)
    return out.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scattered(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    _check_divisible(tensor, axis, dim)
    dim %= tensor.dim()
    slices = tensor.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    out = torch.empty_like(slices[0])
    reduce_scatter_into(out, slices, axis)
    return out


def _own_slice(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    _check_divisible(tensor, axis, dim)
    # A copy, so that the whole tensor is not kept alive by a view of its slice.
    return tensor.chunk(axis.size, dim)[axis.rank].clone(memory_format=torch.contiguous_format)


def _check_divisible(tensor: Tensor, axis: Axis, dim: int) -> None:
    if tensor.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of a tensor of shape {tuple(tensor.shape)} is cut over the {axis.size} ranks of the "
            f"{axis.name} axis and must be a multiple of {axis.size}; change the sequence length or the axis"
        )


class _CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduced(grads[0], ctx.axis), None


class _ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return _all_reduced(tensor, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _GatherFromSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all_gathered(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _reduce_scattered(grads[0], ctx.axis, ctx.dim), None, None


class _ReduceScatterToSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _reduce_scattered(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gathered(grads[0], ctx.axis, ctx.dim), None, None


class _SplitToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _own_slice(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gathered(grads[0], ctx.axis, ctx.dim), None, None


class _GatherFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all_gathered(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _own_slice(grads[0], ctx.axis, ctx.dim), None, None


def copy_to_tensor_parallel(tensor: Tensor, axis: Axis) -> Tensor:
    """Enter a tensor-parallel region with an input that every rank holds whole.

    Forward: identity. Backward: all-reduce (sum). Group: `axis`. The shape is kept.
    """
    return tensor if axis.size == 1 else _apply(_CopyToTensorParallel, tensor, axis)


def reduce_from_tensor_parallel(tensor: Tensor, axis: Axis) -> Tensor:
    """Leave a tensor-parallel region in which every rank holds one term of the output.

    Forward: all-reduce (sum). Backward: identity. Group: `axis`. The shape is kept.
    """
    return tensor if axis.size == 1 else _apply(_ReduceFromTensorParallel, tensor, axis)


def gather_from_sequence_parallel(tensor: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Enter a tensor-parallel region from a sequence cut over the axis along `dim`.

    Forward: all-gather along `dim`, [.., s, ..] -> [.., n*s, ..]. Backward: reduce-scatter (sum) along `dim`,
    because each rank's region uses the whole sequence. Group: `axis`.
    """
    return tensor if axis.size == 1 else _apply(_GatherFromSequenceParallel, tensor, axis, dim)


def reduce_scatter_to_sequence_parallel(tensor: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Leave a tensor-parallel region into a sequence cut over the axis along `dim`.

    Forward: reduce-scatter (sum) along `dim`, [.., n*s, ..] -> [.., s, ..]. Backward: all-gather along `dim`.
    Group: `axis`. Raises ValueError: where `dim` is no multiple of the axis size.
    """
    return tensor if axis.size == 1 else _apply(_ReduceScatterToSequenceParallel, tensor, axis, dim)


def split_to_tensor_parallel(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Keep this rank's slice, along `dim`, of a tensor that every rank holds whole.

    Forward: slice, [.., n*s, ..] -> [.., s, ..]. Backward: all-gather along `dim`. Group: `axis`.
    Raises ValueError: where `dim` is no multiple of the axis size.
    """
    return tensor if axis.size == 1 else _apply(_SplitToTensorParallel, tensor, axis, dim)


def gather_from_tensor_parallel(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Make whole, on every rank, a tensor cut over the axis along `dim`, for a computation that all repeat.

    Forward: all-gather along `dim`, [.., s, ..] -> [.., n*s, ..]. Backward: slice, because every rank's
    gradient is already the whole one. Group: `axis`.
    """
    return tensor if axis.size == 1 else _apply(_GatherFromTensorParallel, tensor, axis, dim)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """`function.apply`, whose return type torch does not state."""
    return function.apply(*args)  # type: ignore[no-any-return]
