"""Runs whose loss is computed in chunks of tokens (loss.chunk_tokens) beside runs with whole logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import ConfigError
from counterflow.framework.memory.activations import saved_bytes
from counterflow.framework.memory.recompute import peak_activation_bytes, recompute_plan, recompute_shares
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import seed_everything
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import forward_backward
from counterflow.models.cost import loss_chunk_bytes
from counterflow.parallel.ops.loss_config import LossConfig
from counterflow.parallel.pipeline.ir.trace import Recorder
from tests.rank_pool import RankPool
from tests.runs import run_steps
from tests.tiny import MIXTURES, merged, run_context, tiny_config

# Of 16 tokens a micro-batch: chunks of 4. The vocabulary of 321 is padded over two tensor ranks.
CHUNKED = LossConfig(chunk_tokens=5)
TIED = {"model": {"tie_embeddings": True}}
V3 = {"model": MIXTURES["deepseek_v3"]}
SEQUENCE = {"tp": 2, "parallel": {"sequence_parallel": True}}
OFTEN = {"stage": 3, "reduce": "microbatch"}
STAGES = OFTEN | {"units": "stage"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied, zero 3": {"zero": OFTEN, "dp": 2} | TIED,
    "mtp, zero 3": {"dp": 2, "zero": OFTEN} | V3,
    "mtp, zbv, sequence": {"pp": 2, "schedule": "zbv"} | merged(V3, SEQUENCE),
    "mtp, tied, dualpipe, zero 3": {"pp": 2, "schedule": "dualpipe", "zero": OFTEN} | merged(V3, TIED),
    "zb1p, sequence, zero 3": {"pp": 2, "schedule": "zb1p", "zero": OFTEN} | SEQUENCE,
    "tied, zbv, zero 3": {"pp": 2, "schedule": "zbv", "dp": 2, "zero": OFTEN} | TIED,
    "zb1p, zero 3 by stage": {"pp": 2, "schedule": "zb1p", "zero": STAGES},
    "validated later, recomputed": {
        "pp": 2,
        "schedule": "zbv",
        "optimizer": {"post_validation": True, "max_grad_norm": 0.5},
        "recompute": {"mode": "full"},
    },
    "offloaded": {"schedule": "gpipe", "pp": 2, "offload": {"policy": "schedule", "budget_share": 0.6}},
}
MORE: dict[str, dict[str, Any]] = {
    "tied": {"pp": 2} | TIED,
    "tp": {"tp": 2},
    "dualpipe, sequence": {"pp": 2, "schedule": "dualpipe"} | SEQUENCE,
    "experts in pairs": {"pp": 2, "schedule": "dualpipe", "dp": 2, "zero": OFTEN}
    | merged(V3, {"parallel": {"expert_parallel_size": 2}}),
}
ROUNDED: dict[str, dict[str, Any]] = {
    "bf16": {"precision": {"compute": "bf16"}, "zero": OFTEN, "dp": 2},
    "fp16": {"precision": {"compute": "fp16"}, "skip_step": {"skip_non_finite": True}},
}


def figures(config: TrainConfig, run: RunContext) -> list[tuple[float, ...]]:
    """Of each step: loss, that of further predictions, the gradients' norm, and the validation loss."""
    return [
        (record.loss, record.mtp_loss or 0.0, record.grad_norm, record.validation_loss or 0.0)
        for record in run_steps(config, run)
    ]


@pytest.mark.parametrize(
    "name", [*LAYOUTS, *ROUNDED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_trains_like_with_whole_logits(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, name: str
) -> None:
    layout = (LAYOUTS | MORE | ROUNDED)[name]
    config = tiny_config(**merged({"training": {"num_steps": 3, "eval_interval_steps": 0}}, layout))
    run, size = run_context(tiny_data, tmp_path), config.parallel.world_size
    whole, chunked = (
        ranks.run(figures, size, each, run)[0] for each in (config, replace(config, loss=CHUNKED))
    )
    assert len(chunked) == 3
    assert all(loss > 1 for loss, *_ in chunked)
    assert any(validation > 1 for *_, validation in chunked)
    for mine, its in zip(chunked, whole, strict=True):
        assert mine == pytest.approx(its, rel=2e-3 if name in ROUNDED else 2e-6)


def measured_peak(config: TrainConfig, run: RunContext) -> int:
    """The most that autograd keeps at once on this rank during a step."""
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    forward_backward(assembly, 0, Recorder(assembly.device))  # makes the tables of positions
    with saved_bytes(nn.ModuleList(assembly.modules)) as meter:
        forward_backward(assembly, 1, Recorder(assembly.device))
    return meter.peak


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2} | SEQUENCE], ids=["1f1b", "sequence"])
def test_what_is_kept_is_what_the_cost_model_says(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Of the last stage; what a chunk takes is no more than one micro-batch's, and is not kept."""
    config = replace(tiny_config(**layout), loss=CHUNKED)
    measured = ranks.run(measured_peak, config.parallel.world_size, config, run_context(tiny_data, tmp_path))
    executed = Workload.of(config).schedule(config.schedule.num_microbatches)
    expected = peak_activation_bytes(config, executed, {}, vocab_size=321, on_cpu=True)[-1]
    tp = config.parallel.tensor_parallel_size
    chunk = loss_chunk_bytes(
        config.model,
        5,
        num_tokens=16,
        vocab_size=321,
        tensor_parallel_size=tp,
        sequence_parallel=tp > 1,
        bytes_per_element=4,
    )
    assert chunk == 4 * -(-321 // tp) * 4 + (16 * 32 * 4 if tp > 1 else 0)
    tables = 2 * config.data.seq_length * config.model.dim_per_head * 4
    kept = expected - chunk
    assert 0.99 * kept <= measured[-1] <= 1.01 * kept + tables


def test_the_estimate_does_not_grow_with_the_vocabulary() -> None:
    config = replace(tiny_config(pp=2), loss=LossConfig(chunk_tokens=1024))
    executed = Workload.of(config).schedule(config.schedule.num_microbatches)

    def peak(config: TrainConfig, vocab_size: int) -> int:
        plan = recompute_plan(config, executed, vocab_size=vocab_size)
        return peak_activation_bytes(config, executed, plan, vocab_size=vocab_size)[-1]

    config = replace(config, data=replace(config.data, seq_length=1024))
    assert peak(config, 65536) == peak(config, 4096)
    whole = replace(config, loss=LossConfig())
    assert peak(whole, 65536) > 8 * peak(whole, 4096)


def test_head_and_loss_are_part_of_the_backward() -> None:
    """A stage that recomputes all its layers runs all of its forward again, where the head is not in it."""
    config = replace(tiny_config(pp=2, recompute={"mode": "full"}), loss=CHUNKED)
    plan = Workload.of(config, data_vocab_size=321).recompute_plan
    assert recompute_shares(config, 2, plan, vocab_size=321) == (1.0, 1.0)
    whole = replace(config, loss=LossConfig())
    assert recompute_shares(whole, 2, plan, vocab_size=321)[1] < 1


def test_mistakes_are_told_before_ranks_start() -> None:
    with pytest.raises(ConfigError, match=r"loss\.chunk_tokens=0: a number of tokens"):
        tiny_config(loss={"chunk_tokens": 0})
    with pytest.raises(ConfigError, match="the head runs in the loss"):
        tiny_config(loss={"chunk_tokens": 64}, zero={"engine": "deepspeed", "stage": 1})
