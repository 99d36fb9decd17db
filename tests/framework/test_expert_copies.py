"""Copies of experts in training: one process's losses and gradients, and equal to the bit among each other."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import ConfigError
from counterflow.framework.experts.routing import moe_layers
from counterflow.framework.metrics.record import StepRecord
from counterflow.framework.trainer import rebalance
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.checkpointing import resume, save_if_due
from counterflow.framework.trainer.loop import seed_everything, train
from counterflow.framework.trainer.rebalance import next_placement
from counterflow.framework.trainer.run import RunContext
from counterflow.parallel.expert.copies import places_of
from counterflow.parallel.expert.placement import ExpertsByRank
from tests.framework.checks.test_parity import assert_parity
from tests.framework.trainer.test_rebalance import skewed_config, train_and_move, whole_state
from tests.rank_pool import RankPool
from tests.references import References
from tests.tiny import MIXTURES, merged, run_context, tiny_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2 zero0": {"dp": 2, "zero": 0, "parallel": {"expert_parallel_size": 2}},
    "ep4 zero1": {"dp": 4, "zero": 1, "parallel": {"expert_parallel_size": 4}},
    "pp2 ep2 zero1": {"pp": 2, "dp": 2, "zero": 1, "parallel": {"expert_parallel_size": 2}},
    "ep2 of dp4 zero1": {"dp": 4, "zero": 1, "parallel": {"expert_parallel_size": 2}},
    "ep2 of dp8 zero0": {"dp": 8, "zero": 0, "parallel": {"expert_parallel_size": 2}},
    "ep4 of dp4 tp2 zero2": {"dp": 4, "tp": 2, "zero": 2, "parallel": {"expert_parallel_size": 4}},
    "dualpipe ep2 zero3": {
        "pp": 2,
        "dp": 2,
        "zero": 3,
        "schedule": "dualpipe",
        "parallel": {"expert_parallel_size": 2},
    },
    "dualpipe ep2 of dp4 zero3": {
        "pp": 2,
        "dp": 4,
        "zero": 3,
        "schedule": "dualpipe",
        "parallel": {"expert_parallel_size": 2},
    },
    "dualpipe_v ep4 zero0": {
        "pp": 2,
        "dp": 4,
        "zero": 0,
        "schedule": "dualpipe_v",
        "parallel": {"expert_parallel_size": 4},
    },
    "zbv ep4 of tp2 dp2 zero1": {
        "pp": 2,
        "dp": 2,
        "tp": 2,
        "zero": 1,
        "schedule": "zbv",
        "parallel": {"expert_parallel_size": 4},
    },
}
FAST = (("ep4 zero1", "mixtral", 1), ("dualpipe ep2 of dp4 zero3", "deepseek_v3", 1))


def config_of(layout: str, mixture: str = "deepseek_v3", spare: int = 1, **nodes: Any) -> TrainConfig:
    balance = {"num_redundant_experts": spare, "policy": "pack"}
    quiet = {"model": MIXTURES[mixture], "logger": {"name": "none"}, "balance": balance}
    return tiny_config(**merged(LAYOUTS[layout], merged(quiet, nodes)))


def reshuffled(loads: list[float], before: ExpertsByRank, *_: object) -> ExpertsByRank:
    """Every layer otherwise: each expert somewhere, and copies of a few anywhere else."""
    generator = random.Random(int(1e6 * loads[0]))
    num_slots = len(before) * len(before[0])
    order = list(range(len(loads)))
    order += generator.choices(order, k=num_slots - len(order))
    generator.shuffle(order)
    return tuple(tuple(order[at : at + len(before[0])]) for at in range(0, num_slots, len(before[0])))


@pytest.mark.parametrize(
    ("layout", "mixture", "spare"),
    [
        pytest.param(
            layout,
            mixture,
            spare,
            marks=[] if (layout, mixture, spare) in FAST else pytest.mark.slow,
        )
        for layout in LAYOUTS
        for mixture, spare in (("deepseek_v3", 1), ("deepseek_v3", 2), ("mixtral", 1))
    ],
)
def test_copies_train_like_one_process(
    references: References, tmp_path: Path, layout: str, mixture: str, spare: int
) -> None:
    assert_parity(references.parity(config_of(layout, mixture, spare), tmp_path))


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        pytest.param("ep4 zero1", {"recompute": {"mode": "full"}}, id="recomputed"),
        pytest.param("ep4 zero1", {"balance": {"num_nodes": 2}}, id="two nodes"),
        pytest.param("ep4 zero1", {"model": {"moe": {"capacity_factor": 1.0}}}, id="drops"),
    ],
)
@pytest.mark.slow
def test_copies_compose(references: References, tmp_path: Path, layout: str, nodes: dict[str, Any]) -> None:
    assert_parity(references.parity(config_of(layout, **nodes), tmp_path))


NUM_STEPS = 4


@pytest.mark.slow
def test_steps_that_do_not_wait_for_the_norm_give_the_same_bits(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    run = run_context(tiny_data, tmp_path)
    found: list[tuple[list[float], list[float]]] = []
    for ahead in (False, True):
        optimizer = {"post_validation": ahead, "max_grad_norm": 0.5}
        nodes = {"training": {"num_steps": 6}, "balance": {"interval_steps": 4}, "optimizer": optimizer}
        config = config_of("pp2 ep2 zero1", **nodes)
        records, _ = ranks.run(train_and_move, 4, config, run, reshuffled)[0]
        found.append(([record.loss for record in records], [record.grad_norm for record in records]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("ep2 of dp8 zero0", marks=pytest.mark.slow),
        pytest.param("ep4 of dp4 tp2 zero2", marks=pytest.mark.slow),
        pytest.param("ep4 zero1", marks=pytest.mark.slow),
        pytest.param("dualpipe ep2 of dp4 zero3", marks=pytest.mark.slow),
        "dualpipe ep2 zero3",
    ],
)
def test_moves_of_copies_change_nothing_but_rounding(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: str
) -> None:
    """Around each move, and at the end, all copies of an expert are equal to the bit (see `whole_state`)."""
    run = run_context(tiny_data, tmp_path)
    world_size = config_of(layout).parallel.world_size
    plain: dict[str, Any] = {"training": {"num_steps": NUM_STEPS}, "balance": {"interval_steps": NUM_STEPS}}
    moving = merged(plain, {"balance": {"interval_steps": 1}})
    stayed, state = ranks.run(train_and_move, world_size, config_of(layout, spare=0, **plain), run)[0]
    moved, moved_state = ranks.run(train_and_move, world_size, config_of(layout, **moving), run, reshuffled)[
        0
    ]
    counts = [record.balance.num_moved for record in moved if record.balance is not None]
    assert [count > 0 for count in counts] == [True, True, True, False]
    for ours, theirs in zip(moved, stayed, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        assert ours.moe is not None
        assert theirs.moe is not None
        assert [each.load for each in ours.moe.layers] == [each.load for each in theirs.moe.layers]
    for name, tensor in state.items():
        if "experts." in name:
            scale = float(tensor.abs().max())
            torch.testing.assert_close(moved_state[name], tensor, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("layout", [pytest.param("ep2 zero0", marks=pytest.mark.slow), "ep2 of dp4 zero1"])
def test_copies_stay_equal_where_sizes_are_odd(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: str
) -> None:
    """125 numbers of a matrix are no whole number of vectors, and kernels compute what is left over otherwise."""
    odd = {"hidden_size": 25, "head_dim": 8, "moe": {"expert_intermediate_size": 5}}
    config = config_of(layout, "mixtral", model=odd, training={"num_steps": 3}, balance={"interval_steps": 2})
    run = run_context(tiny_data, tmp_path)
    ranks.run(train_and_move, config.parallel.world_size, config, run, reshuffled)


def test_the_measured_imbalance_falls(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    """A router that prefers the first experts and is not corrected; what ranks did is counted in the exchange."""
    config = skewed_config(policy="pack", num_redundant_experts=2)
    run = run_context(tiny_data, tmp_path)
    records = ranks.run(train_and_move, 4, config, run, next_placement, 0.05)[0][0]
    balances = [record.balance for record in records if record.balance is not None]
    moved = balances[2]
    assert moved.interval_before is not None
    assert moved.interval_after is not None
    assert moved.num_moved > 0
    # Three matrices of an expert, each with a master and two moments in fp32.
    assert moved.moved_bytes == moved.num_moved * 3 * 3 * 4 * 8 * config.model.hidden_size
    assert moved.interval_after < 1.1 < moved.interval_before
    measured = [sum(each.rank_imbalance) / len(each.rank_imbalance) for each in balances]
    assert max(measured[3:]) < 1.2 < min(measured[:3])
    assert [StepRecord.from_json(record.to_json()) for record in records] == records
    for record in records:
        assert record.moe is not None
        assert record.balance is not None
        for layer, found in zip(record.moe.layers, record.balance.rank_imbalance, strict=True):
            assert layer.rank_load is not None
            assert sum(layer.rank_load) == pytest.approx(1, abs=1e-5)
            assert found == pytest.approx(4 * max(layer.rank_load))


def with_checkpoints(config: TrainConfig, run: RunContext) -> tuple[list[float], ExpertsByRank | None]:
    """Losses, and where the experts of the first layer are in the end; copies are equal wherever they are."""
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    losses: list[float] = []
    with patch.object(rebalance, "next_placement", reshuffled):
        for record in train(assembly, resume(assembly, run)):
            losses.append(record.loss)
            save_if_due(assembly, run, record.step + 1)
    whole_state(assembly)
    layers = moe_layers(assembly.modules)
    dist.barrier()
    return losses, layers[0].expert_parallel.experts_by_rank if layers else None


@pytest.mark.parametrize("spare", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_longer_run_goes_on_from_the_move_that_ended_a_shorter_one(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, spare: int
) -> None:
    """Moves are due after steps 2, 4 and 6: the run that ends with the second made it, and so says its checkpoint."""
    layout = "dualpipe ep2 zero3"

    def config(
        num_steps: int, resumed: Path | None = None, layout: str = layout, **nodes: Any
    ) -> TrainConfig:
        checkpoint = {"enabled": True, "resume": None if resumed is None else str(resumed)}
        common = {
            "training": {"num_steps": num_steps},
            "checkpoint": checkpoint,
            "optimizer": {"lr_schedule": {"name": "constant"}},
            "balance": {"interval_steps": 2},
        }
        return config_of(layout, **merged({"spare": spare, **common}, nodes))

    whole = run_context(tiny_data, tmp_path / "whole")
    losses, placed = ranks.run(with_checkpoints, 4, config(6), whole)[0]
    short = run_context(tiny_data, tmp_path / "short")
    ranks.run(with_checkpoints, 4, config(4), short)
    assert ranks.run(with_checkpoints, 4, config(6, short.run_dir), short)[0] == (losses[4:], placed)
    if spare == 0:
        return
    assert placed is not None
    assert any(len(places) > 1 for places in places_of(placed).values())
    # Whatever copies there are in another layout, experts are found by their index.
    others: list[dict[str, Any]] = [
        {"balance": {"num_redundant_experts": 0, "interval_steps": 0}},
        {"layout": "ep4 zero1", "num_microbatches": 2},
    ]
    for number, other in enumerate(others):
        shutil.rmtree(short.run_dir / "checkpoints" / "step-00000006")
        changed = config(6, short.run_dir, **other)
        found, _ = ranks.run(with_checkpoints, 4, changed, short)[0]
        assert found == pytest.approx(losses[4:], rel=1e-5), number


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"dp": 2, "balance": {"num_redundant_experts": 1}}, "copies of other ranks' experts"),
        (
            {"dp": 2, "parallel": {"expert_parallel_size": 2}, "balance": {"num_redundant_experts": 3}},
            "set it to 2 or less",
        ),
        ({"balance": {"num_redundant_experts": -1}}, "or to 0"),
        ({"balance": {"num_redundant_experts": 1, "interval_steps": 5}}, "set balance.policy=pack"),
        (
            {
                "dp": 2,
                "parallel": {"expert_parallel_size": 2},
                "balance": {"num_redundant_experts": 1},
                "compression": {"method": "onebit"},
            },
            "copies of experts does not compose with compressed gradients",
        ),
    ],
)
def test_senseless_values_are_refused(nodes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(model=MIXTURES["mixtral"], **nodes)
