"""What is built can be dropped, and then nothing of it stays."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.step import train_step
from counterflow.parallel.zero.unit import FlatUnit
from tests.open_resources import OpenResources
from tests.rank_pool import RankPool
from tests.tiny import tiny_config


def count_after_builds(config: TrainConfig, data: PreparedData) -> tuple[int, int, str | None]:
    """Live units with one assembly in use and with none, after four of them; what their ends left open."""
    train_step(build(config, data, torch.device("cpu")), 0)  # what libraries start once and keep
    gc.collect()
    opened = OpenResources()
    in_use = 0
    for _ in range(4):
        with build(config, data, torch.device("cpu")) as assembly:
            train_step(assembly, 0)
            in_use = max(in_use, _live_units())
        del assembly
    left = opened.left_over()
    gc.collect()
    return in_use, _live_units(), left


def _live_units() -> int:
    return sum(issubclass(type(each), FlatUnit) for each in gc.get_objects())


@pytest.mark.parametrize("zero", [0, 3])
def test_assemblies_that_are_dropped_leave_nothing(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, zero: int
) -> None:
    config = tiny_config(dp=2, zero=zero, optimizer={"offload": {"tier": "disk", "folder": str(tmp_path)}})
    for in_use, dropped, left in ranks.run(count_after_builds, 2, config, tiny_data):
        assert in_use > 0
        assert dropped == 0
        assert left is None
