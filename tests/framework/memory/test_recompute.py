"""Recomputation changes no bit of a run, keeps what the cost model says, and within its budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.framework.checks.rules import build_schedule
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import ConfigError
from counterflow.framework.memory.activations import saved_bytes
from counterflow.framework.memory.recompute import as_executed, as_text, peak_activation_bytes, recompute_plan
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import seed_everything
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import forward_backward, learning_rate_of
from counterflow.models.cost import recomputed_flops
from counterflow.models.recompute import NOTHING, RecomputeConfig
from counterflow.parallel.pipeline.ir.trace import Recorder
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, run_context, tiny_config

NUM_STEPS = 2
FULL = {"mode": "full"}
BY_MODULE = {"mode": "selective", "modules": ["attention", "mlp"]}
EVERY_OTHER = {"mode": "full", "every": 2}
AUTO = {"mode": "auto", "budget_bytes": 90_000}
EXPERTS = {"mode": "selective", "modules": ["experts", "shared_experts"]}
MIXTURE = {"mode": "selective", "modules": ["attention", "moe"]}


def trained(config: TrainConfig, run: RunContext) -> list[Tensor]:
    """Of each step the loss, that of further tokens, the norm and the experts' loads; then gradients and parameters."""
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    found: list[Tensor] = []
    for step in range(NUM_STEPS):
        batch = forward_backward(assembly, step, Recorder(assembly.device))
        gradients = [owned.fragment.grad.clone() for owned in assembly.optimizer.owned]
        norm = assembly.optimizer.step(learning_rate_of(config, step, NUM_STEPS)).grad_norm
        found.append(torch.tensor([batch.loss, batch.mtp_loss, norm], dtype=torch.float64))
        if batch.moe is not None:
            found.extend(torch.tensor(layer.load, dtype=torch.float64) for layer in batch.moe.layers)
        if step == NUM_STEPS - 1:
            found.extend(gradients)
    return [*found, *(owned.fragment.master.clone() for owned in assembly.optimizer.owned)]


def assert_no_bit_changes(
    ranks: RankPool, data: PreparedData, folder: Path, config: TrainConfig, *modes: dict[str, Any]
) -> None:
    size = config.parallel.world_size
    expected = ranks.run(trained, size, config, run_context(data, folder))
    for mode in modes:
        values = {**mode, "modules": tuple(mode.get("modules", ()))}
        found = ranks.run(
            trained, size, replace(config, recompute=RecomputeConfig(**values)), run_context(data, folder)
        )
        for of_rank, others in zip(expected, found, strict=True):
            assert len(of_rank) > 2 * NUM_STEPS
            for one, other in zip(of_rank, others, strict=True):
                assert torch.equal(one, other), mode


@pytest.mark.parametrize(
    ("layout", "modes"),
    [
        ({"schedule": "1f1b", "pp": 2, "zero": 0}, (FULL, BY_MODULE, EVERY_OTHER, AUTO)),
        ({"schedule": "zbv", "pp": 2, "tp": 2}, (FULL,)),
        ({"schedule": "dualpipe", "pp": 2, "tp": 2, "dp": 2, "zero": 3}, (FULL, BY_MODULE)),
    ],
    ids=["1f1b", "zbv, tp", "dualpipe, tp, zero 3"],
)
def test_no_bit_changes(
    ranks: RankPool,
    tiny_data: PreparedData,
    tmp_path: Path,
    layout: dict[str, Any],
    modes: tuple[dict[str, Any], ...],
) -> None:
    assert_no_bit_changes(ranks, tiny_data, tmp_path, tiny_config(**layout), *modes)


