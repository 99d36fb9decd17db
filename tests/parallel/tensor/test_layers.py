"""Tensor-parallel layers against torch's own linear and embedding on the whole weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis
from counterflow.parallel.ops.weight_grad import WeightGradStore
from counterflow.parallel.parameters import placement_of
from counterflow.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    enter_tensor_parallel,
)
from tests.models.placement import fill, grad_of, slice_of
from tests.rank_pool import RankPool

BATCH, SEQ, HIDDEN, INNER = 2, 8, 12, 16


def world_axis() -> Axis:
    return Axis(group=dist.group.WORLD)


def whole_tensors() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "x": torch.randn(BATCH, SEQ, HIDDEN),
        "column.weight": torch.randn(INNER, HIDDEN),
        "column.bias": torch.randn(INNER),
        "row.weight": torch.randn(HIDDEN, INNER),
        "row.bias": torch.randn(HIDDEN),
        "grad": torch.randn(BATCH, SEQ, HIDDEN),
    }


def check_column_then_row(sequence_parallel: bool, deferred: bool) -> None:
    axis, whole = world_axis(), whole_tensors()
    reference = {name: value.clone().requires_grad_() for name, value in whole.items()}
    hidden = F.linear(reference["x"], reference["column.weight"], reference["column.bias"]).tanh()
    expected = F.linear(hidden, reference["row.weight"], reference["row.bias"])
    expected.backward(whole["grad"])

    column = ColumnParallelLinear(HIDDEN, INNER, axis, bias=True, device="cpu")
    row = RowParallelLinear(INNER, HIDDEN, axis, sequence_parallel=sequence_parallel, bias=True, device="cpu")
    parameters: dict[str, nn.Parameter] = {}
    for prefix, layer in (("column", column), ("row", row)):
        for name, parameter in layer.named_parameters():
            parameters[f"{prefix}.{name}"] = parameter
            fill(parameter, whole[f"{prefix}.{name}"])

    buffers = {id(p): torch.zeros_like(p) for p in parameters.values()}
    store = WeightGradStore(lambda parameter: buffers[id(parameter)])
    if deferred:
        column.weight_grad_sink = row.weight_grad_sink = store

    def own(tensor: Tensor) -> Tensor:
        return tensor.chunk(axis.size, 1)[axis.rank] if sequence_parallel else tensor

    x = own(whole["x"]).clone().requires_grad_()
    y = row(column(enter_tensor_parallel(x, axis, sequence_parallel=sequence_parallel)).tanh())
    if deferred:
        with store.deferring(0):
            y.backward(own(whole["grad"]))
        assert column.weight.grad is None
        assert row.weight.grad is None
        store.run(0)
    else:
        y.backward(own(whole["grad"]))

    torch.testing.assert_close(y, own(expected.detach()))
    torch.testing.assert_close(grad_of(x), own(grad_of(reference["x"])))
    for name, parameter in parameters.items():
        # A row layer's bias is added after the sum and has an ordinary gradient.
        grad = buffers[id(parameter)] if deferred and name != "row.bias" else grad_of(parameter)
        grad = grad.clone()
        if placement_of(parameter).partial_over_tensor:
            dist.all_reduce(grad)
        torch.testing.assert_close(grad, slice_of(parameter, grad_of(reference[name])), msg=name)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_column_then_row(ranks: RankPool, size: int, sequence_parallel: bool, deferred: bool) -> None:
    ranks.run(check_column_then_row, size, sequence_parallel, deferred)


def check_embedding(num_embeddings: int, sequence_parallel: bool) -> None:
    axis = world_axis()
    torch.manual_seed(4)
    table = torch.randn(num_embeddings, HIDDEN, requires_grad=True)
    tokens = torch.randint(0, num_embeddings, (BATCH, SEQ))
    tokens[0, 0], tokens[0, 1] = 0, num_embeddings - 1
    grad = torch.randn(BATCH, SEQ, HIDDEN)
    expected = F.embedding(tokens, table)
    expected.backward(grad)

    layer = VocabParallelEmbedding(
        num_embeddings, HIDDEN, axis, sequence_parallel=sequence_parallel, device="cpu"
    )
    fill(layer.weight, table.detach())

    def own(tensor: Tensor) -> Tensor:
        return tensor.chunk(axis.size, 1)[axis.rank] if sequence_parallel else tensor

    y = layer(tokens)
    y.backward(own(grad))
    assert torch.equal(y, own(expected.detach()))
    torch.testing.assert_close(grad_of(layer.weight), slice_of(layer.weight, grad_of(table)))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_embeddings", [5, 16])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding(ranks: RankPool, size: int, num_embeddings: int, sequence_parallel: bool) -> None:
    ranks.run(check_embedding, size, num_embeddings, sequence_parallel)


def check_unknown_token() -> None:
    layer = VocabParallelEmbedding(6, 4, world_axis(), sequence_parallel=False, device="cpu")
    for token, edge in ((-1, 0), (6, 1)):
        if dist.get_rank() == edge:  # the other rank would wait in the sum
            with pytest.raises(IndexError):
                layer(torch.tensor([[1, token]]))


def test_token_outside_the_vocabulary_raises(ranks: RankPool) -> None:
    ranks.run(check_unknown_token, 2)


def placements() -> dict[str, Any]:
    axis = world_axis()
    return {
        "head": placement_of(ColumnParallelLinear(4, 5, axis, pad=True).weight),
        "column": placement_of(ColumnParallelLinear(4, 6, axis, init_std=0.5).weight),
        "row": placement_of(RowParallelLinear(6, 4, axis, sequence_parallel=True).weight),
        "shape": tuple(ColumnParallelLinear(4, 5, axis, pad=True).weight.shape),
        "device": ColumnParallelLinear(4, 6, axis).weight.device.type,
    }


def test_placements_are_those_of_the_whole_model(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(placements, 2)):
        head, column, row = found["head"], found["column"], found["row"]
        assert (head.global_shape, head.tensor_dim, head.tensor_start) == ((5, 4), 0, 3 * rank)
        assert (column.global_shape, column.tensor_start, column.init_std) == ((6, 4), 3 * rank, 0.5)
        assert (row.global_shape, row.tensor_dim, row.tensor_start) == ((4, 6), 1, 3 * rank)
        assert found["shape"] == (3, 4)
        assert found["device"] == "meta"


def refuse_uneven() -> None:
    with pytest.raises(ValueError, match=r"out_features=5: must be a multiple of the tensor axis size 2"):
        ColumnParallelLinear(4, 5, world_axis())
    with pytest.raises(ValueError, match=r"in_features=3: must be a multiple"):
        RowParallelLinear(3, 4, world_axis(), sequence_parallel=False)


def test_features_that_the_axis_does_not_divide_are_refused(ranks: RankPool) -> None:
    ranks.run(refuse_uneven, 2)
