"""DeepSpeed's engine trains what our own sharding trains: the issue's 20 steps within 1e-4, in ranks of their own.

Ranks of their own because DeepSpeed keeps process groups in its modules.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counterflow.framework.bench.deepspeed import EngineRow, compare_engines
from counterflow.framework.deepspeed.start import why_not
from counterflow.framework.trainer.loop import run_rank
from counterflow.launch.bench.ranks import run_ranks
from counterflow.launch.ranks.elastic import run_local
from tests.tiny import prepare_tiny, run_context, tiny_config

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

NUM_STEPS = 20


def rows_of(folder: Path, stages: tuple[int, ...], **values: Any) -> list[EngineRow]:
    config = tiny_config(
        zero={"engine": "deepspeed", "stage": stages[0]},
        training={"num_steps": NUM_STEPS},
        num_microbatches=2,
        **values,
    )
    data = prepare_tiny(folder / "data")
    return run_ranks(
        compare_engines, (config, data, stages), num_ranks=config.parallel.world_size, folder=folder
    )


def assert_equal(rows: list[EngineRow]) -> None:
    for row in rows:
        assert len(row.deepspeed.loss) == NUM_STEPS
        # It learns, so that equal losses say something, and is clipped, so that equal norms do.
        assert row.deepspeed.loss[-1] < row.deepspeed.loss[0] - 0.1
        assert max(row.native.grad_norm) > 1.0
        assert row.loss_difference <= 1e-4
        assert row.norm_difference <= 1e-4
        assert row.native.validation_loss is not None
        assert row.deepspeed.validation_loss == pytest.approx(row.native.validation_loss, abs=1e-4)


def test_losses_are_those_of_our_own_sharding(tmp_path: Path) -> None:
    assert_equal(rows_of(tmp_path, (0, 3), dp=2))


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_losses_at_every_stage(tmp_path: Path, tp: int, tie: bool) -> None:
    """tp=2 with sequence parallelism: the gradients of norms are terms of a sum that a hook has to make."""
    assert_equal(rows_of(tmp_path, (0, 1, 2, 3), dp=2, tp=tp, model={"tie_embeddings": tie}))


@pytest.mark.slow
def test_recomputation_and_a_batch_that_grows(tmp_path: Path) -> None:
    ramp = {"start_num_microbatches": 1, "increment": 1, "ramp_samples": 20}
    config = tiny_config(
        dp=2,
        zero={"engine": "deepspeed", "stage": 3},
        num_microbatches=2,
        recompute={"mode": "full"},
        training={"num_steps": NUM_STEPS, "batch_ramp": ramp},
    )
    data = prepare_tiny(tmp_path / "data")
    assert_equal(run_ranks(compare_engines, (config, data, (1, 3)), num_ranks=2, folder=tmp_path))


def test_a_run_has_the_records_of_every_run(tmp_path: Path) -> None:
    config = tiny_config(
        dp=2, zero={"engine": "deepspeed", "stage": 1}, training={"num_steps": 2}, num_microbatches=2
    )
    data = prepare_tiny(tmp_path / "data")
    lines: dict[str, list[dict[str, Any]]] = {}
    for engine in ("native", "deepspeed"):
        folder = tmp_path / engine
        folder.mkdir()
        chosen = replace(config, zero=replace(config.zero, engine=engine))
        summary = run_local(run_rank, (chosen, run_context(data, folder)), num_ranks=2, run_dir=folder)[0]
        assert summary["steps"] == 2
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines[engine] = [record for record in records if "grad_norm" in record]
    assert len(lines["native"]) == len(lines["deepspeed"]) == 2
    for mine, theirs in zip(lines["deepspeed"], lines["native"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in ("loss", "grad_norm", "learning_rate", "num_tokens"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5)
        assert mine["tokens_per_s"] > 0
    assert lines["deepspeed"][-1]["validation_loss"] == pytest.approx(
        lines["native"][-1]["validation_loss"], rel=1e-5
    )
