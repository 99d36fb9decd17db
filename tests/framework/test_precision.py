"""Gradients summed in bf16, and moments kept in bf16: rounding, bytes, parity and resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.framework.checks.rules import check
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import ConfigError
from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.updaters.bf16_states import StochasticBf16AdamW, rounded_to_bf16
from counterflow.framework.optim.updaters.updater import Part
from counterflow.framework.planning.costs import stage_bytes
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.compress.reduction import PlainReduction
from tests.framework.optim.test_skip_step import run_steps
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, run_context, tiny_config

NUM_ELEMENTS = 24


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_rounding_is_unbiased() -> None:
    """The mean of many roundings of each value is the value, within five standard errors; each is a neighbour."""
    values = torch.tensor([1.0 + 2**-9, -3.14159, 1e-20, 2.5e-41, 12345.678, -0.0001])
    many = torch.stack([rounded_to_bf16(values, generator(seed)) for seed in range(4000)]).double()
    low, high = many.min(0).values, many.max(0).values
    assert bool((low <= values).all())
    assert bool((high >= values).all())
    assert bool((many.bfloat16().double() == many).all())
    for column, (below, above) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        assert set(many[:, column].tolist()) == {below, above}
    error = many.mean(0) - values.double()
    standard_error = (high - low) / 2 / 4000**0.5
    assert bool((error.abs() < 5 * standard_error).all())
    nearest = values.bfloat16().double() - values.double()
    assert bool((nearest.abs() > 5 * standard_error).any())  # to the nearest would not pass


def test_what_bf16_holds_is_kept() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -256.0, 2**-130, torch.inf, -torch.inf])
    assert torch.equal(rounded_to_bf16(values, generator()), values.bfloat16())
    assert rounded_to_bf16(torch.tensor([torch.nan]), generator()).isnan().all()


def part(gradient: Tensor, master: Tensor, state: dict[str, Tensor], key: str = "a") -> Part:
    return Part(master=master, grad=gradient, state=state, weight_decay=0.1, key=key)


def test_one_update_against_torch() -> None:
    """From the same bf16 moments, torch's AdamW gives the same masters, and moments next to those that are kept."""
    config = OptimizerConfig()
    updater = StochasticBf16AdamW(config, seed=3)
    master = torch.randn(1000, generator=generator(1))
    state = {
        "exp_avg": torch.randn(1000, generator=generator(2)).bfloat16(),
        "exp_avg_sq": torch.rand(1000, generator=generator(3)).bfloat16(),
    }
    gradient = torch.randn(1000, generator=generator(4))
    theirs = torch.nn.Parameter(master.clone())
    theirs.grad = gradient.clone()
    adamw = torch.optim.AdamW(
        [theirs], lr=1e-2, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=0.1
    )
    adamw.state[theirs] = {"step": torch.tensor(6.0)} | {name: each.float() for name, each in state.items()}
    adamw.step()
    updater.update([part(gradient, master, state)], step=7, learning_rate=1e-2)
    torch.testing.assert_close(master, theirs.detach(), rtol=1e-6, atol=1e-7)
    for name, kept in state.items():
        assert kept.dtype == torch.bfloat16
        torch.testing.assert_close(kept.float(), adamw.state[theirs][name], rtol=2**-7, atol=0)


def test_the_noise_is_that_of_seed_update_and_place() -> None:
    def moments(seed: int, step: int, key: str) -> Tensor:
        updater = StochasticBf16AdamW(OptimizerConfig(), seed)
        master = torch.zeros(1000)
        state = updater.new_state(master)
        gradient = torch.randn(1000, generator=generator(4))
        updater.update([part(gradient, master, state, key)], step=step, learning_rate=1e-2)
        return state["exp_avg"]

    first = moments(0, 1, "a")
    assert torch.equal(first, moments(0, 1, "a"))
    for other in (moments(1, 1, "a"), moments(0, 2, "a"), moments(0, 1, "b")):
        assert not torch.equal(first, other)


def test_small_changes_are_not_lost() -> None:
    """exp_avg_sq decays from 1 to 0.999^1000; rounded to the nearest it would stay where it is."""
    updater = StochasticBf16AdamW(OptimizerConfig(beta2=0.999), seed=0)
    master, gradient = torch.zeros(2000), torch.zeros(2000)
    state = updater.new_state(master)
    state["exp_avg_sq"].fill_(1.0)
    for step in range(1, 1001):
        updater.update([part(gradient, master, state)], step=step, learning_rate=1e-3)
    assert float(state["exp_avg_sq"].float().mean()) == pytest.approx(0.999**1000, rel=0.01)
    assert float((torch.ones(1).bfloat16() * 0.999).bfloat16()) == 1.0


