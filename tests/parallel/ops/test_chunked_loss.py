"""Head and cross-entropy in chunks of tokens, against torch's on whole logits; and what they take of memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from counterflow.parallel.collectives import Axis
from counterflow.parallel.ops import loss_config
from counterflow.parallel.ops.chunked_loss import chunked_cross_entropy
from counterflow.parallel.ops.loss import vocab_parallel_cross_entropy
from counterflow.parallel.ops.loss_config import tokens_at_once
from counterflow.parallel.ops.weight_grad import WeightGradStore, split_linear
from tests.rank_pool import RankPool

IGNORED, HIDDEN = -100, 12


def case(vocab_size: int, *, all_ignored: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [3, 4, H], weight [V, H], bias [V], targets [3, 4] with every 4th ignored."""
    torch.manual_seed(1)
    hidden, weight, bias = torch.randn(3, 4, HIDDEN), torch.randn(vocab_size, HIDDEN), torch.randn(vocab_size)
    targets = torch.randint(0, vocab_size, (3, 4))
    targets[0, 1], targets[0, 2] = 0, vocab_size - 1
    targets.view(-1)[:: 1 if all_ignored else 4] = IGNORED
    return hidden, weight, bias, targets


def compare(
    size: int,
    vocab_size: int,
    chunk_tokens: int,
    sequence_parallel: bool,
    is_deferred: bool,
    scale: float = 1.0,
) -> None:
    """On this rank of `size`: the loss, in the backward and without one, and the gradients of each input."""
    rank, axis = dist.get_rank(), Axis(group=dist.group.WORLD)
    hidden, weight, bias, targets = case(vocab_size)
    hidden *= scale
    whole = [each.double().requires_grad_() for each in (hidden, weight, bias)]
    logits = whole[0] @ whole[1].t() + whole[2]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    (expected / 7).backward()
    grad_hidden, grad_weight, grad_bias = (each.grad for each in whole)
    assert grad_hidden is not None
    assert grad_weight is not None
    assert grad_bias is not None

    local_size = -(-vocab_size // size)
    here = slice(rank * local_size, (rank + 1) * local_size)
    padding = local_size * size - vocab_size
    # What stands in the padding must not matter.
    local_weight = nn.Parameter(F.pad(weight, (0, 0, 0, padding), value=1e4)[here].clone())
    local_bias = nn.Parameter(F.pad(bias, (0, padding), value=1e4)[here].clone())
    if sequence_parallel:
        hidden, grad_hidden = (each.chunk(size, 1)[rank] for each in (hidden, grad_hidden))
    entered = hidden.clone().requires_grad_()
    buffers = {id(each): torch.ones_like(each) for each in (local_weight, local_bias)}
    store = WeightGradStore(lambda parameter: buffers[id(parameter)])
    found: list[Tensor] = []
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "chunk_tokens": chunk_tokens,
        "bias": local_bias,
        "sequence_parallel": sequence_parallel,
        "found": found.append,
    }
    loss = chunked_cross_entropy(entered, local_weight, targets, axis, sink=store, **options)
    assert not found
    assert loss.shape == ()
    assert loss.requires_grad
    if is_deferred:
        with store.deferring(0):
            (loss / 7).backward()
        assert store.held_bytes == 0
    else:
        (loss / 7).backward()
    with torch.no_grad():
        value = chunked_cross_entropy(entered, local_weight, targets, axis, **options)

    tolerance = 1e-5 * max(1.0, scale)
    for each in (*found, value):
        assert float(each) == pytest.approx(float(expected), rel=1e-5)
    assert len(found) == 2
    assert entered.grad is not None
    torch.testing.assert_close(entered.grad.double(), grad_hidden, rtol=1e-5, atol=tolerance)
    for parameter, grad in ((local_weight, grad_weight), (local_bias, grad_bias)):
        own = F.pad(grad, (0,) * (2 * grad.dim() - 1) + (padding,))[here]
        assert parameter.grad is None
        torch.testing.assert_close(buffers[id(parameter)].double() - 1, own, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize(
    ("size", "vocab_size"),
    [(1, 7), (2, 10), (2, 11), (2, 1)],
    ids=["1", "2", "2, padded", "2, one all padding"],
)
def test_matches_cross_entropy(ranks: RankPool, size: int, vocab_size: int, chunk_tokens: int) -> None:
    ranks.run(compare, size, size, vocab_size, chunk_tokens, False, False)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_matches_under_sequence_parallelism(ranks: RankPool, is_deferred: bool) -> None:
    ranks.run(compare, 2, 2, 11, 5, True, is_deferred)


def test_large_logits_do_not_overflow(ranks: RankPool) -> None:
    ranks.run(compare, 2, 2, 10, 5, False, False, 100.0)


def test_without_a_sink_the_gradients_are_autograds() -> None:
    hidden, weight, bias, targets = (each.double() if each.is_floating_point() else each for each in case(7))
    targets = targets.masked_fill(targets == 6, 0)  # the last row is padding
    inputs = [each.requires_grad_() for each in (hidden, weight, bias)]
    loss = chunked_cross_entropy(
        hidden, weight, targets, Axis(), vocab_size=6, chunk_tokens=5, bias=bias, ignore_index=IGNORED
    )
    grads = torch.autograd.grad(loss, inputs)
    logits = (hidden @ weight.t() + bias)[..., :6].flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(grad, wanted)


def test_bf16_is_as_close_as_whole_logits() -> None:
    """Of gradients from logits in bf16, those in chunks are no further from fp64's."""
    hidden, weight, _, targets = case(50)
    exact = [each.bfloat16().double().requires_grad_() for each in (hidden, weight)]
    F.cross_entropy((exact[0] @ exact[1].t()).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    entered, parameter = hidden.bfloat16().requires_grad_(), nn.Parameter(weight.bfloat16())
    buffer, found = torch.zeros_like(weight), list[Tensor]()
    store = WeightGradStore(lambda _: buffer)
    chunked_cross_entropy(
        entered, parameter, targets, Axis(), vocab_size=50, chunk_tokens=5, sink=store, found=found.append
    ).backward()
    plain = [each.bfloat16().requires_grad_() for each in (hidden, weight)]
    logits = (plain[0] @ plain[1].t()).flatten(0, 1).float()
    F.cross_entropy(logits, targets.flatten(), reduction="sum").backward()
    for mine, its, own in zip((entered.grad, buffer), plain, exact, strict=True):
        assert mine is not None
        assert its.grad is not None
        assert own.grad is not None
        assert (mine.double() - own.grad).norm() <= 1.1 * (its.grad.double() - own.grad).norm()


def test_no_valid_target_has_no_loss() -> None:
    hidden, weight, _, targets = case(7, all_ignored=True)
    hidden.requires_grad_()
    found: list[Tensor] = []
    chunked_cross_entropy(
        hidden, weight, targets, Axis(), vocab_size=7, chunk_tokens=5, found=found.append
    ).backward()
    assert float(found[0]) == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize("target", [-1, 7])
def test_target_outside_the_vocabulary_raises(target: int) -> None:
    hidden, weight = torch.zeros(1, 2, HIDDEN), torch.zeros(8, HIDDEN)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(
            hidden, weight, torch.tensor([[1, target]]), Axis(), vocab_size=7, chunk_tokens=2
        )


def test_frozen_inputs_get_no_gradient() -> None:
    hidden, weight, _, targets = case(7)
    for frozen in (hidden, weight):
        hidden.requires_grad_(frozen is not hidden)
        weight.requires_grad_(frozen is not weight)
        hidden.grad = weight.grad = None
        chunked_cross_entropy(hidden, weight, targets, Axis(), vocab_size=7, chunk_tokens=5).backward()
        assert frozen.grad is None
        assert hidden.grad is not None or weight.grad is not None


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages that operations return within, and that are alive together; `ignored` left out."""

    def __init__(self, *ignored: Tensor) -> None:
        super().__init__()
        self._alive = {each.untyped_storage()._cdata: 0 for each in ignored}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self._count(each)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = num_bytes
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)


def peak_of_loss(vocab_size: int, dtype: torch.dtype, *, is_chunked: bool) -> int:
    """The most that is alive in forward and backward of head and loss, beside the weight and its gradient."""
    torch.manual_seed(0)
    hidden = torch.randn(1, 256, 8, dtype=dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(vocab_size, 8, dtype=dtype))
    targets, buffer = torch.randint(vocab_size, (1, 256)), torch.zeros(vocab_size, 8)
    store = WeightGradStore(lambda _: buffer)
    with LiveBytes(weight, buffer) as live:
        if is_chunked:
            chunked_cross_entropy(
                hidden, weight, targets, Axis(), vocab_size=vocab_size, chunk_tokens=1024, sink=store
            ).backward()
        else:
            logits = split_linear(hidden, weight, None, store)
            vocab_parallel_cross_entropy(logits, targets, Axis(), vocab_size=vocab_size).sum().backward()
    return live.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_does_not_grow_with_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(loss_config, "_LEAST_ELEMENTS", 1 << 18)  # as if the micro-batch were larger
    small, large = (peak_of_loss(size, dtype, is_chunked=True) for size in (4096, 65536))
    assert large <= 1.01 * small
    small, large = (peak_of_loss(size, dtype, is_chunked=False) for size in (4096, 16384))
    assert large > 3 * small


def test_chunks_are_even_and_within_their_bounds() -> None:
    """Of 1000 tokens, 300 at a time: 4 chunks of 250. 64 tokens of 65536 columns are 2^22 logits."""
    assert tokens_at_once(300, num_tokens=1000, hidden_size=8, num_columns=10) == 250
    assert tokens_at_once(4096, num_tokens=100, hidden_size=8, num_columns=10) == 100
    assert tokens_at_once(1024, num_tokens=512, hidden_size=8, num_columns=65536) == 64
    # No more than the hidden states of the micro-batch: 8192 * 8192 / 131072.
    assert tokens_at_once(1024, num_tokens=8192, hidden_size=8192, num_columns=131072) == 512
