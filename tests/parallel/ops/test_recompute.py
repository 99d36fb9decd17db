"""Recomputation against torch.utils.checkpoint and against none: values, memory, and what runs how often."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from counterflow.framework.memory.activations import saved_bytes
from counterflow.parallel.ops.recompute import recompute, recompute_module
from counterflow.parallel.pipeline.api import build_pipeline
from counterflow.parallel.pipeline.runtime.plain_parameters import PlainParameters
from counterflow.parallel.pipeline.runtime.stage import Stage
from tests.rank_pool import RankPool


class Part(nn.Module):
    """Two linear layers around a norm, with as much dropout as asked for; counts its calls."""

    def __init__(self, size: int = 8, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 4 * size)
        self.down = nn.Linear(4 * size, size)
        self.dropout = nn.Dropout(dropout)
        self.calls: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        return self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x)))))


Wrapper = Callable[[nn.Module, Tensor], Tensor]


def plain(part: nn.Module, x: Tensor) -> Tensor:
    return part(x)


def ours(part: nn.Module, x: Tensor) -> Tensor:
    return recompute(part, x)


def torchs(part: nn.Module, x: Tensor) -> Tensor:
    result: Any = checkpoint(part, x, use_reentrant=False)
    return result


def results(wrapper: Wrapper, *, dropout: float = 0.0, needs_input_grad: bool = True) -> list[Tensor]:
    """Output, input gradient, parameters' gradients, and what the generator gives after the step."""
    torch.manual_seed(0)
    parts = [Part(dropout=dropout) for _ in range(3)]
    x = torch.randn(5, 8, requires_grad=needs_input_grad)
    out = x
    for part in parts:
        out = out + wrapper(part, out)
    out.square().sum().backward()
    grads = [parameter.grad for part in parts for parameter in part.parameters()]
    return [
        out.detach(),
        *([x.grad] if x.grad is not None else []),
        *(grad for grad in grads if grad is not None),
        torch.rand(3),
    ]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("needs_input_grad", [True, False])
def test_equals_torch_checkpoint_bitwise(dropout: float, needs_input_grad: bool) -> None:
    found = [
        results(wrapper, dropout=dropout, needs_input_grad=needs_input_grad)
        for wrapper in (plain, torchs, ours)
    ]
    assert len(found[0]) == len(found[1]) == len(found[2]) == 1 + needs_input_grad + 3 * 6 + 1
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)


def test_keeps_inputs_only() -> None:
    part, x = Part(), torch.randn(5, 8, requires_grad=True)
    with saved_bytes(part) as whole:
        part(x)
    with saved_bytes(part) as kept:
        recompute(part, x)
    assert kept.peak == x.nbytes < whole.peak


def test_the_first_pass_has_no_gradients_and_the_second_has() -> None:
    part = Part()
    out = recompute(part, torch.randn(5, 8))
    assert part.calls == [False]
    out.sum().backward()
    assert part.calls == [False, True]
    with torch.no_grad():
        recompute(part, torch.randn(5, 8))
    assert part.calls == [False, True, False]