def sums(is_everywhere: bool) -> tuple[Tensor, Tensor, int, int]:
    """In bf16 and in fp32, with what was reported and metered of the first."""
    meter = ByteMeter()
    axis = Axis(group=dist.group.WORLD, name="data", meter=meter)
    results: list[Tensor] = []
    reported = metered = 0
    for dtype in (torch.float32, torch.bfloat16):
        buffer = torch.randn(NUM_ELEMENTS, generator=generator(axis.rank))
        out = None if is_everywhere else torch.empty(NUM_ELEMENTS // axis.size)
        meter.reset()
        reported = PlainReduction(axis, dtype).start(buffer, out).wait().sent_bytes
        metered = meter.sent_bytes()["data"]
        results.append(buffer if out is None else out)
    return results[1], results[0], reported, metered


@pytest.mark.parametrize("is_everywhere", [True, False])
def test_a_sum_in_bf16(ranks: RankPool, is_everywhere: bool) -> None:
    for rounded, exact, reported, metered in ranks.run(sums, 2, is_everywhere):
        assert rounded.dtype == torch.float32
        assert torch.equal(rounded, rounded.bfloat16().float())
        # Two roundings of the terms and one of the sum, each of half a unit in the last of 8 bits.
        torch.testing.assert_close(rounded, exact, rtol=0, atol=4 * 2**-8)
        assert not torch.equal(rounded, exact)
        assert reported == metered == (1 + is_everywhere) * NUM_ELEMENTS // 2 * 2


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"pp": 2, "dp": 2, "zero": 0, "model": {"tie_embeddings": True}},
    "zero3": {"dp": 2, "tp": 2, "zero": 3, "num_microbatches": 2},
    "experts": {"dp": 2, "zero": 1, "parallel": {"expert_parallel_size": 2}, "model": MIXTURES["mixtral"]},
}


def precise(layout: dict[str, Any], **precision: str) -> TrainConfig:
    return tiny_config(
        **layout,
        precision=precision,
        training={"num_steps": 5, "eval_interval_steps": 0},
        checkpoint={"enabled": True, "interval_steps": 3},
    )


@pytest.mark.parametrize(
    "name", ["zero0", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero3", "experts"))]
)
def test_runs_in_bf16_follow_fp32_and_resume_bitwise(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, name: str
) -> None:
    plain = precise(LAYOUTS[name])
    config = precise(LAYOUTS[name], reduce="bf16", optimizer_states="bf16")
    size = config.parallel.world_size
    expected = ranks.run(run_steps, size, plain, run_context(tiny_data, tmp_path / "plain"), {})[0]
    run, stopped = run_context(tiny_data, tmp_path / "whole"), run_context(tiny_data, tmp_path / "stopped")
    whole = ranks.run(run_steps, size, config, run, {})
    assert [r.loss for r in whole[0].records] == pytest.approx([r.loss for r in expected.records], rel=1e-3)
    assert whole[0].records[-1].loss != expected.records[-1].loss
    axes = (whole[0].records[1].bytes_by_axis, expected.records[1].bytes_by_axis)
    assert axes[0]["data"] < axes[1]["data"]
    assert {tensor.dtype for tensor in whole[0].state} == {torch.float32, torch.bfloat16}
    if config.zero.stage == 0:
        # Replicas draw the same noise: data-parallel ranks hold the same.
        for first, second in ((0, 1), (2, 3)):
            assert all(map(torch.equal, whole[first].state, whole[second].state))
    ranks.run(run_steps, size, config, stopped, {}, None, None, 4)
    resumed = replace(config, checkpoint=replace(config.checkpoint, resume=str(stopped.run_dir)))
    after = ranks.run(run_steps, size, resumed, stopped, {})
    for mine, theirs in zip(after, whole, strict=True):
        assert [r.loss for r in mine.records] == [r.loss for r in theirs.records[3:]]
        assert all(map(torch.equal, mine.state, theirs.state))


def test_the_simulator_counts_what_is_sent() -> None:
    plain, halved = (stage_bytes(tiny_config(precision={"reduce": each}), 2) for each in ("fp32", "bf16"))
    assert plain is not None
    assert halved is not None
    assert [2 * each for each in halved.gradients] == list(plain.gradients)
    assert halved.parameters == plain.parameters


def test_compressed_gradients_are_not_summed_in_bf16() -> None:
    with pytest.raises(
        ConfigError, match="gradients summed in bf16 does not compose with compressed gradients"
    ):
        check(tiny_config(precision={"reduce": "bf16"}, compression={"method": "int8"}))
