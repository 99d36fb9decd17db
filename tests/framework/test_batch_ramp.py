"""A batch that grows: the same run in every layout, resumed amid the ramp, and refused where a schedule cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from counterflow.framework.checkpoint.manifest import read_metadata
from counterflow.framework.checks.parity import reference_config
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.batch_plan import BatchRampConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.metrics.record import StepRecord
from counterflow.framework.metrics.timeline import Timeline
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.checkpointing import resume, save_if_due
from counterflow.framework.trainer.loop import seed_everything, train
from counterflow.framework.trainer.resume import resume_problems
from counterflow.framework.trainer.resume_source import checkpoint_to_resume
from counterflow.framework.trainer.run import RunContext
from counterflow.parallel.pipeline.analysis.costs import Costs
from counterflow.parallel.pipeline.analysis.simulate import simulate
from tests.rank_pool import RankPool
from tests.tiny import run_context, tiny_config

# Within 6 steps from 4 micro-batches over 6 to 8.
RAMP = {"start_num_microbatches": 4, "increment": 2}
LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "dp": 2, "schedule": "dualpipe", "zero": 3},
    {"pp": 2, "tp": 2, "schedule": "interleaved_1f1b", "zero": 2},
    {"pp": 4, "schedule": "zb1p", "optimizer": {"post_validation": True, "max_grad_norm": None}},
]


def ramp_config(layout: dict[str, Any], **nodes: Any) -> TrainConfig:
    samples = 4 * layout.get("dp", 1) * 4
    training = {"num_steps": 6, "batch_ramp": RAMP | {"ramp_samples": samples}}
    return tiny_config(**layout, num_microbatches=8, training=training, **nodes)


def run_steps(
    config: TrainConfig, run: RunContext, stop_after: int | None = None
) -> tuple[list[StepRecord], list[int]]:
    """The records, and how many micro-batches the timeline of each step shows."""
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    records: list[StepRecord] = []
    shown: list[int] = []

    def take(timeline: Timeline) -> None:
        found = {each.microbatch for trace in timeline.traces for each in trace.compute}
        assert found == set(range(timeline.schedule.num_microbatches))
        shown.append(timeline.schedule.num_microbatches)

    for record in train(assembly, resume(assembly, run), take):
        records.append(record)
        save_if_due(assembly, run, record.step + 1)
        if record.step + 1 == stop_after:
            break
    dist.barrier()
    return records, shown


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_ramp_is_the_same_in_one_process(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: dict[str, Any]
) -> None:
    config, run = ramp_config(layout), run_context(tiny_data, tmp_path)
    records, _ = ranks.run(run_steps, config.parallel.world_size, config, run)[0]
    alone, _ = ranks.run(run_steps, 1, reference_config(config), run)[0]
    dp = config.parallel.data_parallel_size
    counts = [record.num_tokens // (16 * dp) for record in records]
    assert counts == sorted(counts)
    assert set(counts) == {4, 6, 8}
    for mine, theirs in zip(records, alone, strict=True):
        assert mine.num_tokens == theirs.num_tokens
        assert mine.learning_rate == theirs.learning_rate
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    for record, count in zip(records, counts, strict=True):
        schedule = Workload.of(config).schedule(count)
        assert record.bubble_simulated == simulate(schedule, Costs()).bubble_makespan


def test_learning_rates_go_by_samples(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    """Half a batch is half a step of the warm-up."""
    config = ramp_config({}, optimizer={"lr_schedule": {"name": "constant", "warmup_steps": 10}})
    records, _ = ranks.run(run_steps, 1, config, run_context(tiny_data, tmp_path))[0]
    read = 0
    for record in records:
        read += record.num_tokens // 16
        assert record.learning_rate == pytest.approx(3e-3 * read / (8 * 10))


def test_timelines_show_the_schedule_of_their_step(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    config = ramp_config(LAYOUTS[0], logger={"name": "jsonl", "timeline_interval_steps": 1})
    records, shown = ranks.run(run_steps, 4, config, run_context(tiny_data, tmp_path))[0]
    assert shown == [record.num_tokens // 32 for record in records]


def test_a_run_resumes_amid_the_ramp(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    config = ramp_config(LAYOUTS[0], checkpoint={"enabled": True, "interval_steps": 3})
    whole, _ = ranks.run(run_steps, 4, config, run_context(tiny_data, tmp_path / "whole"))[0]
    run = run_context(tiny_data, tmp_path / "stopped")
    ranks.run(run_steps, 4, config, run, 4)
    resumed = replace(config, checkpoint=replace(config.checkpoint, resume=str(run.run_dir)))
    folder = checkpoint_to_resume(str(run.run_dir))
    metadata = read_metadata(folder)
    assert metadata["num_samples"] == sum(record.num_tokens for record in whole[:3]) // 16
    assert resume_problems(resumed, folder, metadata) == []
    for ramp in (
        BatchRampConfig(start_num_microbatches=4, increment=4, ramp_samples=16),
        BatchRampConfig(start_num_microbatches=4, increment=2, ramp_samples=16),
        BatchRampConfig(),
    ):
        other = replace(resumed, training=replace(resumed.training, batch_ramp=ramp))
        assert "so samples would be repeated or left out; keep" in resume_problems(other, folder, metadata)[0]
    after, _ = ranks.run(run_steps, 4, resumed, run)[0]
    assert [(record.loss, record.grad_norm, record.num_tokens) for record in after] == [
        (record.loss, record.grad_norm, record.num_tokens) for record in whole[3:]
    ]


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (
            {"start_num_microbatches": 5, "increment": 3, "ramp_samples": 30},
            r"step 0 has 5 micro-batches, and schedule=dualpipe does not take them: .*num_microbatches=5",
        ),
        (
            {"start_num_microbatches": 4, "increment": 1, "ramp_samples": 30},
            r"step 2 has 5 micro-batches, and schedule=dualpipe does not take them",
        ),
        ({"start_num_microbatches": 2, "increment": 2, "ramp_samples": 30}, r"step 0 has 2 micro-batches"),
        (
            {"start_num_microbatches": 9, "ramp_samples": 30},
            r"start_num_microbatches=9: steps of increment=1 do not",
        ),
    ],
)
def test_a_ramp_that_the_schedule_does_not_take_is_told_at_once(ramp: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(pp=2, schedule="dualpipe", num_microbatches=8, training={"batch_ramp": ramp})


def test_a_size_beyond_the_end_of_the_run_is_not_asked_for() -> None:
    ramp = {"start_num_microbatches": 4, "increment": 1, "ramp_samples": 30}
    tiny_config(pp=2, schedule="dualpipe", num_microbatches=8, training={"num_steps": 2, "batch_ramp": ramp})
