"""Bytes that the config predicts against the bytes that a step of training counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from counterflow.framework.checks.rules import build_schedule
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.planning.costs import message_bytes, schedule_costs, stage_bytes
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import train_step
from counterflow.models.cost import layer_forward_flops
from counterflow.models.partition import partition
from counterflow.parallel.pipeline.analysis.costs import Costs
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.volume import data_volume, pipeline_volume
from counterflow.parallel.pipeline.config import CostsConfig
from counterflow.parallel.pipeline.ir.action import Kind
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, merged, run_context, tiny_config


def test_message_bytes() -> None:
    """2 samples of 16 tokens of 32 numbers of 4 bytes; half of it on each of two tensor ranks."""
    config = tiny_config(data={"micro_batch_size": 2})
    assert message_bytes(config) == 2 * 16 * 32 * 4
    halved = tiny_config(tp=2, data={"micro_batch_size": 2}, precision={"compute": "bf16"})
    assert message_bytes(halved) == 2 * 16 * 32 * 2 // 2
    whole = replace(halved, parallel=replace(halved.parallel, sequence_parallel=False))
    assert message_bytes(whole) == 2 * 16 * 32 * 2
    rounded = tiny_config(data={"micro_batch_size": 2}, comm={"pipeline_payload": "bf16"})
    assert message_bytes(rounded) == 2 * 16 * 32 * 2


def test_stage_bytes() -> None:
    sizes = stage_bytes(tiny_config(precision={"compute": "bf16"}), 2)
    assert sizes is not None
    assert sizes.gradients == tuple(2 * size for size in sizes.parameters)
    assert stage_bytes(tiny_config(), 7) is None  # four layers, the embedding and the head


def bytes_of_a_step(config: TrainConfig, run: RunContext) -> dict[str, float]:
    """What the ranks count in a step, and the size of the vocabulary."""
    assembly = build(config, run.data, torch.device("cpu"))
    ranks = train_step(assembly, 0).ranks
    return {
        "pipeline": sum(rank.pipeline_bytes for rank in ranks),
        "data": sum(rank.data_bytes for rank in ranks),
        "vocab_size": assembly.vocab_size,
    }


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4, "schedule": "1f1b"},
        {"pp": 2, "schedule": "zbv", "dp": 2, "zero": 3, "num_microbatches": 6},
        {"pp": 2, "schedule": "dualpipe", "dp": 2, "zero": 2},
        {"pp": 2, "schedule": "1f1b", "dp": 2, "zero": 0},
        {"pp": 2, "schedule": "1f1b", "dp": 2, "zero": {"stage": 3, "units": "stage"}},
        {"dp": 2, "zero": {"stage": 3, "prefetch_units": 2, "reshard_after": "backward"}},
        {"pp": 2, "schedule": "1f1b", "dp": 2, "zero": 3, "model": MIXTURES["mixtral"]},
        {"pp": 2, "schedule": "dualpipe", "comm": {"pipeline_payload": "fp8"}},
    ],
    ids=str,
)
def test_against_a_step(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Any, layout: dict[str, Any]
) -> None:
    # As wide as what parameters are padded to.
    config = tiny_config(**merged({"model": {"hidden_size": 64}}, layout))
    parallel = config.parallel
    counted = ranks.run(bytes_of_a_step, parallel.world_size, config, run_context(tiny_data, tmp_path))[0]
    config = replace(config, model=replace(config.model, vocab_size=int(counted["vocab_size"])))
    schedule = build_schedule(config.schedule, parallel)
    links = pipeline_volume(schedule, Costs(message_bytes=float(message_bytes(config))))
    predicted = sum(link.forward_bytes + link.backward_bytes for link in links)
    # Each channel of activations begins a step with a header of 512 bytes, which tells their shapes.
    channels = sum(one != other for ranks_of in schedule.placement for one, other in pairwise(ranks_of))
    assert counted["pipeline"] == parallel.data_parallel_size * (predicted + 512 * channels)
    sizes = stage_bytes(config, schedule.num_stages)
    assert sizes is not None
    data = data_volume(
        lower(schedule, zero_stage=config.zero.stage),
        parameter_bytes=sizes.parameters,
        gradient_bytes=sizes.gradients,
        data_parallel_size=parallel.data_parallel_size,
        zero_stage=config.zero.stage,
        gathered_bytes=sizes.gathered(config.zero),
    )
    # The parts are padded to equal lengths, and one number of the gradient norm is shared.
    expected = parallel.data_parallel_size * (sum(data.unshard_bytes) + sum(data.reduce_bytes))
    assert counted["data"] == pytest.approx(expected, rel=1e-2, abs=64)


def test_recomputation_is_a_cost_of_the_simulation() -> None:
    """By FLOPs: of two equal stages all of the first is run again, and of the second all but the head."""
    config = tiny_config(pp=2, recompute={"mode": "full"})
    schedule = build_schedule(config.schedule, config.parallel)
    costs = schedule_costs(Workload.of(config), schedule)
    assert isinstance(costs.recompute, tuple)
    assert costs.recompute[0] == 1.0
    cut = partition(config.model, 2, seq_length=16, vocab_size=321)[1]
    layers = sum(layer_forward_flops(config.model, layer, seq_length=16) for layer in cut.layers)
    assert costs.recompute[1] == pytest.approx(layers / (layers + 2 * 32 * 321))
    assert costs.of_kind(Kind.I, 0) == 2.0
    assert costs.of_kind(Kind.W, 0) == 1.0
    given = replace(config, schedule=replace(config.schedule, costs=CostsConfig(recompute=0.5)))
    assert schedule_costs(Workload.of(given), schedule).recompute == 0.5
    assert schedule_costs(Workload.of(tiny_config(pp=2)), schedule).recompute == 0.0
