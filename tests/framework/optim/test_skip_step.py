"""Skipped steps: the score by hand, the bounds, and a run that skips a step against one that never had its batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.experts.routing import routing_state
from counterflow.framework.metrics.record import StepRecord
from counterflow.framework.optim.skip_step import (
    SkipStepConfig,
    SkipStepState,
    accepted,
    exceeded,
    robust_z,
    skipped,
    why_skipped,
)
from counterflow.framework.optim.step_guard import StepGuard
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.checkpointing import resume, save_if_due
from counterflow.framework.trainer.loop import seed_everything, train
from counterflow.framework.trainer.run import RunContext
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, merged, run_context, tiny_config, with_few_layers

WINDOW = (1.0, 2.0, 3.0, 4.0, 100.0)  # median 3; distances 2, 1, 0, 1, 97: their median is 1


def test_the_score_by_hand() -> None:
    assert robust_z(3.0, WINDOW) == 0
    assert robust_z(7.0, WINDOW) == pytest.approx(0.6745 * 4 / 1)
    assert robust_z(-1.0, WINDOW) == pytest.approx(-0.6745 * 4 / 1)
    # No spread at all: a thousandth of the median counts as the deviation.
    assert robust_z(2.002, (2.0,) * 9) == pytest.approx(0.6745 * 0.002 / 0.002)
    assert robust_z(1.0, (0.0,) * 9) == math.inf
    assert robust_z(0.0, (0.0,) * 9) == 0


def test_of_a_normal_distribution_it_counts_standard_deviations() -> None:
    values = torch.randn(20001, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5
    window = values.tolist()
    assert robust_z(5 + 3 * 4, window) == pytest.approx(4, abs=0.1)
    assert robust_z(5 + 3 * 4, window) == pytest.approx(
        (17 - statistics.fmean(window)) / statistics.stdev(window), abs=0.1
    )


def test_each_rule_acts_alone() -> None:
    state = SkipStepState(losses=WINDOW, norms=WINDOW)
    loss_only = SkipStepConfig(max_loss_z=2.5, min_steps=5)
    norm_only = SkipStepConfig(max_norm_z=2.5, min_steps=5)
    assert why_skipped(loss_only, state, 7.0, 1.0) is not None
    assert why_skipped(loss_only, state, 6.0, 1.0) is None  # 2.02
    assert why_skipped(loss_only, state, 1.0, 700.0) is None
    assert why_skipped(loss_only, state, -700.0, 1.0) is None  # a loss that falls
    assert why_skipped(loss_only, state, math.nan, math.nan) is None
    assert "the gradient norm 700 is an outlier" in str(why_skipped(norm_only, state, 7.0, 700.0))
    too_few = replace(norm_only, min_steps=6)
    assert why_skipped(too_few, state, 7.0, 700.0) is None
    finite_only = SkipStepConfig(skip_non_finite=True)
    assert why_skipped(finite_only, state, math.inf, 1.0) == "the loss is inf"
    assert why_skipped(finite_only, state, 1.0, math.nan) == "the gradient norm is nan"
    assert why_skipped(finite_only, state, 1e9, 1e9) is None


def test_the_window_holds_accepted_steps_only() -> None:
    config = SkipStepConfig(window_steps=3, min_steps=2, max_norm_z=8)
    state = SkipStepState()
    for step in range(5):
        state = accepted(config, state, float(step), 10.0 + step)
    assert (state.losses, state.norms) == ((2.0, 3.0, 4.0), (12.0, 13.0, 14.0))
    once = skipped(state)
    assert (once.losses, once.num_consecutive, once.num_total) == (state.losses, 1, 1)
    after = accepted(config, once, 5.0, 15.0)
    assert (after.num_consecutive, after.num_total) == (0, 1)


def test_bounds() -> None:
    config = SkipStepConfig(max_consecutive=2, max_total=3)
    assert exceeded(config, SkipStepState(num_consecutive=2, num_total=3)) is None
    assert exceeded(config, SkipStepState(num_consecutive=3, num_total=3)) == "skip_step.max_consecutive=2"
    assert exceeded(config, SkipStepState(num_consecutive=1, num_total=4)) == "skip_step.max_total=3"


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"max_norm_z": 0.5}, "skip_step.max_norm_z=0.5: a z-score of 1 or more"),
        ({"max_consecutive": 0}, "skip_step.max_consecutive=0: a number of steps; set it to 1 or more"),
        ({"window_steps": 10}, "skip_step.min_steps=20: the window never holds more than"),
    ],
)
def test_impossible_rules_are_refused(values: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        SkipStepConfig(**values)


def test_without_rules_a_norm_that_is_not_finite_ends_the_run() -> None:
    guard = StepGuard()
    assert guard.judge(0.0, 5.0, 0) is None
    with pytest.raises(
        FloatingPointError, match="the gradient norm is inf after 7 steps: nothing was updated"
    ):
        guard.judge(0.0, math.inf, 7)


class Outcome(NamedTuple):
    """What a rank saw: records, the loss of the held-out text after the last step, and the state then."""

    records: list[StepRecord]
    state: list[Tensor]
    num_updates: int
    error: str


def state_of(assembly: Assembly) -> list[Tensor]:
    """Everything that goes on from a step to the next."""
    tensors = [owned.fragment.master for owned in assembly.optimizer.owned]
    tensors += [state for owned in assembly.optimizer.owned for state in owned.state.values()]
    tensors += routing_state(assembly.modules).values()
    units = [unit for stage in assembly.stages.values() for unit in stage.units]
    tensors += [tensor for unit in units for tensor in unit.reduction.state().values()]
    return [tensor.clone() for tensor in tensors]


def spoil(assembly: Assembly, spoiled: dict[int, float], rank: int | None, *, losses: bool) -> None:
    """Multiply the gradients that the batches of some steps have led to, on every rank or on one, or their losses."""
    batch_of, optimizer, pass_over = assembly.train.batch, assembly.optimizer, assembly.runtime.step
    current = [0]

    def spoiled_pass(inputs: Any, targets: Any, loss_fn: Callable[..., Tensor], **options: Any) -> Any:
        factor = spoiled.get(current[-1], 1.0)

        def spoiled_loss(*args: Any) -> Tensor:
            loss = loss_fn(*args)
            loss_fn.loss.add_((factor - 1) * loss.detach())  # type: ignore[attr-defined]
            return factor * loss

        return pass_over(inputs, targets, spoiled_loss, **options)

    def batch(step: int) -> Any:
        current.append(step)
        return batch_of(step)

    def wrapped(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if rank is None or dist.get_rank() == rank:
                for owned in optimizer.owned:
                    owned.fragment.grad.mul_(spoiled.get(current[-1], 1.0))
            return act(*args)

        return call

    assembly.train.batch = batch
    if losses:
        assembly.runtime.step = spoiled_pass
        return
    optimizer.step, optimizer.step_ahead = wrapped(optimizer.step), wrapped(optimizer.step_ahead)


def run_steps(
    config: TrainConfig,
    run: RunContext,
    spoiled: dict[int, float],
    lacks: int | None = None,
    rank: int | None = None,
    stop_after: int | None = None,
    spoils_losses: bool = False,
) -> Outcome:
    """Train; lacks: a batch that the data does not have. stop_after: as a killed run would."""
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    if lacks is not None:
        batch_of = assembly.train.batch
        assembly.train.batch = lambda step: batch_of(step + (step >= lacks))
    spoil(assembly, spoiled, rank, losses=spoils_losses)
    records: list[StepRecord] = []
    error = ""
    try:
        for record in train(assembly, resume(assembly, run)):
            records.append(record)
            save_if_due(assembly, run, record.step + 1)
            if record.step + 1 == stop_after:
                break
    except FloatingPointError as raised:
        error = str(raised)
    dist.barrier()
    return Outcome(records, state_of(assembly), assembly.optimizer.num_steps, error)


CONSTANT = {"lr_schedule": {"name": "constant", "warmup_steps": 4}, "max_grad_norm": 30.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "zero3": {"pp": 2, "dp": 2, "zero": 3, "schedule": "dualpipe", "precision": {"compute": "bf16"}},
    "tensor": {"pp": 2, "tp": 2, "zero": 1, "model": {"tie_embeddings": True}},
    "experts": {
        "pp": 2,
        "dp": 2,
        "zero": 1,
        "schedule": "zb1p",
        "model": MIXTURES["deepseek_v3"],
        "parallel": {"expert_parallel_size": 2},
    },
    "compressed": {"dp": 2, "num_microbatches": 2, "compression": {"method": "onebit", "warmup_steps": 1}},
    "warming up": {
        "dp": 2,
        "zero": 2,
        "num_microbatches": 2,
        "compression": {"method": "int8", "warmup_steps": 3},
    },
    "powersgd": {"dp": 2, "zero": 2, "num_microbatches": 2, "compression": {"method": "powersgd"}},
    "ahead": {"pp": 2, "dp": 2, "zero": 2, "schedule": "zbv", "optimizer": {"post_validation": True}},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("tensor", "powersgd") else [])
        for name in LAYOUTS
    ],
)
def test_a_step_that_is_not_finite_is_skipped_as_if_its_batch_had_not_been(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, name: str
) -> None:
    """The loss of step 2, or one rank's gradient, is NaN: losses, held-out loss and state are those of data without
    that batch."""
    spoils_losses = name in ("experts", "compressed", "warming up", "powersgd")
    layout = merged(
        with_few_layers(LAYOUTS[name]), {"optimizer": CONSTANT, "skip_step": {"skip_non_finite": True}}
    )
    config = tiny_config(**layout, training={"num_steps": 6, "eval_interval_steps": 0})
    lacking = replace(config, training=replace(config.training, num_steps=5))
    size, run = config.parallel.world_size, run_context(tiny_data, tmp_path)
    guarded = ranks.run(run_steps, size, config, run, {2: math.nan}, None, size - 1, None, spoils_losses)
    expected = ranks.run(run_steps, size, lacking, run, {}, 2)
    for mine, theirs in zip(guarded, expected, strict=True):
        assert [record.skipped is not None for record in mine.records] == [
            False,
            False,
            True,
            False,
            False,
            False,
        ]
        what = "loss" if spoils_losses else "gradient norm"
        assert mine.records[2].skipped == f"the {what} is nan (1 in a row, 1 in all)"
        kept = [record for record in mine.records if record.skipped is None]
        for record, other in zip(kept, theirs.records, strict=True):
            assert (record.loss, record.grad_norm, record.learning_rate, record.moe) == (
                other.loss,
                other.grad_norm,
                other.learning_rate,
                other.moe,
            )
        assert mine.records[-1].validation_loss == theirs.records[-1].validation_loss is not None
        assert mine.num_updates == theirs.num_updates == 5
        assert len(mine.state) == len(theirs.state)
        assert all(map(torch.equal, mine.state, theirs.state))


def test_an_outlier_is_skipped_and_what_was_skipped_survives_a_checkpoint(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    """The norm of step 5 is a thousandfold; the run is killed after step 7 and goes on from step 6 to the same end."""
    config = tiny_config(
        pp=2,
        dp=2,
        zero=1,
        model={"num_layers": 2},
        training={"num_steps": 10, "eval_interval_steps": 0},
        skip_step={"max_norm_z": 20.0, "min_steps": 4, "window_steps": 8},
        checkpoint={"enabled": True, "interval_steps": 6},
        optimizer={"lr_schedule": {"warmup_steps": 3}},
    )
    spoiled = {5: 1000.0, 8: 1000.0}
    run, stopped = run_context(tiny_data, tmp_path / "whole"), run_context(tiny_data, tmp_path / "stopped")
    whole = ranks.run(run_steps, 4, config, run, spoiled)[0]
    assert [record.step for record in whole.records if record.skipped] == [5, 8]
    assert "(1 in a row, 2 in all)" in str(whole.records[8].skipped)
    assert StepRecord.from_json(whole.records[5].to_json()) == whole.records[5]
    assert whole.records[5].scalars()["skipped"] == 1
    assert "skipped" not in whole.records[4].scalars()
    ranks.run(run_steps, 4, config, stopped, spoiled, None, None, 7)
    resumed = replace(config, checkpoint=replace(config.checkpoint, resume=str(stopped.run_dir)))
    after = ranks.run(run_steps, 4, resumed, stopped, spoiled)[0]
    assert [(r.loss, r.grad_norm, r.learning_rate, r.skipped) for r in after.records] == [
        (r.loss, r.grad_norm, r.learning_rate, r.skipped) for r in whole.records[6:]
    ]
    assert all(map(torch.equal, after.state, whole.state))


@pytest.mark.parametrize("ahead", [False, True])
def test_too_many_skipped_steps_end_the_run(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, ahead: bool
) -> None:
    config = tiny_config(
        pp=2,
        training={"num_steps": 8, "eval_interval_steps": 0},
        skip_step={"skip_non_finite": True, "max_consecutive": 2},
        optimizer={"post_validation": ahead},
    )
    spoiled = {1: math.nan, 3: math.nan, 4: math.nan, 5: math.nan}
    for outcome in ranks.run(run_steps, 2, config, run_context(tiny_data, tmp_path), spoiled):
        assert outcome.error.startswith(
            "the gradient norm is nan after 2 steps, and skip_step.max_consecutive=2 allows no further step to be "
            "skipped (3 in a row, 4 in all): nothing was updated"
        )
        assert [record.step for record in outcome.records if record.skipped] == [1, 3, 4]
        assert all(tensor.isfinite().all() for tensor in outcome.state)
