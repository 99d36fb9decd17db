"""Vocabulary-parallel cross-entropy against torch.nn.functional.cross_entropy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import counterflow.parallel.ops.loss
from counterflow.parallel.collectives import Axis
from counterflow.parallel.ops.loss import vocab_parallel_cross_entropy
from tests.rank_pool import RankPool

IGNORED = -100


def case(vocab_size: int, dtype: torch.dtype, scale: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [3, 5, V], targets [3, 5] with every 4th ignored, and a weight for each loss."""
    torch.manual_seed(1)
    logits = (scale * torch.randn(3, 5, vocab_size)).to(dtype)
    targets = torch.randint(0, vocab_size, (3, 5))
    targets.view(-1)[::4] = IGNORED
    targets[0, 1], targets[0, 2] = 0, vocab_size - 1
    return logits, targets, torch.randn(3, 5)


def compare_in_chunks(size: int, vocab_size: int, chunk_elements: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counterflow.parallel.ops.loss, "_CHUNK_ELEMENTS", chunk_elements)
        compare(size, vocab_size, torch.float32, 4.0)


def compare(size: int, vocab_size: int, dtype: torch.dtype, scale: float) -> None:
    rank = dist.get_rank()
    logits, targets, weights = case(vocab_size, dtype, scale)
    reference = logits.float().clone().requires_grad_()
    expected = F.cross_entropy(
        reference.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
    ).view(3, 5)
    (expected * weights).sum().backward()
    assert reference.grad is not None

    local_size = -(-vocab_size // size)
    # What stands in the padding must not matter.
    padded = F.pad(logits, (0, local_size * size - vocab_size), value=1e4)
    local = padded[..., rank * local_size :][..., :local_size].clone().requires_grad_()
    axis = Axis(group=dist.group.WORLD)
    loss = vocab_parallel_cross_entropy(local, targets, axis, vocab_size=vocab_size, ignore_index=IGNORED)
    (loss * weights).sum().backward()

    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6 * max(1.0, scale))
    assert (loss.view(-1)[::4] == 0).all()
    grad = F.pad(reference.grad, (0, local_size * size - vocab_size))
    grad = grad[..., rank * local_size :][..., :local_size]
    assert local.grad is not None
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(local.grad.float(), grad, rtol=eps, atol=4 * torch.finfo(torch.float32).eps)
    assert (local.grad.flatten(0, 1)[::4] == 0).all()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [5, 10, 16])  # over 4 ranks: one rank all padding, some, none
def test_matches_cross_entropy(ranks: RankPool, size: int, vocab_size: int) -> None:
    ranks.run(compare, size, size, vocab_size, torch.float32, 4.0)


@pytest.mark.parametrize("chunk_elements", [1, 8])
def test_rows_in_chunks(ranks: RankPool, chunk_elements: int) -> None:
    ranks.run(compare_in_chunks, 2, 2, 7, chunk_elements)


def test_bf16_logits_have_an_fp32_loss(ranks: RankPool) -> None:
    ranks.run(compare, 2, 2, 10, torch.bfloat16, 4.0)


def test_large_logits_do_not_overflow(ranks: RankPool) -> None:
    ranks.run(compare, 2, 2, 10, torch.float32, 1000.0)


def test_gradcheck() -> None:
    logits, targets, _ = case(7, torch.float64)
    padded = F.pad(logits, (0, 1)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_cross_entropy(x, targets, Axis(), vocab_size=7), padded
    )


def test_keeps_the_logits_and_nothing_of_their_size() -> None:
    logits, targets, _ = case(64, torch.bfloat16)
    logits.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        vocab_parallel_cross_entropy(logits, targets, Axis(), vocab_size=64)
    large = [t for t in kept if t.numel() >= logits.numel()]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]


@pytest.mark.parametrize("target", [-1, 7])
def test_target_outside_the_vocabulary_raises(target: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        vocab_parallel_cross_entropy(torch.zeros(2, 8), torch.tensor([1, target]), Axis(), vocab_size=7)