@pytest.mark.parametrize(
    ("layout", "name", "modes"),
    [
        ({"schedule": "1f1b", "pp": 2, "dp": 2, "zero": 3}, "deepseek_v3", (FULL, EXPERTS)),
        (
            {"schedule": "dualpipe", "pp": 2, "dp": 2, "zero": 0},
            "qwen3_moe",
            (MIXTURE, EXPERTS | {"modules": ["experts"]}),
        ),
    ],
    ids=["deepseek_v3, 1f1b", "qwen3_moe, dualpipe"],
)
def test_no_bit_changes_with_experts_on_other_ranks(
    ranks: RankPool,
    tiny_data: PreparedData,
    tmp_path: Path,
    layout: dict[str, Any],
    name: str,
    modes: tuple[dict[str, Any], ...],
) -> None:
    """Tokens are exchanged in the second pass too; the halves of dualpipe's pairs run together."""
    config = tiny_config(**layout, parallel={"expert_parallel_size": 2}, model=MIXTURES[name])
    assert_no_bit_changes(ranks, tiny_data, tmp_path, config, *modes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", *MIXTURES])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_no_bit_changes_anywhere(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, schedule: str, tp: int, zero: int, name: str
) -> None:
    nodes: dict[str, Any] = {} if name == "dense" else {"model": MIXTURES[name]}
    nodes["parallel"] = {} if name == "dense" else {"expert_parallel_size": 2 * tp}
    modes: list[dict[str, Any]] = [FULL, EVERY_OTHER, AUTO | {"budget_bytes": 150_000}]
    if name == "dense":
        modes += [BY_MODULE, {"mode": "selective", "modules": ["attention"], "every": 2}]
    else:
        modes += [MIXTURE, {"mode": "selective", "modules": ["experts"]}]
        modes += [EXPERTS] if name == "deepseek_v3" else []
    config = tiny_config(schedule=schedule, pp=2, dp=2, tp=tp, zero=zero, **nodes)
    assert_no_bit_changes(ranks, tiny_data, tmp_path, config, *modes)


def measured_peak(config: TrainConfig, run: RunContext) -> int:
    """The most that autograd keeps at once on this rank during a step."""
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    forward_backward(assembly, 0, Recorder(assembly.device))  # makes the tables of positions
    with saved_bytes(nn.ModuleList(assembly.modules)) as meter:
        forward_backward(assembly, 1, Recorder(assembly.device))
    assert meter.now == 0
    return meter.peak


@pytest.mark.parametrize(
    ("layout", "modes"),
    [
        ({"schedule": "1f1b", "pp": 2}, ({"mode": "none"}, FULL, BY_MODULE, EVERY_OTHER)),
        ({"schedule": "zbv", "pp": 2, "model": {"num_layers": 8}}, ({"mode": "none"}, FULL)),
    ],
    ids=["1f1b", "zbv"],
)
def test_peak_is_what_the_cost_model_says(
    ranks: RankPool,
    tiny_data: PreparedData,
    tmp_path: Path,
    layout: dict[str, Any],
    modes: tuple[dict[str, Any], ...],
) -> None:
    peaks: list[int] = []
    for mode in modes:
        config = tiny_config(**layout, recompute=mode)
        run = run_context(tiny_data, tmp_path)
        measured = ranks.run(measured_peak, 2, config, run)
        schedule = build_schedule(config.schedule, config.parallel)
        plan = recompute_plan(config, schedule, vocab_size=321)
        expected = peak_activation_bytes(config, schedule, plan, vocab_size=321, on_cpu=True)
        # The tables of rotary positions, cos and sin, are kept once for all attention that is alive.
        tables = 2 * config.data.seq_length * config.model.dim_per_head * 4
        for rank in range(2):
            assert 0.99 * expected[rank] <= measured[rank] <= 1.01 * expected[rank] + tables, (mode, rank)
        peaks.append(max(measured))
    assert min(peaks) < 0.45 * peaks[0]


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
@pytest.mark.parametrize("name", ["dense", "deepseek_v3"])
def test_auto_keeps_within_its_budget(schedule: str, name: str) -> None:
    """A plan is within its budget; nothing is recomputed where nothing need be."""
    nodes: dict[str, Any] = {} if name == "dense" else {"model": MIXTURES[name]}
    config = tiny_config(schedule=schedule, pp=2, **nodes)
    executed = as_executed(config, build_schedule(config.schedule, config.parallel))
    most = max(peak_activation_bytes(config, executed, {}, vocab_size=321, on_cpu=True))
    found: list[int] = []
    for share in (1.0, 0.9, 0.7, 0.5):
        budget = round(share * most)
        config = replace(config, recompute=RecomputeConfig(mode="auto", budget_bytes=budget))
        plan = recompute_plan(config, executed, vocab_size=321, on_cpu=True)
        assert max(peak_activation_bytes(config, executed, plan, vocab_size=321, on_cpu=True)) <= budget
        found.append(sum(recomputed_flops(config.model, *each, seq_length=16) for each in plan.items()))
        for layer, parts in plan.items():
            less = {**plan, layer: NOTHING}
            assert max(peak_activation_bytes(config, executed, less, vocab_size=321, on_cpu=True)) > budget, (
                parts
            )
    assert found[0] == 0
    assert 0 < found[1] < found[-1]
    config = replace(config, recompute=RecomputeConfig(mode="auto", budget_bytes=1000))
    with pytest.raises(ValueError, match=r"recompute\.budget_bytes=1000: pipeline rank \d holds \d+ bytes"):
        recompute_plan(config, executed, vocab_size=321, on_cpu=True)


