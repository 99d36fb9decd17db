"""The peak that a dry run predicts beside the one that ranks measure: within 3 % on the largest rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from counterflow.framework.checks.dry_run import dry_run
from counterflow.framework.checks.memory import measured_peak
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.memory.live import LiveBytes, Peak
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import train_step
from counterflow.parallel.memory_parts import memory_of
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, merged, run_context, tiny_config, with_few_layers

# Large enough for tensors to outweigh what is rounded up.
SIZE: dict[str, Any] = {
    "model": {"hidden_size": 64, "intermediate_size": 160},
    "data": {"seq_length": 64, "micro_batch_size": 2},
}
SLOW = pytest.mark.slow
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp2 zero2 microbatch": {"dp": 2, "zero": {"stage": 2, "reduce": "microbatch"}},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "dp4 zero3 microbatch": {"dp": 4, "zero": {"stage": 3, "reduce": "microbatch"}},
    "pp2 dp2 zero3 stages": {"pp": 2, "dp": 2, "zero": {"stage": 3, "units": "stage"}},
    "pp4 1f1b recompute": {"pp": 4, "recompute": {"mode": "full"}},
    "pp2 dp2 dualpipe zero3": {"pp": 2, "dp": 2, "schedule": "dualpipe", "zero": 3},
    "pp2 zbv": {"pp": 2, "schedule": "zbv"},
    "pp2 tp2 sequence parallel": {"pp": 2, "tp": 2, "zero": 1},
    "experts dp2 ep2 zero3": {
        "dp": 2,
        "zero": 3,
        "parallel": {"expert_parallel_size": 2},
        "model": MIXTURES["mixtral"],
    },
    "vocabulary of 50k": {"dp": 2, "zero": 3, "model": {"vocab_size": 50000}},
}
QUICK = ("dp4 zero3 microbatch", "pp2 dp2 dualpipe zero3", "experts dp2 ep2 zero3")


def config_of(layout: Mapping[str, Any]) -> TrainConfig:
    return tiny_config(**with_few_layers(merged(SIZE, layout)))


def peak_of(config: TrainConfig, run: RunContext) -> Peak:
    with build(config, run.data, torch.device("cpu")) as assembly:
        train_step(assembly, 0)
        return measured_peak(assembly)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else SLOW) for name in LAYOUTS]
)
def test_the_peak_is_within_3_percent(
    ranks: RankPool, tiny_data: PreparedData, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    config = config_of(LAYOUTS[name])
    measured = ranks.run(
        peak_of, config.parallel.world_size, config, run_context(tiny_data, tmp_path_factory.mktemp("run"))
    )
    predicted = dry_run(config, vocab_size=config.model.vocab_size or tiny_data.vocab_size)
    largest = max(each.num_bytes for each in measured)
    print(name, max(each.peak.num_bytes for each in predicted) / largest - 1)
    assert max(each.peak.num_bytes for each in predicted) == pytest.approx(largest, rel=0.03)
    for each in (*measured, *(one.peak for one in predicted)):
        assert sum(each.parts.values()) == each.num_bytes
        assert each.action
    assert torch.distributed.is_initialized() is False


def test_what_is_alive_is_counted_by_what_it_is_for() -> None:
    kept = torch.zeros(1000)
    with LiveBytes({"parameters": [kept]}) as live:
        live.mark("first")
        one = torch.zeros(500)
        with memory_of("loss"):
            other = torch.zeros(250)
        del one
        live.mark("second")
        torch.zeros(10)
    assert live.peak.num_bytes == 4 * 1750
    assert live.peak.action == "first"
    assert {part: size for part, size in live.peak.parts.items() if size} == {
        "parameters": 4000,
        "activations": 2000,
        "loss": 1000,
    }
    assert other.numel() == 250


def test_storage_that_is_freed_is_not_counted() -> None:
    whole = torch.zeros(1000)
    with LiveBytes({"gathered": [whole]}) as live:
        whole.untyped_storage().resize_(0)
        torch.zeros(10)
        assert live.peak.parts["gathered"] == 4000  # before
        whole.untyped_storage().resize_(8000)
        torch.zeros(10)
    assert live.peak.parts["gathered"] == 8000


def test_offloading_is_not_predicted() -> None:
    config = config_of(
        {"pp": 2, "model": {"num_layers": 4}, "offload": {"policy": "schedule", "budget_share": 0.7}}
    )
    with pytest.raises(ValueError, match=r"offload.policy=schedule: .* measure it"):
        dry_run(config)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=[] if (name, stage) in (("1f1b", 1), ("dualpipe", 3)) else SLOW)
        for name in generated_schedules()
        for stage in (1, 2, 3)
    ],
)
def test_every_schedule_runs_on_tensors_without_values(name: str, stage: int) -> None:
    """With each stage of ZeRO. Nothing in a step reads a value, for there is none; what is kept is cut as it says."""
    layout = {"pp": 2, "dp": 2, "schedule": name, "num_microbatches": 4}
    whole, cut = (
        dry_run(tiny_config(**with_few_layers(layout | {"zero": each})), vocab_size=64)[0].peak.parts
        for each in (0, stage)
    )
    # Two-copy schedules hold a stage on two ranks of the pipeline, each twice along the data axis.
    num_replicas = 2 * len(generate(name, 2, 4).replicas_of(0))
    assert cut["optimizer"] == pytest.approx(whole["optimizer"] / num_replicas, rel=0.05)
