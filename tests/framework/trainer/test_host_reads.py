"""A budget of the reads for which the host waits for the device: none in a dense step, one in a mixture's forward."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import train_step
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from tests.host_reads import host_reads
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, run_context, tiny_config

# The norm of the gradients, and what every rank measured.
READS_AFTER_A_STEP = 2


def test_reads_are_found() -> None:
    values = torch.tensor([0.0, 2.0, 3.0])
    calls: list[Any] = [
        lambda: values[0].item(),
        lambda: float(values[1]),
        lambda: bool(values[1] > 0),
        lambda: [1, 2, 3][int(values[1])],
        lambda: values.tolist(),
        lambda: values.nonzero(),
        lambda: values.cpu(),
        lambda: values[values > 0],
        lambda: values.repeat_interleave(torch.tensor([1, 0, 2])),
    ]
    for call in calls:
        with host_reads() as reads:
            call()
        assert reads.total == 1, call
    with host_reads() as reads:
        torch.nonzero_static(values, size=2)
        values[torch.tensor([1, 2])] += values.sum()
    assert not reads.total


def reads_of_a_step(config: TrainConfig, run: RunContext) -> tuple[dict[str, int], dict[str, int]]:
    """By place: within the schedule, and after it; of the second step, since the first makes what is kept."""
    within: dict[str, int] = {}
    step = Runtime.step

    def counted(self: Runtime, *args: Any, **kwargs: Any) -> Any:
        with host_reads() as reads:
            result = step(self, *args, **kwargs)
        within.update(reads.places)
        return result

    with build(config, run.data, torch.device("cpu")) as assembly:
        train_step(assembly, 0)
        with mock.patch.object(Runtime, "step", counted), host_reads() as after:
            train_step(assembly, 1)
    # The outer count has those of the inner one's patches as well, not of its dispatch.
    return within, dict(after.places)


MICROBATCHES = 2
DENSE: list[dict[str, Any]] = [
    {},
    {"precision": {"compute": "bf16"}, "recompute": {"mode": "full"}},
    {"precision": {"compute": "fp16"}},
    {"loss": {"chunk_tokens": 4}, "skip_step": {"skip_non_finite": True}},
]


@pytest.mark.parametrize("nodes", DENSE, ids=str)
def test_a_dense_step_reads_nothing_before_its_end(
    ranks: RankPool, tiny_data: PreparedData, tmp_path_factory: pytest.TempPathFactory, nodes: dict[str, Any]
) -> None:
    config = tiny_config(num_microbatches=MICROBATCHES, model={"num_layers": 2}, **nodes)
    run = run_context(tiny_data, tmp_path_factory.mktemp("run"))
    ((within, after),) = ranks.run(reads_of_a_step, 1, config, run)
    assert within == {}
    assert sum(after.values()) <= READS_AFTER_A_STEP, after


@pytest.mark.parametrize("name", MIXTURES)
def test_a_layer_of_experts_reads_once(
    ranks: RankPool, tiny_data: PreparedData, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """The sizes of its exchange, sent and received, rows and pairs, in one go; widths that the kernel takes."""
    model = {**MIXTURES[name], "num_layers": 2}
    model["moe"] = {**model["moe"], "expert_intermediate_size": 24}
    config = tiny_config(
        num_microbatches=MICROBATCHES, dp=2, parallel={"expert_parallel_size": 2}, model=model
    )
    num_layers = 2 - config.model.moe.num_dense_layers + config.model.mtp.num_modules
    run = run_context(tiny_data, tmp_path_factory.mktemp("run"))
    for within, after in ranks.run(reads_of_a_step, 2, config, run):
        assert sum(within.values()) == MICROBATCHES * num_layers, within
        # And what all routers counted.
        assert sum(after.values()) - sum(within.values()) <= READS_AFTER_A_STEP + 1, after
