"""Offloading changes no bit of a run, keeps within its budget, and is refused where it cannot."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import ConfigError
from counterflow.framework.metrics.record import OffloadRecord, StepRecord
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import seed_everything
from counterflow.framework.trainer.measure import step_record
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import forward_backward, learning_rate_of, train_step
from counterflow.parallel.offload.config import OffloadConfig
from counterflow.parallel.offload.offloader import OffloadReport
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.ir.trace import Recorder
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, run_context, tiny_config

NUM_STEPS = 2


def trained(config: TrainConfig, run: RunContext) -> tuple[list[Tensor], list[OffloadReport]]:
    """Losses and norms, gradients and parameters; and what was moved in each step."""
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    found: list[Tensor] = []
    reports: list[OffloadReport] = []
    for step in range(NUM_STEPS):
        batch = forward_backward(assembly, step, Recorder(assembly.device))
        gradients = [owned.fragment.grad.clone() for owned in assembly.optimizer.owned]
        norm = assembly.optimizer.step(learning_rate_of(config, step, NUM_STEPS)).grad_norm
        found.append(torch.tensor([batch.loss, batch.mtp_loss, norm], dtype=torch.float64))
        if step == NUM_STEPS - 1:
            found.extend(gradients)
        if assembly.runtime.offloader is not None:
            reports.append(assembly.runtime.offloader.report)
    return [*found, *(owned.fragment.master.clone() for owned in assembly.optimizer.owned)], reports


def offload_of(policy: str, tier: str, share: float, folder: Path) -> OffloadConfig:
    return OffloadConfig(
        policy=policy,  # type: ignore[arg-type]
        tier=tier,  # type: ignore[arg-type]
        budget_share=share,
        folder=str(folder),
        min_bytes=0,
    )


def assert_no_bit_changes(
    ranks: RankPool, data: PreparedData, folder: Path, config: TrainConfig, *offloads: OffloadConfig
) -> None:
    """And that something was moved, within the budget as measured, all of it out and back."""
    size, run = config.parallel.world_size, run_context(data, folder)
    expected = ranks.run(trained, size, config, run)
    for offload in offloads:
        changed = replace(config, offload=offload)
        budget = Workload.of(changed, data_vocab_size=321, device_type="cpu").activation_budget
        assert budget is not None
        found = ranks.run(trained, size, changed, run)
        for (of_rank, _), (others, reports) in zip(expected, found, strict=True):
            assert len(of_rank) > 2 * NUM_STEPS
            for one, other in zip(of_rank, others, strict=True):
                assert torch.equal(one, other), offload
            # In the first step it is not seen yet that tables are shared.
            report = reports[-1]
            assert report.out_bytes == report.back_bytes
            assert 0 < report.peak_bytes <= budget.budget_bytes
        assert any(reports[-1].out_bytes for _, reports in found)


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (
            {
                "schedule": "1f1b",
                "pp": 2,
                "recompute": {"mode": "full", "every": 2},
                "model": {"num_layers": 8},
            },
            [("schedule", "disk", 0.8)],
        ),
        ({"schedule": "zbv", "pp": 2, "tp": 2}, [("lru", "disk", 0.6), ("schedule", "host", 0.4)]),
        ({"schedule": "dualpipe", "pp": 2, "dp": 2, "zero": 3}, [("schedule", "disk", 0.6)]),
    ],
    ids=["1f1b, recomputed", "zbv, tp", "dualpipe, zero 3"],
)
def test_no_bit_changes(
    ranks: RankPool,
    tiny_data: PreparedData,
    tmp_path: Path,
    layout: dict[str, Any],
    cases: list[tuple[str, str, float]],
) -> None:
    offloads = [offload_of(*case, tmp_path) for case in cases]
    assert_no_bit_changes(ranks, tiny_data, tmp_path, tiny_config(**layout), *offloads)


def test_no_bit_changes_with_experts_on_other_ranks(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    """The halves of dualpipe's pairs run together, and what a forward keeps depends on where tokens go."""
    config = tiny_config(
        schedule="dualpipe",
        pp=2,
        dp=2,
        zero=3,
        num_microbatches=8,
        parallel={"expert_parallel_size": 2},
        model=MIXTURES["deepseek_v3"],
    )
    run = run_context(tiny_data, tmp_path)
    expected = ranks.run(trained, 4, config, run)
    found = ranks.run(trained, 4, replace(config, offload=offload_of("schedule", "disk", 0.7, tmp_path)), run)
    for (of_rank, _), (others, reports) in zip(expected, found, strict=True):
        assert all(itertools.starmap(torch.equal, zip(of_rank, others, strict=True)))
        assert reports[-1].out_bytes == reports[-1].back_bytes > 0


PAIRWISE = [
    # schedule, tp, zero, model, policy, tier, recompute
    ("1f1b", 1, 0, "dense", "schedule", "disk", "none"),
    ("1f1b", 2, 3, "mixtral", "lru", "host", "none"),
    ("1f1b", 1, 3, "deepseek_v3", "schedule", "host", "none"),
    ("zbv", 1, 3, "dense", "lru", "disk", "full"),
    ("zbv", 2, 0, "qwen3_moe", "schedule", "disk", "none"),
    ("zbv", 1, 0, "mixtral", "schedule", "host", "full"),
    ("dualpipe", 2, 3, "dense", "schedule", "host", "full"),
    ("dualpipe", 1, 0, "deepseek_v3", "lru", "disk", "none"),
    ("dualpipe", 2, 0, "mixtral", "schedule", "disk", "none"),
    ("interleaved_1f1b", 1, 2, "dense", "schedule", "disk", "none"),
    ("interleaved_1f1b", 2, 1, "qwen3_moe", "lru", "host", "none"),
    ("dualpipe_v", 1, 3, "dense", "lru", "host", "none"),
    ("gpipe", 1, 1, "dense", "schedule", "host", "full"),
    ("zb_h2", 2, 2, "dense", "schedule", "disk", "none"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "tp", "zero", "name", "policy", "tier", "recompute"), PAIRWISE)