def test_what_is_told_before_ranks_start_is_what_ranks_do() -> None:
    """Pairs that overlap hold one micro-batch more than the schedule as it is named."""
    config = tiny_config(
        schedule="interleaved_1f1b",
        pp=2,
        dp=2,
        model=MIXTURES["mixtral"] | {"num_layers": 4},
        parallel={"expert_parallel_size": 2},
    )
    named = build_schedule(config.schedule, config.parallel)
    executed = Workload.of(config).schedule(config.schedule.num_microbatches)
    most = max(peak_activation_bytes(config, executed, {}, vocab_size=321, on_cpu=True))
    assert max(peak_activation_bytes(config, named, {}, vocab_size=321, on_cpu=True)) < most
    config = replace(config, recompute=RecomputeConfig(mode="auto", budget_bytes=most - 1))
    told = recompute_plan(config, named, vocab_size=321, on_cpu=True)
    assert told == recompute_plan(config, executed, vocab_size=321, on_cpu=True)
    assert any(told.values())


def test_mistakes_are_told_before_ranks_start() -> None:
    with pytest.raises(ConfigError, match=r"no layer that recompute\.every=1 takes has moe"):
        tiny_config(recompute={"mode": "selective", "modules": ["moe"]})
    with pytest.raises(ConfigError, match="core_attention saves nothing here"):
        tiny_config(recompute={"mode": "selective", "modules": ["core_attention"]})
    with pytest.raises(ConfigError, match="moe has the experts in it"):
        tiny_config(recompute={"mode": "selective", "modules": ["moe", "experts"]})
    with pytest.raises(ConfigError, match=r"set recompute\.budget_bytes"):
        tiny_config(recompute={"mode": "auto"})
    with pytest.raises(ConfigError, match=r"recompute\.every=2 with recompute\.mode=none"):
        tiny_config(recompute={"every": 2})
    with pytest.raises(ConfigError, match="selective recomputes these modules"):
        tiny_config(recompute={"mode": "full", "modules": ["mlp"]})


def test_a_plan_as_text() -> None:
    config = tiny_config(recompute=EVERY_OTHER)
    plan = recompute_plan(config, build_schedule(config.schedule, config.parallel), vocab_size=321)
    assert as_text(plan) == ["layer 0: block", "layer 2: block"]
    config = tiny_config(recompute=BY_MODULE)
    plan = recompute_plan(config, build_schedule(config.schedule, config.parallel), vocab_size=321)
    assert as_text(plan) == ["layers 0-3: attention, mlp"]
