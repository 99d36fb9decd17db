"""Initial values are those of the whole model: the same global parameter comes out of every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from counterflow.parallel.parameters import ParameterPlacement, expert_runs, initialize, place, placement_of


def slices(shape: tuple[int, ...], dim: int, num_parts: int, seed: int = 0, name: str = "a.weight") -> Tensor:
    """Initialise the slices of a parameter apart, and put them together without the padding."""
    local = -(-shape[dim] // num_parts)
    parts = []
    for part in range(num_parts):
        local_shape = list(shape)
        local_shape[dim] = local
        out = torch.full(local_shape, torch.nan)
        placement = ParameterPlacement(global_shape=shape, tensor_dim=dim, tensor_start=part * local)
        initialize(out, name, placement, seed)
        parts.append(out)
    padded = torch.cat(parts, dim)
    assert (padded.narrow(dim, shape[dim], padded.shape[dim] - shape[dim]) == 0).all()
    return padded.narrow(dim, 0, shape[dim])


def whole(shape: tuple[int, ...], seed: int = 0, name: str = "a.weight", **fields: object) -> Tensor:
    out = torch.full(shape, torch.nan)
    initialize(out, name, ParameterPlacement(global_shape=shape, **fields), seed)  # type: ignore[arg-type]
    return out


# The second shape is several blocks of rows; in the third one row is more than a block.
@pytest.mark.parametrize("shape", [(24, 8), (1032, 200), (3, 70_000)])
@pytest.mark.parametrize("num_parts", [2, 3, 4, 8])
def test_rows_are_the_same_in_every_layout(shape: tuple[int, int], num_parts: int) -> None:
    assert torch.equal(slices(shape, 0, num_parts), whole(shape))


@pytest.mark.parametrize("shape", [(24, 8), (1000, 200), (3, 70_000)])
@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_columns_are_the_same_in_every_layout(shape: tuple[int, int], num_parts: int) -> None:
    assert torch.equal(slices(shape, 1, num_parts), whole(shape))


@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_padding_is_zero_even_where_a_slice_is_all_padding(num_parts: int) -> None:
    assert torch.equal(slices((5, 3), 0, num_parts), whole((5, 3)))


# Several experts in a block of rows, an expert of several blocks; any share of them, in any order.
@pytest.mark.parametrize("shape", [(8, 6, 5), (6, 300, 300)])
@pytest.mark.parametrize("experts", [(0, 1), (2, 3, 4), (5, 0, 3), (4,), ()])
def test_experts_are_the_same_wherever_they_are_held(
    shape: tuple[int, int, int], experts: tuple[int, ...]
) -> None:
    out = torch.full((len(experts), *shape[1:]), torch.nan)
    initialize(out, "a.weight", ParameterPlacement(global_shape=shape, experts=experts), 0)
    assert torch.equal(out, whole(shape)[list(experts)])


def test_experts_differ() -> None:
    values = whole((4, 300, 300))
    assert len({expert[0, 0].item() for expert in values}) == 4


@pytest.mark.parametrize(
    ("experts", "found"),
    [
        ((), []),
        ((3,), [(0, 1)]),
        ((2, 3, 4), [(0, 3)]),
        ((2, 3, 0, 5, 6), [(0, 2), (2, 3), (3, 5)]),
        ((1, 0), [(0, 1), (1, 2)]),
    ],
)
def test_runs_of_experts(experts: tuple[int, ...], found: list[tuple[int, int]]) -> None:
    assert expert_runs(experts) == found


def test_values_are_normal_with_the_stated_deviation() -> None:
    values = whole((1024, 512), init_std=0.5)
    assert values.std().item() == pytest.approx(0.5, rel=0.01)
    assert values.mean().item() == pytest.approx(0.0, abs=0.003)
    # Blocks of rows are drawn from seeds of their own: none repeats another.
    assert len({row[0].item() for row in values}) > 1000


def test_values_depend_on_the_name_and_the_seed() -> None:
    values = whole((8, 8))
    assert not torch.equal(values, whole((8, 8), seed=1))
    assert not torch.equal(values, whole((8, 8), name="b.weight"))
    assert torch.equal(values, whole((8, 8), name="b.weight", tied_to="a.weight"))


def test_ones_and_zeros() -> None:
    assert torch.equal(whole((4,), init="ones"), torch.ones(4))
    assert torch.equal(whole((4,), init="zeros"), torch.zeros(4))


def test_low_precision_holds_the_rounded_values() -> None:
    out = torch.empty(8, 8, dtype=torch.bfloat16)
    initialize(out, "a.weight", ParameterPlacement(global_shape=(8, 8)), 0)
    assert torch.equal(out, whole((8, 8)).bfloat16())


def test_a_plain_parameter_is_whole_here() -> None:
    assert placement_of(nn.Parameter(torch.zeros(3, 2))) == ParameterPlacement(global_shape=(3, 2))
    assert not placement_of(nn.Parameter(torch.zeros(3))).weight_decay


def test_place_is_read_back() -> None:
    placement = ParameterPlacement(global_shape=(4, 2), tensor_dim=0, tensor_start=2)
    parameter = nn.Parameter(torch.zeros(2, 2))
    assert place(parameter, placement) is parameter
    assert placement_of(parameter) == placement
