"""The summary of a run against medians of the whole list, and how little is kept for it."""

from __future__ import annotations

import statistics
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from counterflow.framework.metrics.config import LoggerConfig
from counterflow.framework.metrics.record import MoERecord, RoutingRecord, StepRecord
from counterflow.framework.metrics.running import RunningSummary
from counterflow.framework.metrics.sinks import iterate_records
from tests.framework.metrics.records import record


def _of_experts(step: int, num_layers: int = 58, num_experts: int = 256) -> StepRecord:
    layers = tuple(
        RoutingRecord(
            layer=layer,
            load=tuple((step + each) / 1e5 for each in range(num_experts)),
            imbalance=1.0,
            entropy=1.0,
            num_dropped=0,
            sent_bytes=0,
        )
        for layer in range(num_layers)
    )
    return replace(record(step), moe=MoERecord(layers=layers, link_bytes=((0,),)))


def test_the_summary_is_that_of_all_records() -> None:
    rates, bubbles = [9.0, 5.0, 1.0, 4.0, 3.0], [0.9, 0.1, 0.5, 0.2, 0.4]
    running = RunningSummary()
    for step, (rate, bubble) in enumerate(zip(rates, bubbles, strict=True)):
        skipped = "not finite" if step == 4 else None
        running.add(
            replace(record(step, loss=step), tokens_per_s=rate, bubble_measured=bubble, skipped=skipped)
        )
    found = running.summary(run_dir="r", wandb_dir=None, seconds=1.0, kernels={})
    assert found.tokens_per_s == statistics.median(rates[1:])
    assert found.bubble.measured == statistics.median(bubbles[1:])
    assert (found.final_loss, found.steps, found.num_skipped) == (3, 5, 1)


def test_one_step_and_only_skipped_steps_have_a_summary() -> None:
    running = RunningSummary()
    running.add(replace(record(7, loss=1.5), skipped="spike", tokens_per_s=2.0))
    found = running.summary(run_dir="r", wandb_dir=None, seconds=1.0, kernels={})
    assert (found.final_loss, found.tokens_per_s, found.steps) == (1.5, 2.0, 8)


def test_a_long_run_of_many_experts_costs_a_few_bytes_a_step() -> None:
    running = RunningSummary()
    running.add(_of_experts(0))
    tracemalloc.start()
    for step in range(1, 41):
        running.add(_of_experts(step))
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # One record of this size takes more than half a megabyte.
    assert kept_bytes < 40 * 16 + 4096


def test_records_of_a_file_are_read_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(_of_experts(step).to_json() + "\n" for step in range(6)) + '{"step": 6')
    tracemalloc.start()
    assert [each.step for each in iterate_records(path)] == list(range(6))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 3e6  # six at once take 5 MB and more


@pytest.mark.parametrize(
    ("interval", "kept"), [(0, []), (1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (10, [4])], ids=str
)
def test_loads_of_experts_are_kept_at_their_own_interval(interval: int, kept: list[int]) -> None:
    config = LoggerConfig(name="jsonl", expert_load_interval_steps=interval)
    assert [step for step in range(5) if config.keeps_loads_of(step, 5)] == kept


def test_a_record_without_loads_has_every_other_number() -> None:
    whole = _of_experts(0)
    assert whole.moe is not None
    bare = replace(whole, moe=whole.moe.without_loads())
    assert bare.scalars() == whole.scalars()
    assert StepRecord.from_json(bare.to_json()) == bare
    assert len(bare.to_json()) < len(whole.to_json()) / 8


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logger\.expert_load_interval_steps=-1"):
        LoggerConfig(expert_load_interval_steps=-1)
