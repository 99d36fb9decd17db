"""Every composition against one process: loss and gradients within 1e-5 in fp32 after five steps.

The grid is covered pairwise here; `make parity` runs all of it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.config import TrainConfig, from_mapping
from framework.data.prepare import PreparedData
from framework.parity import Parity, train_and_compare, train_and_save
from parallel.pipeline.config import ScheduleConfig
from parallel.pipeline.generate import generate
from parallel.pipeline.passes import lower
from parallel.pipeline.text import to_csv
from tests.rank_pool import RankPool
from tests.tiny import run_context, tiny_config

CPU = torch.device("cpu")
AXES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2),
    "pp": (1, 2, 4),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3),
    "schedule": ("gpipe", "1f1b", "dualpipe"),
}


def fits(point: dict[str, Any]) -> bool:
    """Whether eight ranks hold it and the schedule takes it."""
    return point["tp"] * point["pp"] * point["dp"] <= 8 and not (
        point["schedule"] == "dualpipe" and point["pp"] == 1
    )


def grid() -> list[dict[str, Any]]:
    return [
        point for values in product(*AXES.values()) if fits(point := dict(zip(AXES, values, strict=True)))
    ]


def pairwise(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Few of `points` that together show every pair of values of two axes that any of them shows."""
    pairs_of = [set(combinations(sorted(point.items()), 2)) for point in points]
    missing = set[Any]().union(*pairs_of)
    chosen: list[dict[str, Any]] = []
    while missing:
        index = max(range(len(points)), key=lambda candidate: len(pairs_of[candidate] & missing))
        missing -= pairs_of[index]
        chosen.append(points[index])
    return chosen


def measure(ranks: RankPool, config: TrainConfig, data: PreparedData, folder: Path) -> Parity:
    run, checkpoint = run_context(data, folder), folder / "step-00000005"
    losses = ranks.run(train_and_save, config.parallel.world_size, config, run, checkpoint, CPU)[0]
    return ranks.run(train_and_compare, 1, config, run, checkpoint, losses, CPU)[0]


def assert_parity(parity: Parity) -> None:
    print(parity)
    assert parity.loss_rel <= 1e-5, parity
    assert parity.grad_rel <= 1e-5, parity
    assert parity.param_rel <= 1e-5, parity


def microbatches(point: dict[str, Any]) -> int:
    return 2 * point["pp"] if point["schedule"] == "dualpipe" else 4


@pytest.mark.parametrize(
    "point", pairwise(grid()), ids=lambda point: "-".join(f"{key}{value}" for key, value in point.items())
)
def test_layout_trains_like_one_process(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, point: dict[str, Any]
) -> None:
    config = tiny_config(**point, num_microbatches=microbatches(point))
    assert_parity(measure(ranks, config, tiny_data, tmp_path))


MORE_SCHEDULES = ("interleaved_1f1b", "zb1p", "zb_h2", "zbv", "v_half", "v_min", "dualpipe_v")


@pytest.mark.parametrize("schedule", MORE_SCHEDULES)
@pytest.mark.parametrize("zero", [0, 3])
def test_every_schedule_composes_with_tensor_parallelism_and_zero(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, schedule: str, zero: int
) -> None:
    """zero=3 adds a data-parallel axis to shard over."""
    dp = 2 if zero else 1
    config = tiny_config(pp=2, tp=2, dp=dp, zero=zero, schedule=schedule)
    assert_parity(measure(ranks, config, tiny_data, tmp_path))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_searched_schedule_and_one_of_a_file(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, zero: int
) -> None:
    searched = {"name": "auto", "num_chunks": 2, "costs": {"forward": [1.0, 3.0, 2.0, 1.0]}}
    config = tiny_config(pp=2, tp=2, dp=2 if zero else 1, zero=zero, schedule="auto", num_microbatches=6)
    config = replace(config, schedule=from_mapping(ScheduleConfig, {**searched, "num_microbatches": 6}))
    assert_parity(measure(ranks, config, tiny_data, tmp_path / "auto"))
    path = tmp_path / "mirrored.csv"
    path.write_text(to_csv(lower(generate("dualpipe", 2, 6), zero_stage=0), compute_only=False))
    config = replace(config, schedule=ScheduleConfig(name="csv", path=str(path), num_microbatches=6))
    assert_parity(measure(ranks, config, tiny_data, tmp_path / "csv"))


@pytest.mark.parametrize(
    "point",
    [
        {"pp": 2, "dp": 2, "zero": 3, "schedule": "1f1b"},
        {"pp": 4, "tp": 2, "zero": 1, "schedule": "dualpipe"},
        {"pp": 2, "dp": 2, "zero": 0, "schedule": "dualpipe"},
        {"pp": 1, "tp": 2, "zero": 3, "schedule": "1f1b"},
        {"pp": 4, "dp": 2, "zero": 2, "schedule": "gpipe"},
    ],
    ids=str,
)
def test_tied_embeddings(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, point: dict[str, Any]
) -> None:
    config = tiny_config(**point, num_microbatches=8, model={"tie_embeddings": True})
    assert_parity(measure(ranks, config, tiny_data, tmp_path))


def test_without_sequence_parallelism(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    config = tiny_config(tp=2, pp=2, zero=2, parallel={"sequence_parallel": False})
    assert_parity(measure(ranks, config, tiny_data, tmp_path))


def test_parameters_kept_whole_over_the_step(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    config = tiny_config(pp=2, dp=2, schedule="dualpipe", zero=3, num_microbatches=8)
    config = replace(config, zero=replace(config.zero, reshard_after="step"))
    assert_parity(measure(ranks, config, tiny_data, tmp_path))


def test_a_wrong_gradient_is_seen(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    """The comparison itself can fail: another learning rate leaves other parameters."""
    layout = tiny_config(pp=2, optimizer={"base_lr": 4e-3})
    run, checkpoint = run_context(tiny_data, tmp_path), tmp_path / "step-00000005"
    losses = ranks.run(train_and_save, 2, layout, run, checkpoint, CPU)[0]
    parity = ranks.run(train_and_compare, 1, tiny_config(pp=2), run, checkpoint, losses, CPU)[0]
    assert not parity.holds
    assert parity.param_rel > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("point", grid(), ids=lambda point: "-".join(f"{k}{v}" for k, v in point.items()))
def test_whole_grid(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, point: dict[str, Any]) -> None:
    config = tiny_config(**point, num_microbatches=microbatches(point))
    assert_parity(measure(ranks, config, tiny_data, tmp_path))
