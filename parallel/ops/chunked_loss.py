"""The output head and its cross-entropy in chunks of tokens, cut along the vocabulary: no whole logits anywhere.

Note [One pass]
The gradient of a cross-entropy needs nothing that comes after it but one number, by which it is multiplied. So the
forward computes nothing where a gradient is wanted. The backward goes over the tokens once: the logits of a chunk,
its losses, their gradient, the gradient of its hidden states, and its term of the weight's gradient, before the next
chunk. Between the two the hidden states are kept, under sequence parallelism this rank's only. The loss is known after
the backward, and told then; what the forward returns is zero, with the gradient of the loss.

The weight's gradient is added to its buffer there, in an input gradient (I) too: gradients of logits are as large as
logits, and are not kept for a W.

Cutting along the vocabulary is Megatron-LM's (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from counterflow.parallel.collectives import (
    Axis,
    all_reduce,
    gather_from_sequence_parallel,
    reduce_scatter_to_sequence_parallel,
)
from counterflow.parallel.ops.loss import LocalTargets, local_targets
from counterflow.parallel.ops.loss_config import tokens_at_once
from counterflow.parallel.ops.weight_grad import is_filed, is_wanted

SEQUENCE_DIM = 1


class GradientSink(Protocol):
    """Where the gradients of parameters are accumulated."""

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        """The tensor, in the shape of `parameter`, that its gradient is added to."""
        ...

    def is_watched(self, parameter: nn.Parameter) -> bool:
        """Whether hooks are to see the gradient of `parameter`, which then goes through autograd."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How the loss is cut, over ranks and into chunks; see `chunked_cross_entropy`."""

    axis: Axis
    vocab_size: int
    chunk_tokens: int
    sequence_parallel: bool
    ignore_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Which gradients of the sum of losses a pass computes, `scale` times.

    hidden: whether that of the hidden states. weight, bias: what theirs are added to; None: not wanted.
    """

    scale: Tensor
    hidden: bool
    weight: Tensor | None
    bias: Tensor | None


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    chunk_tokens: int,
    bias: Tensor | None = None,
    sequence_parallel: bool = False,
    ignore_index: int = -100,
    sink: GradientSink | None = None,
    found: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The sum over tokens of the cross-entropy of hidden W^T (+ bias), without its value where a gradient is wanted.

    hidden: [B, S, H], whole on every rank, or [B, S/tp, H] under sequence parallelism. weight: [padded vocab / tp, H]
        and bias: [padded vocab / tp], this rank's rows; those at or past `vocab_size` are padding and take no part.
    targets: int64 [B, S], ids in the whole vocabulary, the same on every rank; one of `ignore_index` has no loss.
    chunk_tokens: see `LossConfig`. sink: where gradients of weight and bias are added; None: autograd is given them.
    found: called with the sum, fp64, once it is known: in the backward (Note [One pass]), or here without gradients.

    Returns a scalar, fp32 (fp64 for fp64): the sum where no gradient is wanted, else zero with the sum's gradient.
    Each chunk has an all-reduce (max) and an all-reduce (sum) of one and two numbers per token. The hidden states are
    gathered along the sequence before the first chunk, and their gradient reduce-scattered after the last, or
    all-reduced. Group: `axis`.
    """
    cut = _Cut(
        axis=axis,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        sequence_parallel=sequence_parallel,
        ignore_index=ignore_index,
    )
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        apply = cast(Callable[..., Tensor], _ChunkedCrossEntropy.apply)  # pyright: ignore[reportUnknownMemberType]
        return apply(hidden, weight, bias, targets, cut, sink, found)
    total, _ = _pass(hidden, weight, bias, targets, cut, None)
    if found is not None:
        found(total)
    return total.to(torch.promote_types(hidden.dtype, torch.float32))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        targets: Tensor,
        cut: _Cut,
        sink: GradientSink | None,
        found: Callable[[Tensor], None] | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, targets)
        # The Parameter objects themselves: their storage may be freed and filled again (ZeRO-3) before backward.
        ctx.weight, ctx.bias, ctx.cut, ctx.sink, ctx.found = weight, bias, cut, sink, found
        return hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, targets = ctx.saved_tensors
        weight: nn.Parameter = ctx.weight
        bias: nn.Parameter | None = ctx.bias
        positions = [position for position in (1, 2) if ctx.needs_input_grad[position]]
        is_added = is_filed(ctx, *positions)
        sums: dict[int, Tensor] = {}
        for position in positions:
            parameter = weight if position == 1 else bias
            assert parameter is not None
            if is_added:
                sums[position] = ctx.sink.gradient_buffer(parameter)
            elif is_wanted(ctx, position):
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                sums[position] = torch.zeros_like(parameter, dtype=dtype)
        total, grad_hidden = _pass(
            hidden,
            weight.detach(),
            None if bias is None else bias.detach(),
            targets,
            ctx.cut,
            _Wanted(scale=grads[0], hidden=ctx.needs_input_grad[0], weight=sums.get(1), bias=sums.get(2)),
        )
        if ctx.found is not None:
            ctx.found(total)
        returned = [
            None if is_added or position not in sums else sums[position].to(weight.dtype)
            for position in (1, 2)
        ]
        return grad_hidden, *returned, None, None, None, None


