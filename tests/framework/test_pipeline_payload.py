"""Training with activations and gradients rounded between stages: what it costs, and what it saves on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import seed_everything, train
from counterflow.framework.trainer.run import RunContext
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, run_context, tiny_config

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "schedule": "dualpipe", "zero": 3},
    {"pp": 2, "dp": 2, "schedule": "zbv", "zero": 1, "model": MIXTURES["deepseek_v3"]},
]


def steps(config: TrainConfig, run: RunContext) -> list[tuple[float, float, int]]:
    """Of each step: loss, gradient norm, bytes between stages."""
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    return [
        (record.loss, record.grad_norm, record.bytes_by_axis["pipeline"]) for record in train(assembly, 0)
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rounded_transfers_follow_exact_ones(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: dict[str, Any]
) -> None:
    run = run_context(tiny_data, tmp_path)
    found: dict[str, list[tuple[float, float, int]]] = {}
    for payload in ("compute", "bf16", "fp8"):
        config = tiny_config(
            **layout,
            training={"num_steps": 2, "eval_interval_steps": 0},
            comm={"pipeline_payload": payload},
        )
        found[payload] = ranks.run(steps, config.parallel.world_size, config, run)[0]
    exact = found.pop("compute")
    for payload, off, num_bytes in (("bf16", 1e-3, 2.0), ("fp8", 1e-2, 36 / 32)):
        for (loss, norm, sent), (exact_loss, exact_norm, exact_sent) in zip(
            found[payload], exact, strict=True
        ):
            assert loss != exact_loss
            assert loss == pytest.approx(exact_loss, rel=off)
            assert norm == pytest.approx(exact_norm, rel=10 * off)
            # Rows of 32 numbers; headers and the sums over both ends of a tie stay.
            saved = (exact_sent - sent) / exact_sent
            assert 0.7 * (1 - num_bytes / 4) < saved <= 1 - num_bytes / 4
