"""The trainer: runs resume bitwise, bf16 follows fp32, records say what happened."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import train
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import evaluate
from tests.rank_pool import RankPool
from tests.runs import run_steps
from tests.tiny import run_context, tiny_config

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "dp": 2, "tp": 2, "schedule": "dualpipe", "zero": 3, "num_microbatches": 4},
    {"pp": 2, "dp": 2, "schedule": "1f1b", "zero": 1},
    {"pp": 1, "dp": 1, "schedule": "gpipe", "zero": 0, "num_microbatches": 4},
]


def losses_and_norms(
    config: TrainConfig, run: RunContext, stop_after: int | None
) -> tuple[list[float], list[float]]:
    """Of each step that `run_steps` makes."""
    records = run_steps(config, run, stop_after)
    return [record.loss for record in records], [record.grad_norm for record in records]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        # What bf16 adds to a checkpoint, masters beside parameters, is sharded most in the first layout.
        pytest.param(layout, precision, marks=pytest.mark.slow if precision == "bf16" and at else [])
        for at, layout in enumerate(LAYOUTS)
        for precision in ("fp32", "bf16")
    ],
    ids=str,
)
def test_a_resumed_run_is_bitwise_the_undisturbed_one(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: dict[str, Any], precision: str
) -> None:
    config = tiny_config(
        **layout,
        training={"num_steps": 4},
        precision={"compute": precision},
        checkpoint={"enabled": True, "interval_steps": 2},
    )
    world_size = config.parallel.world_size
    run = run_context(tiny_data, tmp_path / "undisturbed")
    losses, norms = ranks.run(losses_and_norms, world_size, config, run, None)[0]
    stopped = run_context(tiny_data, tmp_path / "stopped")
    before = ranks.run(losses_and_norms, world_size, config, stopped, 3)[0]
    assert before[0] == losses[:3]
    resumed = replace(config, checkpoint=replace(config.checkpoint, resume=str(stopped.run_dir)))
    after = ranks.run(losses_and_norms, world_size, resumed, stopped, None)[0]
    assert after == (losses[2:], norms[2:])


def test_a_checkpoint_goes_on_in_another_layout(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    """Names and shards are free of the layout: what 8 ranks saved, 2 ranks continue, to rounding."""
    checkpoint = {"enabled": True, "interval_steps": 3}
    config = tiny_config(**LAYOUTS[0], training={"num_steps": 6}, checkpoint=checkpoint)
    run = run_context(tiny_data, tmp_path)
    losses, _ = ranks.run(losses_and_norms, 8, config, run, None)[0]
    other = tiny_config(
        tp=2,
        num_microbatches=8,
        zero=0,
        training={"num_steps": 6},
        checkpoint=checkpoint | {"resume": str(tmp_path)},
    )
    for leftover in (tmp_path / "checkpoints").glob("step-00000006"):
        leftover.rename(tmp_path / "set-aside")
    after, _ = ranks.run(losses_and_norms, 2, other, run, None)[0]
    assert after == pytest.approx(losses[3:], rel=1e-5)


def test_resuming_with_other_data_is_refused(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    config = tiny_config(training={"num_steps": 2}, checkpoint={"enabled": True})
    run = run_context(tiny_data, tmp_path)
    ranks.run(losses_and_norms, 1, config, run, None)
    resumed = replace(config, checkpoint=replace(config.checkpoint, resume=str(tmp_path)))
    for changed, key in (
        (replace(resumed, seed=1), "seed"),
        (replace(resumed, schedule=replace(resumed.schedule, num_microbatches=8)), "global_batch_size"),
    ):
        with pytest.raises(AssertionError, match=f"its {key} is"):
            ranks.run(losses_and_norms, 1, changed, run, None)


def test_bf16_follows_fp32(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for precision in ("fp32", "bf16"):
        config = tiny_config(
            pp=2,
            dp=2,
            schedule="dualpipe",
            zero=3,
            precision={"compute": precision},
            training={"num_steps": 20},
        )
        losses[precision], _ = ranks.run(losses_and_norms, 4, config, run_context(tiny_data, tmp_path), None)[
            0
        ]
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.3
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=2e-2)
    assert losses["bf16"] != losses["fp32"]


def test_records_add_up(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    records = ranks.run(
        records_of_two_steps,
        4,
        tiny_config(pp=2, tp=2, schedule="dualpipe", zero=3),
        run_context(tiny_data, tmp_path),
    )[0]
    for record in records:
        values = json.loads(record)
        makespans = [busy + idle for busy, idle in zip(values["busy_s"], values["idle_s"], strict=True)]
        assert makespans == pytest.approx([makespans[0]] * 2)
        assert makespans[0] <= values["step_s"]
        bubble = sum(values["idle_s"]) / sum(makespans)
        assert values["bubble_measured"] == pytest.approx(bubble)
        assert values["num_tokens"] == 4 * 16
        # Each of 4 micro-batches crosses once either way: [1, 16 / 2, 32] fp32, on each of 2 tensor ranks;
        # and each of 2 directions has a header of 64 numbers on each.
        assert values["bytes_by_axis"]["pipeline"] == 2 * 4 * 2 * (8 * 32 * 4) + 2 * 2 * 64 * 8
        assert values["bytes_by_axis"]["tensor"] > 0
        assert values["bytes_by_axis"]["data"] > 0
        assert values["peak_live_activations"] == [3, 3]
        by_rank = values["rank_busy_s"]
        means = [sum(by_rank[:2]) / 2, sum(by_rank[2:]) / 2]
        assert values["busy_s"] == pytest.approx(means, abs=1e-5)
        assert values["slowest_over_peers"] >= 1
        assert by_rank[values["slowest_rank"]] in (max(by_rank[:2]), max(by_rank[2:]))
        assert values["host_lead_s"] is None, "a CPU is its own host"
        assert values["mfu"] is None


def records_of_two_steps(config: TrainConfig, run: RunContext) -> list[str]:
    assembly = build(
        replace(config, training=replace(config.training, num_steps=2)), run.data, torch.device("cpu")
    )
    return [record.to_json() for record in train(assembly, 0)]


def test_validation_loss_is_that_of_the_held_out_text(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    """The same in every layout, and not the training loss."""
    losses = [
        ranks.run(validation_loss, config.parallel.world_size, config, run_context(tiny_data, tmp_path))[0]
        for config in (tiny_config(num_microbatches=8), tiny_config(pp=2, dp=2, schedule="dualpipe", zero=3))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def validation_loss(config: TrainConfig, run: RunContext) -> float:
    loss = evaluate(build(config, run.data, torch.device("cpu")))
    assert loss is not None
    return loss


def test_a_diverged_run_stops_and_keeps_its_sound_checkpoint(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    config = tiny_config(
        training={"num_steps": 5},
        optimizer={"base_lr": 1e30, "lr_schedule": {"warmup_steps": 1}},
        checkpoint={"enabled": True, "interval_steps": 1, "keep": 1},
    )
    with pytest.raises(AssertionError, match="FloatingPointError: the gradient norm is nan after 1 steps"):
        ranks.run(losses_and_norms, 1, config, run_context(tiny_data, tmp_path), None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_rank_imports_what_it_uses() -> None:
    """Each rank of a cluster pays for its own imports: torch.compile, DTensor and pictures cost more than torch."""
    code = (
        "import sys; from counterflow.framework.trainer.loop import seed_everything\n"
        "import torch; seed_everything(0, deterministic=True); print(*sys.modules)\n"
        "assert torch.are_deterministic_algorithms_enabled()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    unused = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "matplotlib"}
    assert not unused & set(done.stdout.split())