def test_no_bit_changes_anywhere(
    ranks: RankPool,
    tiny_data: PreparedData,
    tmp_path: Path,
    schedule: str,
    tp: int,
    zero: int,
    name: str,
    policy: str,
    tier: str,
    recompute: str,
) -> None:
    nodes: dict[str, Any] = {} if name == "dense" else {"model": MIXTURES[name]}
    nodes["parallel"] = {} if name == "dense" else {"expert_parallel_size": 2 * tp}
    config = tiny_config(
        schedule=schedule,
        pp=2,
        dp=2,
        tp=tp,
        zero=zero,
        num_microbatches=8,
        recompute={"mode": recompute},
        **nodes,
    )
    run, size = run_context(tiny_data, tmp_path), config.parallel.world_size
    expected = ranks.run(trained, size, config, run)
    moved = 0
    for share in (0.9, 0.7, 0.5):
        changed = replace(config, offload=offload_of(policy, tier, share, tmp_path))
        try:
            Workload.of(changed, data_vocab_size=321, device_type="cpu").schedule(8)
        except ValueError:
            continue
        found = ranks.run(trained, size, changed, run)
        for (of_rank, _), (others, reports) in zip(expected, found, strict=True):
            assert all(itertools.starmap(torch.equal, zip(of_rank, others, strict=True))), share
            assert reports[-1].out_bytes == reports[-1].back_bytes
            moved += reports[-1].out_bytes
    assert moved > 0


def recorded(config: TrainConfig, run: RunContext) -> StepRecord:
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    train_step(assembly, 0)
    return step_record(assembly, train_step(assembly, 1))


def test_the_record_says_what_was_moved(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    config = tiny_config(schedule="gpipe", pp=2, num_microbatches=6)
    offload = replace(offload_of("lru", "host", 0.5, tmp_path), copy_bytes_per_s=2e6)
    records = ranks.run(recorded, 2, replace(config, offload=offload), run_context(tiny_data, tmp_path))
    record = records[0]
    found = record.offload
    assert isinstance(found, OffloadRecord)
    assert found.out_bytes == found.back_bytes > 0
    assert 0 < found.hit_rate < 1
    assert found.stall_s == pytest.approx(record.time_s["offload_wait"], abs=1e-6)
    # By the rate at which what was moved on demand came back: at the least half of the bytes, by one of the two ranks.
    assert max(found.stall_s) > found.back_bytes / 4 / 2e6
    assert StepRecord.from_json(record.to_json()) == record
    scalars = record.scalars()
    assert scalars["offload/out_bytes"] == found.out_bytes
    assert scalars["offload/peak_bytes/rank_1"] == found.peak_bytes[1]
    assert "offload/stall_s/rank_0" in scalars
    assert ranks.run(recorded, 2, config, run_context(tiny_data, tmp_path))[0].offload is None


def test_without_a_budget_nothing_is_built(tmp_path: Path) -> None:
    config = tiny_config(schedule="1f1b", pp=2)
    unlimited = replace(config, offload=OffloadConfig(policy="schedule", tier="disk", folder=str(tmp_path)))
    assert Workload.of(unlimited).activation_budget is None
    assert Workload.of(unlimited).schedule(4) == Workload.of(config).schedule(4)
    limited = replace(config, offload=OffloadConfig(policy="schedule", budget_share=0.8))
    kinds = {action.kind for actions in Workload.of(limited).schedule(4).actions for action in actions}
    assert kinds >= {Kind.OFFLOAD, Kind.RELOAD}


def test_mistakes_are_told_before_ranks_start() -> None:
    with pytest.raises(ConfigError, match=r"offload\.policy=none with offload\.budget_share=0\.5"):
        tiny_config(offload={"budget_share": 0.5})
    with pytest.raises(ConfigError, match="a budget is given in one way"):
        tiny_config(offload={"policy": "lru", "budget_share": 0.5, "budget_bytes": 1000})
    with pytest.raises(
        ConfigError, match=r"offload\.budget_bytes=1000: a rank needs \d+ bytes of activations"
    ):
        tiny_config(offload={"policy": "schedule", "budget_bytes": 1000})
    with pytest.raises(ConfigError, match=r"offload\.budget_share=2"):
        tiny_config(offload={"policy": "schedule", "budget_share": 2.0})
    with pytest.raises(ConfigError, match=r"offload\.copy_bytes_per_s=0"):
        tiny_config(offload={"policy": "schedule", "copy_bytes_per_s": 0.0})


@pytest.mark.parametrize(("key", "small"), [("budget_bytes", 1000), ("budget_share", 0.01)])
def test_the_least_budget_that_is_offered_works(key: str, small: float) -> None:
    layout: dict[str, Any] = {"pp": 2, "schedule": "gpipe", "num_microbatches": 8}
    with pytest.raises(ConfigError) as caught:
        tiny_config(**layout, offload={"policy": "schedule", key: small})
    offered = re.search(rf"set offload\.{key}=([\d.]+) or more", str(caught.value))
    assert offered is not None
    value = type(small)(offered[1])
    tiny_config(**layout, offload={"policy": "schedule", key: value})
    with pytest.raises(ConfigError):
        tiny_config(**layout, offload={"policy": "schedule", key: type(small)(value * 0.97)})
