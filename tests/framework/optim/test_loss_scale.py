"""Dynamic loss scaling: the rule against torch's GradScaler, and fp16 runs that overflow, recover and follow fp32."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.optim.loss_scale import LossScale, LossScaleConfig, scale_after
from counterflow.framework.optim.scaled_gradient import with_scaled_gradient
from counterflow.framework.optim.skip_step import BrakesConfig
from counterflow.framework.optim.step_guard import StepGuard
from tests.framework.optim.test_skip_step import run_steps
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, run_context, tiny_config

SMALL = {"initial_scale": 1024.0, "growth_interval": 3}


def test_the_rule_against_torch() -> None:
    """Overflows here and there: torch.amp.GradScaler goes through the same scales."""
    config = LossScaleConfig(initial_scale=1024, growth_factor=2, backoff_factor=0.25, growth_interval=3)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=1024, growth_factor=2, backoff_factor=0.25, growth_interval=3
    )
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    state = LossScale(scale=config.initial_scale)
    for overflows in (0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0):
        assert state.scale == scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (math.inf if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        state = scale_after(config, state, has_overflowed=bool(overflows))
    assert state.scale == scaler.get_scale()


def test_only_the_gradient_is_scaled() -> None:
    x = torch.tensor([1.5, -2.0], requires_grad=True)
    loss = with_scaled_gradient((x * x).sum(), 8.0)
    loss.backward()
    assert float(loss.detach()) == 6.25
    assert x.grad is not None
    assert x.grad.tolist() == [24.0, -32.0]


def test_the_scale_ends_at_its_least_and_leaves_losses_to_the_brakes() -> None:
    scaling = LossScaleConfig(initial_scale=2, min_scale=1)
    guard = StepGuard(None, scaling)
    assert guard.judge(0.0, math.inf, 3) == "gradients overflowed at loss scale 2, it is 1 now"
    with pytest.raises(FloatingPointError, match="the gradient norm is nan at loss scale 1 after 3 steps"):
        guard.judge(0.0, math.nan, 3)
    braked = StepGuard(BrakesConfig(skip_non_finite=True), scaling)
    assert str(braked.judge(math.nan, math.nan, 3)).startswith("the loss is nan (1 in a row")
    assert braked.loss_scale == 2  # it was not the scale's doing
    assert str(braked.judge(1.0, math.nan, 3)).startswith("gradients overflowed at loss scale 2")


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"initial_scale": 0.5}, "initial_scale=0.5: must be from min_scale"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0: must be between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval=0: must be a number of steps"),
    ],
)
def test_an_impossible_scale_is_refused(values: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"precision.loss_scale.{rule}"):
        LossScaleConfig(**values)


LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 2, "dp": 2, "zero": 1},
    "tensor": {"tp": 2, "zero": 0, "num_microbatches": 2, "model": {"tie_embeddings": True}},
    "dualpipe": {"pp": 2, "dp": 2, "zero": 3, "schedule": "dualpipe"},
    "ahead": {"pp": 2, "dp": 2, "zero": 2, "schedule": "zbv", "optimizer": {"post_validation": True}},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("tensor", "dualpipe") else [])
        for name in LAYOUTS
    ],
)
def test_fp16_recovers_from_an_overflow(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, name: str
) -> None:
    """Gradients of one rank overflow in step 2: every rank skips it, the scale is halved, and training goes on as if
    the batch had not been; a scale that is another power of two changes no loss."""
    layout = dict(LAYOUTS[name])
    layout["optimizer"] = {"lr_schedule": {"name": "constant", "warmup_steps": 4}} | layout.get(
        "optimizer", {}
    )
    config = tiny_config(
        **layout,
        precision={"compute": "fp16", "loss_scale": SMALL},
        training={"num_steps": 7, "eval_interval_steps": 0},
    )
    lacking = replace(config, training=replace(config.training, num_steps=6))
    size, run = config.parallel.world_size, run_context(tiny_data, tmp_path)
    overflown = ranks.run(run_steps, size, config, run, {2: math.inf}, None, size - 1)
    expected = ranks.run(run_steps, size, lacking, run, {}, 2)
    for mine, theirs in zip(overflown, expected, strict=True):
        assert [record.loss_scale for record in mine.records] == [1024, 1024, 1024, 512, 512, 512, 1024]
        assert mine.records[2].skipped == "gradients overflowed at loss scale 1024, it is 512 now"
        assert [record.loss_scale for record in theirs.records] == [1024, 1024, 1024, 2048, 2048, 2048]
        kept = [record for record in mine.records if record.skipped is None]
        assert [record.loss for record in kept] == pytest.approx(
            [record.loss for record in theirs.records], rel=1e-4
        )
        assert mine.num_updates == 6
        assert all(tensor.isfinite().all() for tensor in mine.state)


@pytest.mark.parametrize(
    "method",
    [
        "none",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("onebit", "int8", "fp8", "topk", "powersgd")
        ),
    ],
)
def test_a_scale_that_overflows_by_itself_comes_down(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, method: str
) -> None:
    """No injection: fp16 does not hold gradients at a scale of 2^40; steps are skipped until it does, and what
    compressed reductions keep of them is forgotten."""
    config = tiny_config(
        dp=2,
        zero=2,
        num_microbatches=2,
        model=MIXTURES["mixtral"],
        compression={"method": method},
        precision={"compute": "fp16", "loss_scale": {"initial_scale": 2.0**40, "backoff_factor": 2.0**-8}},
        training={"num_steps": 8, "eval_interval_steps": 0},
    )
    records = ranks.run(run_steps, 2, config, run_context(tiny_data, tmp_path), {})[0].records
    is_skipped = [record.skipped is not None for record in records]
    assert is_skipped[0]
    assert not is_skipped[-1]
    assert is_skipped == sorted(is_skipped, reverse=True)
    rates = [record.learning_rate for record in records]
    assert rates[: sum(is_skipped) + 1] == [rates[0]] * (sum(is_skipped) + 1)
    assert math.isfinite(records[-1].grad_norm)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("dense", marks=pytest.mark.slow),
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        "deepseek_v3",
    ],
)
def test_fp16_follows_fp32(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, model: str) -> None:
    """Auxiliary losses and further predictions are scaled with the main loss: norms agree as well as losses."""
    found = {
        precision: ranks.run(
            run_steps,
            2,
            tiny_config(
                pp=2,
                model=MIXTURES.get(model, {}),
                precision={"compute": precision, "loss_scale": {"initial_scale": 256.0}},
                training={"num_steps": 10, "eval_interval_steps": 0},
            ),
            run_context(tiny_data, tmp_path),
            {},
        )[0].records
        for precision in ("fp32", "fp16")
    }
    for mine, theirs in zip(found["fp16"], found["fp32"], strict=True):
        assert mine.skipped is None
        assert mine.loss == pytest.approx(theirs.loss, rel=5e-3)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=5e-2)
        assert (mine.loss_scale, theirs.loss_scale) == (256, None)
    assert found["fp16"][-1].loss < found["fp16"][0].loss - 0.1
    assert found["fp16"][-1].grad_norm != found["fp32"][-1].grad_norm


def test_the_scale_survives_a_checkpoint(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    """Saved after step 4, in the middle of the interval that ends with step 6."""
    config = tiny_config(
        pp=2,
        dp=2,
        zero=1,
        precision={"compute": "fp16", "loss_scale": SMALL},
        training={"num_steps": 8, "eval_interval_steps": 0},
        checkpoint={"enabled": True, "interval_steps": 5},
    )
    run, stopped = run_context(tiny_data, tmp_path / "whole"), run_context(tiny_data, tmp_path / "stopped")
    whole = ranks.run(run_steps, 4, config, run, {1: math.inf})[0]
    ranks.run(run_steps, 4, config, stopped, {1: math.inf}, None, None, 5)
    resumed = replace(config, checkpoint=replace(config.checkpoint, resume=str(stopped.run_dir)))
    after = ranks.run(run_steps, 4, resumed, stopped, {})[0]
    assert [(r.loss, r.loss_scale) for r in after.records] == [
        (r.loss, r.loss_scale) for r in whole.records[5:]
    ]
    assert [record.loss_scale for record in whole.records] == [1024, 1024, 512, 512, 512, 1024, 1024, 1024]
    assert all(map(torch.equal, after.state, whole.state))
