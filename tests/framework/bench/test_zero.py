"""The ZeRO bench: its figures by hand, and a small run of each of its modes."""

from __future__ import annotations

from typing import Any

import pytest

from counterflow.framework.bench.config import ZeroBenchConfig
from counterflow.framework.bench.zero import ZeroRow, measure_zero
from counterflow.framework.bench.zero_link import NUM_BLOCKS, HiddenRow, measure_hidden
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from tests.rank_pool import RankPool
from tests.tiny import tiny_config

WAYS = [("block", "microbatch"), ("block", "step")]


def test_hidden_is_what_a_step_does_not_take_beyond_its_computation() -> None:
    row = HiddenRow(
        units="block",
        reduce="step",
        num_microbatches=2,
        sent_bytes=100,
        link_s=2.0,
        compute_s=10.0,
        step_s=10.5,
        waits_s=0.4,
    )
    assert row.exposed_s == pytest.approx(0.5)
    assert row.hidden_share == pytest.approx(0.75)


def hidden_of(ways: list[tuple[str, str]]) -> list[HiddenRow]:
    return measure_hidden(ways, mbit_per_s=8.0, block_s=0.004, num_microbatches=2, repeats=1)


def test_a_small_run_counts_what_blocks_send(ranks: RankPool) -> None:
    """8 Mbit/s for 4 ms are 4,000 bytes, so a block has 8,000: about 44 x 44 fp32 numbers, padded to 2 x 1,024."""
    for often, once in ranks.run(hidden_of, 2, WAYS):
        shard = 4 * 1024
        # All of a forward, and of the backward all but the last, which is whole still; what comes next is, too.
        assert shard * 2 * (2 * NUM_BLOCKS - 3) <= once.sent_bytes - shard * NUM_BLOCKS <= shard * 2 * 15
        assert often.sent_bytes - once.sent_bytes == shard * NUM_BLOCKS
        for row in (often, once):
            assert row.link_s == pytest.approx(row.sent_bytes / 1e6)
            assert row.compute_s == pytest.approx(3 * 0.004 * NUM_BLOCKS * 2)
            assert row.step_s > row.compute_s
            assert row.waits_s > 0


def peers_of(config: TrainConfig, data: PreparedData) -> list[ZeroRow]:
    return measure_zero(config, data, WAYS, repeats=1, deepspeed=False)


def test_the_peers_train_the_same_model_on_the_same_batches(ranks: RankPool, tiny_data: PreparedData) -> None:
    config = tiny_config(dp=2, schedule="1f1b", zero={"stage": 3}, checkpoint={"enabled": False})
    # fully_shard leaves groups of its own.
    for rows in ranks.run(peers_of, 2, config, tiny_data, leaves_open=True):
        assert [row.reduce for row in rows] == ["microbatch", "step"]
        for row in rows:
            assert row.loss_difference < 1e-5
            assert row.sent_bytes >= row.lower_bound_bytes > 0
            assert 0.5 < row.peak_ratio < 3
            assert row.step_ratio_fully_shard > 0
            assert row.step_ratio_deepspeed is None
        assert rows[0].fully_shard_peak_bytes == rows[1].fully_shard_peak_bytes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"units": ("layer",)}, "of block, stage"),
        ({"hidden_size": 40}, "a multiple of 16"),
        ({"mbit_per_s": 0.0}, "must be above 0"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroBenchConfig(**values)
