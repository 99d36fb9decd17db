"""Cross-entropy over logits that are cut along the vocabulary, without gathering them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from counterflow.parallel.collectives import Axis, all_reduce

# Rows are taken in chunks of about this many logits, so that the fp32 temporaries stay small beside the
# logits themselves.
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTargets:
    """Targets as a rank sees them, of whose logits the first `columns` are of the vocabulary.

    index: int64, the column of a target; 0 where `elsewhere`, bool: this rank does not have it. ignored: bool.
    """

    columns: int
    index: Tensor
    elsewhere: Tensor
    ignored: Tensor

    def rows(self, part: slice) -> LocalTargets:
        """Those of some of the tokens."""
        return LocalTargets(
            columns=self.columns,
            index=self.index[part],
            elsewhere=self.elsewhere[part],
            ignored=self.ignored[part],
        )


def local_targets(
    targets: Tensor, axis: Axis, local_size: int, vocab_size: int, ignore_index: int
) -> LocalTargets:
    """Of `targets` [N], see `vocab_parallel_cross_entropy`, on a rank that has `local_size` columns with padding."""
    start = axis.rank * local_size
    columns = min(max(vocab_size - start, 0), local_size)
    ignored = targets == ignore_index
    index = targets - start
    elsewhere = ignored.clone()
    # A target outside the vocabulary is left to the rank at that edge, where the lookup raises.
    if start > 0:
        elsewhere |= index < 0
    if columns == 0 or start + columns < vocab_size:
        elsewhere |= index >= columns
    return LocalTargets(
        columns=columns, index=index.masked_fill(elsewhere, 0), elsewhere=elsewhere, ignored=ignored
    )


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, axis: Axis, *, vocab_size: int, ignore_index: int = -100
) -> Tensor:
    """The cross-entropy of each token, not reduced.

    logits: [.., padded_vocab / tp], this rank's slice of the vocabulary, any float dtype.
    targets: int64 [..], ids in the whole vocabulary, the same on every rank. A target of `ignore_index` has
        zero loss and zero gradient.
    vocab_size: size without padding; columns at or past it take no part.

    Returns [..] in fp32 (fp64 for fp64 logits), the same on every rank.
    Forward: an all-reduce (max) and an all-reduce (sum) of one and two numbers per token. Backward: none.
    Group: `axis`. Between the two, only the logits themselves and a few numbers per token are kept: the
    softmax is computed again in the backward. (The parallel form: Megatron-LM, arXiv 1909.08053, section 3.)
    """
    flat = logits.reshape(-1, logits.shape[-1])
    loss: Any = _VocabParallelCrossEntropy.apply(flat, targets.reshape(-1), axis, vocab_size, ignore_index)
    return loss.view(targets.shape)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, vocab_size: int, ignore_index: int
    ) -> Tensor:
        num_rows, local_size = logits.shape
        dtype = torch.promote_types(logits.dtype, torch.float32)
        local = local_targets(targets, axis, local_size, vocab_size, ignore_index)
        columns = local.columns

        maximum = logits.new_full((num_rows,), -torch.inf, dtype=dtype)
        # Row 0: the sum of exponentials; row 1: the target's logit, where this rank has it.
        sums = logits.new_zeros((2, num_rows), dtype=dtype)
        if columns:
            maximum = logits[:, :columns].amax(-1).to(dtype)
        all_reduce(maximum, axis, op=dist.ReduceOp.MAX)
        if columns:
            for rows in _chunks(num_rows, columns):
                shifted = logits[rows, :columns].to(dtype) - maximum[rows, None]
                sums[1, rows] = shifted.gather(1, local.index[rows, None]).squeeze(1)
                sums[0, rows] = shifted.exp_().sum(-1)
            sums[1].masked_fill_(local.elsewhere, 0)
        all_reduce(sums, axis)

        log_sum = sums[0].log()
        loss = (log_sum - sums[1]).masked_fill_(local.ignored, 0)
        ctx.save_for_backward(logits, maximum + log_sum, local.index, local.elsewhere, local.ignored)
        ctx.columns = columns
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, log_normalizer, index, elsewhere, ignored = ctx.saved_tensors
        columns: int = ctx.columns
        scale = grads[0].masked_fill(ignored, 0)
        target_scale = scale.masked_fill(elsewhere, 0)
        out = torch.empty_like(logits)
        out[:, columns:] = 0
        if columns:
            for rows in _chunks(logits.shape[0], columns):
                grad = logits[rows, :columns].to(log_normalizer.dtype) - log_normalizer[rows, None]
                grad.exp_().mul_(scale[rows, None])
                grad.scatter_add_(1, index[rows, None], -target_scale[rows, None])
                out[rows, :columns] = grad
        return out, None, None, None, None


def _chunks(num_rows: int, columns: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // columns)
    return [slice(start, start + step) for start in range(0, num_rows, step)]
