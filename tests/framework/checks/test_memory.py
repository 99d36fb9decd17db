"""The second copy of two-copy DualPipe costs no memory with ZeRO-3, counted and observed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from counterflow.framework.checks.memory import RankMemory, measure
from counterflow.framework.data.prepare import PreparedData
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, merged, run_context, tiny_config, with_few_layers


class Measured(Protocol):
    def __call__(self, *, schedule: str, pp: int, dp: int, zero: int) -> list[RankMemory]: ...


@pytest.fixture(scope="module")
def rank_memory(
    ranks: RankPool, tiny_data: PreparedData, tmp_path_factory: pytest.TempPathFactory
) -> Measured:
    """What each rank has of such a layout, measured once."""

    @cache
    def measured(*, schedule: str, pp: int, dp: int, zero: int) -> list[RankMemory]:
        layout = {"pp": pp, "dp": dp, "schedule": schedule, "num_microbatches": 2 * pp, "zero": zero}
        run = run_context(tiny_data, tmp_path_factory.mktemp("run"))
        return ranks.run(measure, pp * dp, tiny_config(**with_few_layers(layout)), run, torch.device("cpu"))

    return measured


@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (4, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_dualpipe_keeps_no_more_than_1f1b(rank_memory: Measured, pp: int, dp: int) -> None:
    """Over all ranks within 5 %; a rank of dualpipe holds shares of two stages, so the largest is no larger."""
    one_copy = rank_memory(schedule="1f1b", pp=pp, dp=dp, zero=3)
    two_copies = rank_memory(schedule="dualpipe", pp=pp, dp=dp, zero=3)
    total, reference = (sum(rank.persistent for rank in each) for each in (two_copies, one_copy))
    assert total == pytest.approx(reference, rel=0.05)
    assert max(rank.persistent for rank in two_copies) <= 1.05 * max(rank.persistent for rank in one_copy)


def test_without_sharding_the_second_copy_is_paid_for(rank_memory: Measured) -> None:
    one_copy = rank_memory(schedule="1f1b", pp=4, dp=1, zero=0)
    two_copies = rank_memory(schedule="dualpipe", pp=4, dp=1, zero=0)
    total, reference = (sum(rank.persistent for rank in each) for each in (two_copies, one_copy))
    assert total == pytest.approx(2 * reference, rel=0.05)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_the_count_is_what_is_there(rank_memory: Measured, schedule: str, zero: int) -> None:
    """Every tensor alive between steps is counted: what is observed on top is index tables and RoPE."""
    for rank in rank_memory(schedule=schedule, pp=2, dp=2, zero=zero):
        assert rank.persistent <= rank.observed <= rank.persistent + 8192


@pytest.mark.parametrize("zero", [0, 3])
def test_experts_are_shared_out(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, zero: int) -> None:
    """Four ranks: without sharding a rank keeps its share of the experts, with ZeRO-3 a quarter in any case."""
    found: dict[int, list[RankMemory]] = {}
    two_layers = merged(MIXTURES["deepseek_v3"], {"num_layers": 2})
    for ep in (1, 2, 4):
        config = tiny_config(
            dp=4, zero=zero, num_microbatches=1, parallel={"expert_parallel_size": ep}, model=two_layers
        )
        found[ep] = ranks.run(measure, 4, config, run_context(tiny_data, tmp_path), torch.device("cpu"))
    # Three matrices of 12 x 32 for each of eight experts in one layer and an MTP module; with the gradients and
    # Adam's two moments 16 bytes an element.
    whole = 3 * 12 * 32 * 8 * 2 * 16
    rest = {ep: [rank.persistent - rank.experts for rank in of] for ep, of in found.items()}
    assert rest[1] == rest[2] == rest[4]
    for ep, of in found.items():
        for rank in of:
            assert rank.experts == whole // (ep if zero == 0 else 4)
            # On top are RoPE's tables, tables of indices, and what routers keep.
            assert rank.persistent <= rank.observed <= rank.persistent + 16384


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("model", [{}, MIXTURES["deepseek_v3"]], ids=["dense", "deepseek_v3"])
def test_activations_are_what_the_cost_model_says(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, model: dict[str, Any], mode: str
) -> None:
    config = tiny_config(pp=2, schedule="dualpipe", recompute={"mode": mode}, model=model)
    for rank in ranks.run(measure, 2, config, run_context(tiny_data, tmp_path), torch.device("cpu")):
        # Tables of rotary positions, 16 x 8 x 2 numbers, come on top; of what routers and MTP modules keep for each
        # token the larger part is counted.
        tolerance = (0.03 if model else 0.01) * rank.expected_activations
        assert abs(rank.activations - rank.expected_activations) <= tolerance + 1024


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "dualpipe"])
def test_live_activations_stay_within_the_simulators_peak(rank_memory: Measured, schedule: str) -> None:
    for rank in rank_memory(schedule=schedule, pp=4, dp=1, zero=3):
        assert 0 < rank.peak_live_activations <= rank.simulated_peak_activations