def test_autocast_is_that_of_the_first_pass() -> None:
    def gradients(wrapper: Wrapper) -> list[Tensor]:
        torch.manual_seed(0)
        part, x = Part(), torch.randn(5, 8)
        with torch.autocast("cpu", torch.bfloat16):
            out = wrapper(part, x)
        out.float().square().sum().backward()
        return [parameter.grad for parameter in part.parameters() if parameter.grad is not None]

    expected, found = gradients(plain), gradients(ours)
    assert len(expected) == 6
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_several_tensors_in_and_out() -> None:
    """An integer tensor and a number go along; an output without a use has no gradient."""

    def function(x: Tensor, index: Tensor, scale: float, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x[index] * scale * y, x.sum(0), index + 1

    def gradients(is_recomputed: bool) -> tuple[Tensor | None, Tensor | None]:
        torch.manual_seed(0)
        x, y = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
        args = (x, torch.tensor([2, 0]), 3.0, y)
        out, _, moved = recompute(function, *args) if is_recomputed else function(*args)
        assert moved.tolist() == [3, 1]
        out.square().sum().backward()
        return x.grad, y.grad

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("defer", [False, True])
def test_a_split_backward_files_the_same_and_runs_nothing_again(defer: bool) -> None:
    """Of a stage: gradients are those without recomputation, and W runs no forward."""

    def run(is_recomputed: bool) -> tuple[list[Tensor], list[bool]]:
        torch.manual_seed(0)
        module = nn.Sequential(Part(), Part())
        if is_recomputed:
            for part in module:
                recompute_module(part)
        stage = Stage(1, module, PlainParameters(module))
        for microbatch in range(2):
            stage.forward(microbatch, (torch.randn(5, 8),))
        grads: list[Tensor] = []
        for microbatch in range(2):
            grads += stage.backward(microbatch, (torch.randn(5, 8),), defer=defer)
        if defer:
            assert module[0].up.weight.grad is None
            for microbatch in (1, 0):
                stage.weight_backward(microbatch)
        calls = module[0].calls
        return [*grads, *(parameter.grad for parameter in module.parameters())], calls

    expected, _ = run(False)
    found, calls = run(True)
    assert calls == [False, False, True, True]
    assert len(expected) == 2 + 2 * 6
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_a_module_keeps_its_names_and_a_copy_its_own_parameters() -> None:
    part = Part()
    names = list(part.state_dict())
    recompute_module(part)
    assert list(part.state_dict()) == names
    other = copy.deepcopy(part)
    other(torch.randn(5, 8)).sum().backward()
    assert other.calls == [False, True]
    assert other.up.weight.grad is not None
    assert part.calls == []
    assert part.up.weight.grad is None


def test_nested_recomputation_is_refused() -> None:
    whole = nn.Sequential(Part(), Part())
    recompute_module(whole[1])
    with pytest.raises(ValueError, match="its part 1 is recomputed already"):
        recompute_module(whole)
    with pytest.raises(ValueError, match="it is recomputed already"):
        recompute_module(whole[1])
    whole = nn.Sequential(Part(), Part())
    recompute_module(whole)
    recompute_module(whole[0])
    with pytest.raises(ValueError, match="its part 0 is recomputed already"):
        whole(torch.randn(5, 8))


def test_mistakes_are_refused() -> None:
    x = torch.randn(5, 8, requires_grad=True)
    with pytest.raises(ValueError, match="keeps its input only"):
        recompute_module(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="a list, holds a tensor that needs a gradient"):
        recompute(lambda tensors: tensors[0] * 2, [x])
    with pytest.raises(ValueError, match="changes an argument in place"):
        recompute(lambda tensor: tensor.mul_(2) + 1, torch.randn(5))
    with pytest.raises(TypeError, match="returned dict"):
        recompute(lambda tensor: {"out": tensor}, x)


def test_random_numbers_that_differ_are_an_error() -> None:
    """As where another computation draws some in the middle."""
    calls: list[int] = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            torch.rand(1)
        return nn.functional.dropout(x, 0.5)

    out = recompute(function, torch.randn(5, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match="drew other random numbers"):
        out.sum().backward()


def pipeline_gradients(schedule: str, is_recomputed: bool) -> list[Tensor]:
    """Losses and gradients of this rank's part of a pipeline over plain modules."""

    def make_stage(index: int) -> nn.Module:
        torch.manual_seed(index)
        module = nn.Sequential(Part(), Part(dropout=0.25))
        if is_recomputed:
            for part in module:
                recompute_module(part)
        return module

    pipeline = build_pipeline(make_stage, schedule, num_microbatches=4)
    torch.manual_seed(9)
    result = pipeline.step(torch.randn(8, 8), torch.randn(8, 8), nn.functional.mse_loss)
    return [result.losses, *(parameter.grad for parameter in pipeline.parameters())]


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "dualpipe"])
def test_in_a_pipeline_of_own_modules(ranks: RankPool, schedule: str) -> None:
    """Dropout included: both passes of a part draw the same, and what is drawn between them stays as it is."""
    expected = ranks.run(pipeline_gradients, 2, schedule, False)
    found = ranks.run(pipeline_gradients, 2, schedule, True)
    for of_rank, others in zip(expected, found, strict=True):
        assert len(of_rank) >= 1 + 2 * 6
        for one, other in zip(of_rank, others, strict=True):
            assert torch.equal(one, other)
