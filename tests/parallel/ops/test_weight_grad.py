from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from counterflow.parallel.ops import weight_grad
from counterflow.parallel.ops.weight_grad import (
    WeightGradStore,
    grouped_weight_gradient,
    split_grouped_linear,
    split_linear,
)
from counterflow.parallel.pipeline.runtime.adoption import adopt


def make_store() -> WeightGradStore:
    def buffer(parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    return WeightGradStore(buffer)


def test_split_gradient_is_torchs() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
    bias = nn.Parameter(torch.randn(5, dtype=torch.float64))
    grad_output = torch.randn(2, 3, 5, dtype=torch.float64)
    expected = torch.autograd.grad(nn.functional.linear(x, weight, bias), (x, weight, bias), grad_output)

    store = make_store()
    with store.deferring(7):
        split_linear(x, weight, bias, store).backward(grad_output)
    torch.testing.assert_close(x.grad, expected[0])
    assert weight.grad is None
    assert store.held_bytes == x.nbytes + grad_output.nbytes
    store.run(7)
    torch.testing.assert_close(weight.grad, expected[1])
    torch.testing.assert_close(bias.grad, expected[2])
    assert store.is_empty
    assert store.held_bytes == 0


def test_microbatches_may_finish_in_any_order() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    store = make_store()
    adopt(layer, store)
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    for microbatch, x in enumerate(inputs):
        with store.deferring(microbatch):
            layer(x).square().sum().backward()
    for microbatch in (1, 2, 0):
        store.run(microbatch)
    reference = nn.Linear(3, 3)
    reference.load_state_dict(layer.state_dict())
    sum(reference(x.detach()).square().sum() for x in inputs).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(layer.weight.grad, reference.weight.grad)


def test_shared_input_is_counted_once() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    q, k = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
    store = make_store()
    with store.deferring(0):
        (split_linear(x, q, None, store) + split_linear(x, k, None, store)).sum().backward()
    # the input once, and the one gradient that both outputs share
    assert store.held_bytes <= x.nbytes + x.nbytes


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_adoption_says_what_is_deferred() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), Doubled(3, 3))
    adoption = adopt(module, make_store())
    assert adoption.deferred == ("0.weight", "0.bias")
    assert adoption.immediate == ("1.weight", "1.bias", "2.weight", "2.bias")


def test_two_input_gradients_at_once_are_refused() -> None:
    store = make_store()
    with store.deferring(0), pytest.raises(AssertionError, match="at once"), store.deferring(1):
        pass


def test_gradient_of_bf16_is_accumulated_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    buffer = torch.zeros(1, 1)
    store = WeightGradStore(lambda _: buffer)
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(300):  # a bf16 sum stops growing at 256
        split_linear(x, weight, None, store).sum().backward()
    assert buffer.item() == 300


@pytest.mark.parametrize(("width", "dtype"), [(8, torch.float32), (7, torch.float32), (8, torch.float64)])
@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 0], [0, 7, 0]])
def test_gradients_of_a_stack_are_torchs(width: int, dtype: torch.dtype, sizes: list[int]) -> None:
    """Group by group torch.nn.functional.linear, empty groups among them, in widths the kernel takes or not."""
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), width, dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(3, 4, width, dtype=dtype))
    ends = torch.tensor(sizes).cumsum(0).int()
    grad_output = torch.randn(sum(sizes), 4, dtype=dtype)
    parts = [nn.functional.linear(rows, weight[e]) for e, rows in enumerate(x.split(sizes))]
    expected = torch.autograd.grad(torch.cat(parts), (x, weight), grad_output)

    at_once = split_grouped_linear(x, weight, ends, None)
    torch.testing.assert_close(at_once, torch.cat(parts))
    torch.testing.assert_close(torch.autograd.grad(at_once, (x, weight), grad_output), expected)

    store = make_store()
    with store.deferring(0):
        split_grouped_linear(x, weight, ends, store).backward(grad_output)
    torch.testing.assert_close(x.grad, expected[0])
    assert weight.grad is None
    assert store.held_bytes == x.nbytes + grad_output.nbytes
    store.run(0)
    torch.testing.assert_close(weight.grad, expected[1])


def test_a_kernel_that_skips_empty_groups_leaves_no_garbage() -> None:
    """As that of some GPUs does, whose result for a group without rows is whatever was in memory before."""
    sizes = [0, 3, 0, 4, 0]
    x, grad_output, ends = torch.randn(7, 8), torch.randn(7, 4), torch.tensor(sizes).cumsum(0).int()
    parts = zip(grad_output.split(sizes), x.split(sizes), strict=True)
    expected = torch.stack([rows.t() @ inputs for rows, inputs in parts])
    kernel = nn.functional.grouped_mm

    def skipping(*args: Tensor, offs: Tensor) -> Tensor:
        found = kernel(*args, offs=offs)
        found[[0, 2, 4]] = math.nan
        return found

    with (
        mock.patch.object(nn.functional, "grouped_mm", skipping),
        mock.patch.object(weight_grad, "_skips_empty_groups", return_value=True),
    ):
        torch.testing.assert_close(grouped_weight_gradient(x, grad_output, ends), expected)


def test_gradient_of_a_bf16_stack_is_accumulated_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(2, 8, 8, dtype=torch.bfloat16))
    buffer = torch.zeros(2, 8, 8)
    store = WeightGradStore(lambda _: buffer)
    x = torch.ones(1, 8, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(300):
        split_grouped_linear(x, weight, torch.tensor([0, 1]).int(), store).sum().backward()
    assert not buffer[0].any()
    assert (buffer[1] == 300).all()
