"""Cuts against every cut there is, and against published layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.models.config import ModelConfig, MoEConfig, MTPConfig
from counterflow.models.partition import StageSlice, balanced_cuts, partition
from tests.models.shapes import shape


def runs(costs: list[int], bounds: list[int]) -> list[int]:
    return [sum(costs[start:stop]) for start, stop in pairwise(bounds)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_cuts_are_the_best_of_all(costs: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))
    bounds = balanced_cuts(costs, num_parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert all(start < stop for start, stop in pairwise(bounds))
    assert len(bounds) == num_parts + 1

    def value(bounds: list[int]) -> tuple[int, int]:
        found = runs(costs, bounds)
        return max(found), sum(run * run for run in found)

    candidates = [[0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), num_parts - 1)]
    assert value(bounds) == min(map(value, candidates))


def check_cover(slices: tuple[StageSlice, ...], num_layers: int) -> None:
    assert list(chain.from_iterable(part.layers for part in slices)) == list(range(num_layers))
    assert [part.first for part in slices] == [True] + [False] * (len(slices) - 1)
    assert [part.last for part in slices] == [False] * (len(slices) - 1) + [True]
    assert all(len(part.layers) or part.first or part.last for part in slices)


@pytest.mark.parametrize("num_layers", [1, 2, 5, 8])
@pytest.mark.parametrize("vocab_size", [8, 4096, 100_000])
def test_every_layer_once_and_no_stage_empty(num_layers: int, vocab_size: int) -> None:
    config = ModelConfig(num_layers=num_layers)
    for num_stages in range(1, num_layers + 3):
        slices = partition(config, num_stages, seq_length=128, vocab_size=vocab_size)
        assert len(slices) == num_stages
        check_cover(slices, num_layers)


def test_one_stage_is_the_whole_model() -> None:
    slices = partition(ModelConfig(), 1, seq_length=128, vocab_size=100)
    assert slices == (StageSlice(layers=range(4), first=True, last=True),)


def test_llama3_405b_over_16_stages_is_cut_as_published() -> None:
    """Llama 3 (arXiv 2407.21783, section 3.3.2): one layer less on the first and on the last stage."""
    config = shape("llama3_405b")
    slices = partition(config, 16, seq_length=8192, vocab_size=128256)
    assert [len(part.layers) for part in slices] == [7, *[8] * 14, 7]


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    config = ModelConfig(num_layers=8)
    light = partition(config, 2, seq_length=256, vocab_size=16)
    heavy = partition(config, 2, seq_length=256, vocab_size=4096)
    alone = partition(config, 2, seq_length=256, vocab_size=60_000)
    assert len(light[1].layers) == 4
    assert 0 < len(heavy[1].layers) < 4
    assert len(alone[1].layers) == 0
    assert alone[1].last


def layer_counts(config: ModelConfig, num_stages: int) -> list[int]:
    slices = partition(config, num_stages, seq_length=256, vocab_size=16)
    check_cover(slices, config.num_layers)
    return [len(part.layers) for part in slices]


def test_experts_that_a_token_passes_weigh_as_much_as_a_dense_mlp_of_their_size() -> None:
    moe = MoEConfig(num_experts=64, num_experts_per_token=4, expert_intermediate_size=88)
    light = ModelConfig(num_layers=8, hidden_size=512, num_heads=8, intermediate_size=352, moe=moe)
    assert layer_counts(light, 2) == [4, 4]
    # Dense layers four times as wide: fewer of them fill a stage.
    wide_dense = replace(light, intermediate_size=2112, moe=replace(moe, num_dense_layers=3))
    assert layer_counts(wide_dense, 2) == [2, 6]


def test_mtp_modules_take_layers_from_the_last_stage() -> None:
    config = ModelConfig(num_layers=8)
    assert layer_counts(config, 2) == [4, 4]
    assert layer_counts(replace(config, mtp=MTPConfig(num_modules=2)), 2) == [5, 3]
    # Alone they are more than a fourth of the work.
    assert layer_counts(replace(config, mtp=MTPConfig(num_modules=3)), 4) == [2, 3, 3, 0]


@pytest.mark.parametrize("num_stages", [0, 7])
def test_too_many_stages_are_refused(num_stages: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^{num_stages} pipeline stages: model.num_layers=4.*1 to 6.*use fewer"
    ):
        partition(replace(ModelConfig(), num_layers=4), num_stages, seq_length=128, vocab_size=64)