@torch.no_grad()
def _pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cut: _Cut, wanted: _Wanted | None
) -> tuple[Tensor, Tensor | None]:
    """The sum of the losses, fp64, and the gradient of `hidden`; wanted: None where no gradient is."""
    axis = cut.axis
    if cut.sequence_parallel:
        hidden = gather_from_sequence_parallel(hidden, axis, SEQUENCE_DIM)
    rows = hidden.reshape(-1, hidden.shape[-1])
    local = local_targets(targets.reshape(-1), axis, len(weight), cut.vocab_size, cut.ignore_index)
    # Padding is left out of every product.
    used, used_bias = weight[: local.columns], None if bias is None else bias[: local.columns]
    grad_rows = torch.empty_like(rows) if wanted is not None and wanted.hidden else None
    total = rows.new_zeros((), dtype=torch.float64)
    step = tokens_at_once(
        cut.chunk_tokens, num_tokens=len(rows), hidden_size=rows.shape[1], num_columns=len(weight)
    )
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        chunk = local.rows(part)
        losses, grad_logits = _of_chunk(
            rows[part], used, used_bias, chunk, axis, None if wanted is None else wanted.scale
        )
        total += losses.sum(dtype=torch.float64)
        if grad_logits is None or wanted is None:
            continue
        if grad_rows is not None:
            torch.mm(grad_logits, used, out=grad_rows[part])
        if wanted.weight is not None:
            _add_product(wanted.weight[: local.columns], grad_logits, rows[part])
        if wanted.bias is not None:
            wanted.bias[: local.columns] += grad_logits.sum(0)
        del grad_logits
    if grad_rows is None:
        return total, None
    grad = grad_rows.view(hidden.shape)
    if cut.sequence_parallel:
        return total, reduce_scatter_to_sequence_parallel(grad, axis, SEQUENCE_DIM)
    all_reduce(grad, axis)
    return total, grad


def _of_chunk(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    local: LocalTargets,
    axis: Axis,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The losses of `rows`, and the gradient of their logits times `scale`; scale: None where that is not wanted."""
    product = nn.functional.linear(rows, weight, bias)
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    del product
    maximum = logits.new_full((len(rows),), -torch.inf)
    # Row 0: the sum of exponentials; row 1: the target's logit, where this rank has it.
    sums = logits.new_zeros((2, len(rows)))
    if local.columns:
        maximum = logits.amax(-1)
    all_reduce(maximum, axis, op=dist.ReduceOp.MAX)
    if local.columns:
        logits.sub_(maximum[:, None])
        sums[1] = logits.gather(1, local.index[:, None]).squeeze(1)
        sums[1].masked_fill_(local.elsewhere, 0)
        sums[0] = logits.exp_().sum(-1)
    all_reduce(sums, axis)
    losses = (sums[0].log() - sums[1]).masked_fill_(local.ignored, 0)
    if scale is None:
        return losses, None
    if local.columns:
        scales = scale.to(logits.dtype).expand(len(rows)).masked_fill(local.ignored, 0)
        logits.mul_((scales / sums[0])[:, None])
        logits.scatter_add_(1, local.index[:, None], -scales.masked_fill(local.elsewhere, 0)[:, None])
    return losses, logits.to(rows.dtype)


def _add_product(total: Tensor, grad_logits: Tensor, rows: Tensor) -> None:
    """total [V, H] += grad_logits [N, V]^T rows [N, H]; what is multiplied apart is no larger than `grad_logits`."""
    if total.dtype == grad_logits.dtype == rows.dtype:
        total.addmm_(grad_logits.t(), rows)
        return
    step = max(1, grad_logits.numel() // rows.shape[1])
    for start in range(0, len(total), step):
        part = slice(start, start + step)
        total[part] += grad_logits[:, part].t() @ rows
