"""Training with quantised gathers of weights: in every layout, through checkpoints, refused where none is gathered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import ConfigError
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import seed_everything, train
from counterflow.framework.trainer.run import RunContext
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.compress.weights import is_quantised
from tests.rank_pool import RankPool
from tests.runs import run_steps
from tests.tiny import MIXTURES, run_context, tiny_config

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "dp": 2, "zero": 1},
    {"dp": 2, "tp": 2, "zero": 2, "model": {"tie_embeddings": True}, "parallel": {"sequence_parallel": True}},
    {"pp": 2, "dp": 2, "schedule": "dualpipe", "zero": 3, "precision": {"compute": "bf16"}},
    {"dp": 4, "zero": 3, "parallel": {"expert_parallel_size": 2}, "model": MIXTURES["deepseek_v3"]},
]
WEIGHTS = {"weights": "int8", "weights_block_size": 64}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rounded_weights_follow_exact_ones(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: dict[str, Any]
) -> None:
    run = run_context(tiny_data, tmp_path)
    training = {"num_steps": 3, "eval_interval_steps": 0}
    configs = [
        tiny_config(**layout, training=training, compression=compression) for compression in ({}, WEIGHTS)
    ]
    plain, rounded = (ranks.run(run_steps, each.parallel.world_size, each, run)[0] for each in configs)
    for mine, theirs in zip(rounded, plain, strict=True):
        assert mine.loss != theirs.loss
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-3)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-2)
        assert mine.bytes_by_axis["data"] < 0.8 * theirs.bytes_by_axis["data"]
        assert mine.compression_ratio is None  # that of gradients


def whole_parameters(config: TrainConfig, run: RunContext) -> dict[str, Tensor]:
    """After two steps: what this rank computes with of parameters that tensor-parallel ranks all hold whole."""
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    for _ in train(assembly, 0):
        pass
    return {
        name: parameter.detach().clone()
        for module in assembly.modules
        for name, parameter in module.named_parameters()
        if not is_quantised(parameter)
    }


def test_tensor_parallel_ranks_agree_on_what_they_all_hold(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    """Norms beside columns that differ from rank to rank: rounded together they would come apart."""
    config = tiny_config(dp=2, tp=2, zero=2, training={"num_steps": 2}, compression=WEIGHTS)
    first, *others = ranks.run(whole_parameters, 4, config, run_context(tiny_data, tmp_path))
    assert any("norm" in name for name in first)
    for other in others:
        assert other.keys() == first.keys()
        for name, values in first.items():
            assert torch.equal(values, other[name]), name


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_a_resumed_run_is_bitwise_the_undisturbed_one(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: dict[str, Any]
) -> None:
    config = tiny_config(
        **layout,
        training={"num_steps": 4},
        compression=WEIGHTS | {"method": "onebit"},
        checkpoint={"enabled": True, "interval_steps": 2},
    )
    size = config.parallel.world_size
    run = run_context(tiny_data, tmp_path / "undisturbed")
    undisturbed = [record.loss for record in ranks.run(run_steps, size, config, run)[0]]
    stopped = run_context(tiny_data, tmp_path / "stopped")
    ranks.run(run_steps, size, config, stopped, 3)
    resumed = replace(config, checkpoint=replace(config.checkpoint, resume=str(stopped.run_dir)))
    # Its masters are exact, so that a run without goes on from it as well.
    exact = replace(resumed, compression=CompressionConfig())
    (third, _) = ranks.run(run_steps, size, exact, run_context(tiny_data, tmp_path / "exact"))[0]
    assert third.step == 2
    assert third.loss == pytest.approx(undisturbed[2], rel=1e-3)
    assert [record.loss for record in ranks.run(run_steps, size, resumed, stopped)[0]] == undisturbed[2:]


def test_where_no_weights_are_gathered_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compression.weights=int8: with zero.stage=0"):
        tiny_config(dp=2, zero=0, compression=WEIGHTS)


def test_a_warm_up_that_is_the_whole_run_is_noticed() -> None:
    compression = {"method": "onebit", "warmup_steps": 3}
    assert tiny_config(dp=2, training={"num_steps": 3}, compression=compression).never_compresses
    assert not tiny_config(dp=2, training={"num_steps": 4}, compression=compression).never_compresses
    assert not tiny_config(dp=2, training={"num_steps": 3}, compression={"warmup_steps": 9}).never_compresses
