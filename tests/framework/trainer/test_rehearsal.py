"""A rehearsal of the stages before the first step leaves no trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import seed_everything, train
from counterflow.framework.trainer.rehearsal import is_due, rehearse
from counterflow.framework.trainer.run import RunContext
from counterflow.parallel.pipeline.api import build_pipeline
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, run_context, tiny_config, with_few_layers

LAYOUTS: dict[str, dict[str, Any]] = {
    "dualpipe, sharded experts": {
        "pp": 2,
        "dp": 2,
        "schedule": "dualpipe",
        "zero": 3,
        "parallel": {"expert_parallel_size": 2},
        "model": MIXTURES["deepseek_v3"],
    },
    "zbv, low rank": {
        "pp": 2,
        "dp": 2,
        "schedule": "zbv",
        "zero": 1,
        "compression": {"method": "powersgd", "rank": 2, "warmup_steps": 0},
    },
    "1f1b, offload": {
        "pp": 2,
        "zero": 2,
        "num_microbatches": 8,
        "model": {"num_layers": 4},
        "offload": {"policy": "schedule", "budget_share": 0.96, "min_bytes": 1},
    },
    "gpipe, fp16": {"pp": 2, "tp": 2, "schedule": "gpipe", "precision": {"compute": "fp16"}},
}


def trained(config: TrainConfig, run: RunContext, rehearsed: bool) -> tuple[list[Any], list[Tensor]]:
    seed_everything(config.seed, deterministic=True)
    with build(config, run.data, torch.device("cpu")) as assembly:
        assert not is_due(assembly), "nothing waits on a CPU"
        if rehearsed:
            rehearse(assembly, 0)
        records = [
            {name: getattr(each, name) for name in ("loss", "mtp_loss", "grad_norm", "loss_scale", "moe")}
            | {"bytes": dict(each.bytes_by_axis)}
            for each in train(assembly, 0)
        ]
        masters = [owned.fragment.master.clone() for owned in assembly.optimizer.owned]
        return records, [*masters, torch.get_rng_state()]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rehearsal_leaves_no_trace(
    ranks: RankPool, tiny_data: PreparedData, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    layout: Mapping[str, Any] = with_few_layers(LAYOUTS[name]) | {"training": {"num_steps": 2}}
    config = tiny_config(**layout)
    run = run_context(tiny_data, tmp_path_factory.mktemp("run"))
    with_it, without = (
        ranks.run(trained, config.parallel.world_size, config, run, rehearsed) for rehearsed in (True, False)
    )
    for (records, tensors), (expected, expected_tensors) in zip(with_it, without, strict=True):
        assert len(records) == 2
        if config.zero.stage == 3:
            # A stage's first use shows in which order its blocks are used: later ones gather none in vain.
            expected[0]["bytes"] |= {axis: expected[1]["bytes"][axis] for axis in ("data", "expert_data")}
        assert records == expected
        assert all(torch.equal(*pair) for pair in zip(tensors, expected_tensors, strict=True))


WIDTH = 4


def make_stage(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout())


def step_of_a_library_pipeline(rehearsed: bool) -> list[Tensor]:
    """Two steps whose gradients add up, the second after a rehearsal."""
    with build_pipeline(make_stage, "dualpipe", num_microbatches=4) as pipeline:
        inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
        losses: list[Tensor] = []
        for step in range(2):
            if rehearsed and step:
                pipeline.rehearse(
                    [inputs[:4], inputs[4:8]], [inputs[:4], inputs[4:8]], nn.functional.mse_loss
                )
            losses.append(pipeline.step(inputs, inputs, nn.functional.mse_loss).losses)
        buffers = [buffer.clone() for module in pipeline.modules.values() for buffer in module.buffers()]
        return [*losses, *buffers, *(each.grad for each in pipeline.parameters() if each.grad is not None)]


def test_gradients_and_buffers_of_plain_modules_stay(ranks: RankPool) -> None:
    with_it, without = (ranks.run(step_of_a_library_pipeline, 2, rehearsed) for rehearsed in (True, False))
    for found, expected in zip(with_it, without, strict=True):
        assert len(found) > 10
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
