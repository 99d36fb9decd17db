"""Deferred weight gradients: a linear layer's backward returns dX at once and files dW for later.

Zero-bubble schedules (Qi et al., arXiv 2401.10241) split a backward into I, the input gradient that the
previous stage waits for, and W, the weight gradient that nobody waits for. `split_linear` is the operator,
`WeightGradStore` keeps what W needs under its micro-batch until the schedule asks for it. A store belongs to
one stage, so nothing is global and W may come in any order. `split_grouped_linear` is the same for a stack of
experts. Which layers of a module use them is told in adoption.py.

Note [What is filed]
A weight gradient is filed where plain torch would have added it to `.grad` in the backward that runs, and nowhere
else. torch.autograd.grad for an input, taken within a forward, does not reach the weight, and torch.autograd.grad for
the weight wants the gradient itself: then it is returned as any other. So it is where the backward is differentiated
again (create_graph), and where somebody watches the parameter by a hook, which autograd has to call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from counterflow.parallel.dry import is_dry
from counterflow.parallel.ops.fp8 import GRADIENTS, fp8_product


class WeightGradSink(Protocol):
    """Where a linear layer's backward files what its weight gradient needs."""

    def add(self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, grad_output: Tensor) -> None:
        """Take x [..., in] and grad_output [..., out] of one application of the layer."""
        ...

    def add_grouped(self, weight: nn.Parameter, x: Tensor, grad_output: Tensor, ends: Tensor) -> None:
        """Take x [P, in] and grad_output [P, out] of one application of a stack of layers, weight [E, out, in].

        ends: int32 [E], see `grouped_product`.
        """
        ...

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that a gradient is added to that is not filed."""
        ...

    def is_watched(self, parameter: nn.Parameter) -> bool:
        """Whether hooks are to see the gradient of `parameter`, which then goes through autograd."""
        ...


def _is_never_watched(parameter: nn.Parameter) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class _Deferred:
    weight: nn.Parameter
    bias: nn.Parameter | None
    x: Tensor
    grad_output: Tensor
    ends: Tensor | None = None


class WeightGradStore:
    """The weight gradients of one stage: computed at once, or kept per micro-batch until `run`.

    gradient_buffer: returns the tensor (parameter's shape, any float dtype) that a gradient is added to.
    is_watched: see `WeightGradSink`.
    held_bytes, peak_held_bytes: memory kept alive for W, each tensor counted once.
    """

    def __init__(
        self,
        gradient_buffer: Callable[[nn.Parameter], Tensor],
        is_watched: Callable[[nn.Parameter], bool] = _is_never_watched,
    ) -> None:
        self._gradient_buffer, self._is_watched = gradient_buffer, is_watched
        self._microbatch: int | None = None
        self._held: dict[int, list[_Deferred]] = {}
        self.held_bytes = 0
        self.peak_held_bytes = 0

    @contextmanager
    def deferring(self, microbatch: int) -> Generator[None]:
        """Within: gradients are kept under `microbatch` instead of being computed."""
        assert self._microbatch is None, "I of two micro-batches at once on one stage"
        assert microbatch not in self._held, f"micro-batch {microbatch} already has weight gradients waiting"
        self._microbatch = microbatch
        self._held[microbatch] = []
        try:
            yield
        finally:
            self._microbatch = None
            self.held_bytes += _bytes_of(self._held[microbatch])
            self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        return self._gradient_buffer(parameter)

    def is_watched(self, parameter: nn.Parameter) -> bool:
        return self._is_watched(parameter)

    def add(self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, grad_output: Tensor) -> None:
        self._take(_Deferred(weight, bias, x.detach(), grad_output.detach()))

    def add_grouped(self, weight: nn.Parameter, x: Tensor, grad_output: Tensor, ends: Tensor) -> None:
        self._take(_Deferred(weight, None, x.detach(), grad_output.detach(), ends))

    def _take(self, deferred: _Deferred) -> None:
        if self._microbatch is None:
            self._accumulate(deferred)
        else:
            self._held[self._microbatch].append(deferred)

    def run_so_far(self, microbatch: int) -> int:
        """Within `deferring(microbatch)`: compute and add what it has kept until now; how many bytes that was."""
        held = self._held[microbatch]
        num_bytes = _bytes_of(held)
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes + num_bytes)
        while held:
            self._accumulate(held.pop(0))
        return num_bytes

    def run(self, microbatch: int) -> None:
        """W: compute and add every gradient kept under `microbatch`."""
        held = self._held.pop(microbatch)
        self.held_bytes -= _bytes_of(held)
        while held:
            self._accumulate(held.pop(0))

    @property
    def is_empty(self) -> bool:
        return not self._held

    def discard(self) -> None:
        """Forget what is kept, after a step that failed."""
        self._held.clear()
        self._microbatch = None
        self.held_bytes = 0

    @torch.no_grad()
    def _accumulate(self, deferred: _Deferred) -> None:
        if deferred.ends is not None:
            if deferred.weight.requires_grad:
                grad = grouped_weight_gradient(deferred.x, deferred.grad_output, deferred.ends)
                self._gradient_buffer(deferred.weight).add_(grad)
            return
        grad_output = deferred.grad_output.reshape(-1, deferred.grad_output.shape[-1])
        if deferred.weight.requires_grad:
            x = deferred.x.reshape(-1, deferred.x.shape[-1])
            buffer = self._gradient_buffer(deferred.weight)
            if buffer.dtype == x.dtype == grad_output.dtype:
                buffer.addmm_(grad_output.t(), x)
            else:
                buffer.add_(grad_output.t() @ x.to(grad_output.dtype))
        if deferred.bias is not None and deferred.bias.requires_grad:
            self._gradient_buffer(deferred.bias).add_(grad_output.sum(0))


def _bytes_of(held: list[_Deferred]) -> int:
    # q, k and v share one input: the same storage is one piece of memory.
    # Not by address: tensors without values (a dry run) have none.
    tensors = {
        (t.untyped_storage()._cdata, t.storage_offset()): t.nbytes
        for entry in held
        for t in (entry.x, entry.grad_output)
    }
    return sum(tensors.values())


def is_filed(ctx: Any, *positions: int) -> bool:
    """Within the backward of a Function: whether the gradients at `positions` of its tensors go to the sink of `ctx`.

    See Note [What is filed]. Those positions are parameters that need a gradient.
    """
    if ctx.sink is None or torch.is_grad_enabled():
        return False
    nodes = [ctx.next_functions[position][0] for position in positions]
    return all(
        node is not None and _is_executed(node) and not ctx.sink.is_watched(node.variable) for node in nodes
    )


def _is_executed(node: Any) -> bool | None:
    """Whether the backward that runs accumulates at `node`, a parameter's; None: it hands that gradient out."""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # pyright: ignore
    except RuntimeError:  # torch.autograd.grad for the parameter itself
        return None


def is_wanted(ctx: Any, position: int) -> bool:
    """Within the backward of a Function: whether anybody takes the gradient at `position` of its tensors."""
    node = ctx.next_functions[position][0]
    return node is not None and _is_executed(node) is not False


class _SplitLinear(torch.autograd.Function):
    """y = x W^T + b, with dX returned by backward and dW, db handed to a sink or returned as well."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        sink: WeightGradSink,
        fp8: bool,
        is_kept: bool,
    ) -> Tensor:
        out = _linear(x, weight, bias, fp8)
        if (
            out._is_view()
        ):  # of three dimensions it is; autograd lets nobody change a Function's view in place
            out = torch.ops.aten._unsafe_view(out, out.shape)
        ctx.fp8 = fp8
        ctx.x_dtype = x.dtype
        ctx.version = weight._version if is_kept and ctx.needs_input_grad[0] else None
        # A frozen weight needs no input kept.
        ctx.save_for_backward(x.to(out.dtype) if ctx.needs_input_grad[1] else None)
        # The Parameter object itself: its storage may be freed and filled again (ZeRO-3) before backward.
        ctx.weight, ctx.bias, ctx.sink = weight, bias, sink
        return out

    @staticmethod
    def backward(
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        (grad_output,) = grad_outputs
        x: Tensor | None = ctx.saved_tensors[0]
        weight: nn.Parameter = ctx.weight
        bias: nn.Parameter | None = ctx.bias
        grad_x = grad_weight = grad_bias = None
        if ctx.version is not None and ctx.version != weight._version:
            raise RuntimeError(
                f"the weight {list(weight.shape)} of a linear layer was changed in place between a micro-batch's "
                "forward and its backward, which needs it as it was; change weights between steps, or compute with a "
                "changed copy"
            )
        if ctx.needs_input_grad[0] and ctx.fp8:
            assert not torch.is_grad_enabled(), "a product in fp8 is not differentiated twice"
            grad_x = fp8_product(grad_output, weight.detach().t(), GRADIENTS)
        elif ctx.needs_input_grad[0]:
            grad_x = grad_output.matmul(weight.to(grad_output.dtype)).to(ctx.x_dtype)
        positions = [position for position in (1, 2) if ctx.needs_input_grad[position]]
        if x is not None and is_filed(ctx, *positions):
            ctx.sink.add(weight, bias if 2 in positions else None, x, grad_output)
            return grad_x, None, None, None, None, None
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        if 1 in positions and is_wanted(ctx, 1):
            assert x is not None
            grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1]).to(rows.dtype)).to(weight.dtype)
        if 2 in positions and bias is not None and is_wanted(ctx, 2):
            grad_bias = rows.sum(0).to(bias.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, fp8: bool) -> Tensor:
    if not fp8:
        return F.linear(x, weight, bias)
    out = fp8_product(x, weight)
    return out if bias is None else out + bias


def split_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    sink: WeightGradSink | None,
    *,
    fp8: bool = False,
    is_kept: bool = False,
) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]; the weight gradient goes to `sink`.

    Without a sink, or where no gradient is wanted, it is torch.nn.functional.linear; so it is under the transforms of
    torch.func and in forward mode, which take no Function of this kind. fp8: see parallel/ops/fp8.py.
    is_kept: the weight stays in its memory until the backward, which raises RuntimeError where somebody changed it.
    """
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return _linear(x, weight, bias, fp8)
    if sink is None or _is_transformed():
        assert not fp8, "a product in fp8 has no weight gradient of its own"
        return F.linear(x, weight, bias)
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.is_floating_point() and x.dtype is not torch.float64:
        # As the product would do it, but in the graph.
        x = x.to(torch.get_autocast_dtype(device_type))
    apply = cast(Callable[..., Tensor], _SplitLinear.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(x, weight, bias, sink, fp8, is_kept)


def _is_transformed() -> bool:
    forward_level = cast(int, getattr(torch.autograd.forward_ad, "_current_level", -1))
    return forward_level >= 0 or bool(torch._C._are_functorch_transforms_active())  # pyright: ignore


# What torch.nn.functional.grouped_mm takes: these types, and strides of so many bytes.
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROUPED_STRIDE_BYTES = 16


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times its own matrix: x [P, n], weight [E, n, m] -> [P, m].

    ends: int32 [E]; group e is the rows from the end of the one before to ends[e]. Groups may be empty.
    """
    if is_dry(x):  # its groups have no sizes
        return x.new_empty(len(x), weight.shape[2])
    if _fits_grouped_mm(x, weight.shape[1:]):
        return F.grouped_mm(x, weight, offs=ends)
    parts = [x[start:stop] @ weight[group] for group, (start, stop) in enumerate(_ranges(ends))]
    return torch.cat(parts) if parts else x.new_zeros(0, weight.shape[2])


def grouped_weight_gradient(x: Tensor, grad_output: Tensor, ends: Tensor) -> Tensor:
    """x [P, in], grad_output [P, out] -> [E, out, in], zero for a group without rows."""
    x = x.to(grad_output.dtype)
    if is_dry(x):
        return x.new_empty(len(ends), grad_output.shape[1], x.shape[1])
    if _fits_grouped_mm(x, (x.shape[1], grad_output.shape[1])):
        found = F.grouped_mm(grad_output.contiguous().t(), x.contiguous(), offs=ends)
        return _without_empty(found, ends) if _skips_empty_groups(x.device) else found
    out = x.new_zeros(len(ends), grad_output.shape[1], x.shape[1])
    for group, (start, stop) in enumerate(_ranges(ends)):
        torch.mm(grad_output[start:stop].t(), x[start:stop], out=out[group])
    return out


def _skips_empty_groups(device: torch.device) -> bool:
    """Whether the kernel may leave what was in memory before where a group has no rows (pytorch 172439, on B200)."""
    return device.type == "cuda"


def _without_empty(gradient: Tensor, ends: Tensor) -> Tensor:
    """`gradient` [E, ..] with zeros for the groups without rows, in place; nothing of it is read by the host."""
    is_empty = torch.diff(ends, prepend=torch.zeros_like(ends[:1])) == 0
    return gradient.masked_fill_(is_empty.view(-1, *[1] * (gradient.dim() - 1)), 0)


def _ranges(ends: Tensor) -> pairwise[tuple[int, int]]:
    return pairwise([0, *cast("list[int]", ends.tolist())])  # pyright: ignore[reportUnknownMemberType]


def _fits_grouped_mm(x: Tensor, widths: Sequence[int]) -> bool:
    return (
        x.dtype in _GROUPED_DTYPES
        and len(x) > 0
        and all(width * x.element_size() % _GROUPED_STRIDE_BYTES == 0 for width in widths)
    )


class _SplitGroupedLinear(torch.autograd.Function):
    """Rows of group e times weight[e]^T; the weight gradient goes to the sink, or is returned without one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, ends: Tensor, sink: WeightGradSink | None
    ) -> Tensor:
        ctx.save_for_backward(x, ends)
        # The Parameter object itself, as above.
        ctx.weight, ctx.sink = weight, sink
        return grouped_product(x, weight.detach().transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_output = grad_outputs[0].contiguous()
        x, ends = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_product(grad_output, ctx.weight.detach(), ends)
        if ctx.needs_input_grad[1] and is_filed(ctx, 1):
            ctx.sink.add_grouped(ctx.weight, x, grad_output, ends)
        elif ctx.needs_input_grad[1] and is_wanted(ctx, 1):
            grad_weight = grouped_weight_gradient(x, grad_output, ends)
        return grad_x, grad_weight, None, None


def split_grouped_linear(
    x: Tensor, weight: nn.Parameter, ends: Tensor, sink: WeightGradSink | None
) -> Tensor:
    """x [P, in], sorted by group, weight [E, out, in], ends int32 [E] (see `grouped_product`) -> [P, out].

    The weight gradient goes to `sink`; without one it is an ordinary gradient.
    """
    apply = cast(Callable[..., Tensor], _SplitGroupedLinear.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(x, weight, ends, sink)
