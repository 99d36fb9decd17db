"""Experts that move during training: nothing is lost, nothing changes but rounding, and the load evens out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import ConfigError
from counterflow.framework.experts.config import BalanceConfig
from counterflow.framework.experts.routing import moe_layers
from counterflow.framework.metrics.record import BalanceRecord, StepRecord
from counterflow.framework.trainer import rebalance
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.checkpointing import resume, state_shards
from counterflow.framework.trainer.loop import seed_everything, train
from counterflow.framework.trainer.rebalance import Balancer, next_placement
from counterflow.framework.trainer.run import RunContext
from counterflow.parallel.expert.exchange import even_placement
from counterflow.parallel.expert.placement import ExpertLayout, ExpertsByRank, imbalance, place_experts
from counterflow.parallel.parameters import placement_of
from tests.rank_pool import RankPool
from tests.runs import run_steps
from tests.tiny import MIXTURES, merged, run_context, tiny_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2 zero0": {"dp": 2, "zero": 0, "parallel": {"expert_parallel_size": 2}},
    "ep2 of dp4 zero1": {"dp": 4, "zero": 1, "parallel": {"expert_parallel_size": 2}},
    "ep2 of dp4 zero0": {"dp": 4, "zero": 0, "parallel": {"expert_parallel_size": 2}},
    "ep2 of tp2 dp2 zero2": {"dp": 2, "tp": 2, "zero": 2, "parallel": {"expert_parallel_size": 2}},
    "dualpipe ep2 zero3": {
        "pp": 2,
        "dp": 2,
        "zero": 3,
        "schedule": "dualpipe",
        "parallel": {"expert_parallel_size": 2},
    },
    "zbv ep4 of tp2 dp2 zero3": {
        "pp": 2,
        "dp": 2,
        "tp": 2,
        "zero": 3,
        "schedule": "zbv",
        "parallel": {"expert_parallel_size": 4},
    },
}


def config_of(layout: str, mixture: str = "deepseek_v3", **nodes: Any) -> TrainConfig:
    quiet = {"model": MIXTURES[mixture], "logger": {"name": "none"}}
    return tiny_config(**merged(LAYOUTS[layout], merged(quiet, nodes)))


def whole_state(assembly: Assembly) -> dict[str, Tensor]:
    """Masters and moments of the whole model by global name; where several ranks hold a part they agree."""
    mine = [
        (shard.name, shard.global_shape, shard.offsets, shard.tensor.clone())
        for shard in state_shards(assembly)
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, Tensor] = {}
    for name, shape, offsets, tensor in (shard for shards in everyone for shard in shards):
        whole = found.setdefault(name, torch.full(shape, math.nan))
        part = whole[tuple(slice(at, at + size) for at, size in zip(offsets, tensor.shape, strict=True))]
        # Copies of an expert may be cut otherwise: parts of them may be there.
        assert (torch.isnan(part) | (part == tensor)).all(), f"copies of {name} differ"
        part.copy_(tensor)
    assert not any(torch.isnan(tensor).any() for tensor in found.values())
    return found


def shuffled(loads: list[float], before: ExpertsByRank, *_: object) -> ExpertsByRank:
    """Every layer otherwise, most experts on another rank."""
    order = torch.randperm(len(loads), generator=torch.Generator().manual_seed(int(1e6 * loads[0]))).tolist()
    each = len(before[0])
    return tuple(tuple(order[rank * each : (rank + 1) * each]) for rank in range(len(before)))


def unchanged(loads: list[float], before: ExpertsByRank, *_: object) -> ExpertsByRank:
    return before


def check_parameters(assembly: Assembly, whole: dict[str, Tensor]) -> None:
    """What the modules compute with are the masters of the experts that routing expects there."""
    assert assembly.balancer is not None
    for layer in moe_layers(assembly.modules):
        placed = layer.expert_parallel.experts_by_rank
        assert placed == assembly.balancer.placement(layer.layer)
        held = {placement_of(weight).experts for weight in layer.experts.parameters()}
        assert held == {placed[layer.expert_parallel.axis.rank]}
    for stage in assembly.stages.values():
        stage.unshard()
        stage.wait_unshard()
        for unit in stage.units:
            for slot, parameter in zip(unit.slots, unit.parameters.values(), strict=True):
                if slot.placement.experts is not None:
                    assert slot.placement == placement_of(parameter)
                    expected = whole[f"model.{slot.name}"][list(slot.placement.experts)]
                    assert torch.equal(parameter, expected.to(parameter.dtype))
        stage.reshard()


def train_and_move(
    config: TrainConfig, run: RunContext, policy: Any = next_placement, skew: float = 0.0
) -> tuple[list[StepRecord], dict[str, Tensor]]:
    """Records, and the whole state at the end; around every move the state is held against itself.

    skew: a bias of the choice that goes from the first expert's down to none of the last.
    """
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    for layer in moe_layers(assembly.modules):
        bias = layer.router.state.bias
        bias += skew * torch.linspace(1, 0, len(bias))
    move = Balancer.rebalance

    def checked(self: Balancer, *args: Any) -> BalanceRecord:
        before = whole_state(assembly)
        record = move(self, *args)
        after = whole_state(assembly)
        assert set(before) == set(after)
        assert all(torch.equal(before[name], after[name]) for name in before), "by global index nothing moved"
        check_parameters(assembly, after)
        return record

    with patch.object(rebalance, "next_placement", policy), patch.object(Balancer, "rebalance", checked):
        records = list(train(assembly, resume(assembly, run)))
    return records, whole_state(assembly)


NUM_STEPS = 4
EVERY_OTHER = {"training": {"num_steps": NUM_STEPS}, "balance": {"interval_steps": 2}}
NEVER = {"training": {"num_steps": NUM_STEPS}, "balance": {"interval_steps": NUM_STEPS}}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("ep2 zero0", marks=pytest.mark.slow),
        pytest.param("ep2 of dp4 zero0", marks=pytest.mark.slow),
        "ep2 of dp4 zero1",
        "ep2 of tp2 dp2 zero2",
        "dualpipe ep2 zero3",
        pytest.param("zbv ep4 of tp2 dp2 zero3", marks=pytest.mark.slow),
    ],
)
def test_moved_experts_train_on_as_if_they_had_stayed(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: str
) -> None:
    run = run_context(tiny_data, tmp_path)
    world_size = config_of(layout).parallel.world_size
    stayed, state = ranks.run(train_and_move, world_size, config_of(layout, **NEVER), run)[0]
    moved, moved_state = ranks.run(
        train_and_move, world_size, config_of(layout, **EVERY_OTHER), run, shuffled
    )[0]
    counts = [record.balance.num_moved for record in moved if record.balance is not None]
    assert [count > 0 for count in counts] == [False, True, False, False]
    for ours, theirs in zip(moved, stayed, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    # Two steps after the first move, moments of another expert would show as differences of the size of a step.
    for name, tensor in state.items():
        if "experts." in name:
            scale = float(tensor.abs().max())
            torch.testing.assert_close(moved_state[name], tensor, rtol=1e-3, atol=1e-4 * scale)


def test_where_nothing_moves_nothing_changes(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    run = run_context(tiny_data, tmp_path)
    layout = "dualpipe ep2 zero3"
    off, state = ranks.run(plain, 4, config_of(layout, training={"num_steps": NUM_STEPS}), run)[0]
    records, kept = ranks.run(train_and_move, 4, config_of(layout, **EVERY_OTHER), run, unchanged)[0]
    assert [record.loss for record in records] == off
    assert all(torch.equal(kept[name], tensor) for name, tensor in state.items())
    assert all(record.balance is not None and record.balance.num_moved == 0 for record in records)


def plain(config: TrainConfig, run: RunContext) -> tuple[list[float], dict[str, Tensor]]:
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    assert assembly.balancer is None
    losses = [record.loss for record in train(assembly, 0)]
    return losses, whole_state(assembly)


def test_moving_there_and_back_is_bitwise_nothing(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    run = run_context(tiny_data, tmp_path)
    config = config_of("ep2 of dp4 zero1", **NEVER)
    for equal in ranks.run(there_and_back, 4, config, run):
        assert equal == (False, True)


def there_and_back(config: TrainConfig, run: RunContext) -> tuple[bool, bool]:
    """Whether this rank's own tensors are as they were: after a move, and after the move back."""
    assembly = build(config, run.data, torch.device("cpu"))
    begun = [record for record, _ in zip(train(assembly, 0), range(2), strict=False)]
    assert begun[-1].balance is not None
    balancer = assembly.balancer
    assert balancer is not None

    def copies() -> list[Tensor]:
        return [
            tensor.clone()
            for owned in assembly.optimizer.owned
            for tensor in (owned.fragment.master, *owned.state.values())
        ]

    start = copies()
    equal: list[bool] = []
    for policy in (shuffled, lambda loads, before, *_: even_placement(len(loads), len(before))):
        balancer.observe(begun[-1].moe)  # type: ignore[arg-type]
        with patch.object(rebalance, "next_placement", policy):
            balancer.rebalance(assembly, begun[-1].balance)
        equal.append(all(map(torch.equal, copies(), start)))
    return equal[0], equal[1]


def with_checkpoints(config: TrainConfig, run: RunContext, stop_after: int | None) -> list[float]:
    with patch.object(rebalance, "next_placement", shuffled):
        return [record.loss for record in run_steps(config, run, stop_after)]


def test_a_resumed_run_has_its_experts_where_they_were(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    checkpoint: dict[str, Any] = {"enabled": True, "interval_steps": 3}
    nodes: dict[str, Any] = {"training": {"num_steps": 6}, "balance": {"interval_steps": 2}}
    layout = "dualpipe ep2 zero3"
    run = run_context(tiny_data, tmp_path / "undisturbed")
    losses = ranks.run(with_checkpoints, 4, config_of(layout, **nodes, checkpoint=checkpoint), run, None)[0]
    stopped = run_context(tiny_data, tmp_path / "stopped")
    ranks.run(with_checkpoints, 4, config_of(layout, **nodes, checkpoint=checkpoint), stopped, 4)
    checkpoint["resume"] = str(stopped.run_dir)
    resumed = config_of(layout, **nodes, checkpoint=checkpoint)
    assert ranks.run(with_checkpoints, 4, resumed, stopped, None)[0] == losses[3:]
    # In another layout the checkpoint's placement fits nobody; its experts are found by their index all the same.
    for leftover in (stopped.run_dir / "checkpoints").glob("step-00000006"):
        leftover.rename(tmp_path / "set-aside")
    other = tiny_config(
        dp=2,
        num_microbatches=config_of(layout).schedule.num_microbatches,
        model=MIXTURES["deepseek_v3"],
        training={"num_steps": 6},
        checkpoint=checkpoint,
    )
    assert ranks.run(with_checkpoints, 2, other, stopped, None)[0] == pytest.approx(losses[3:], rel=1e-5)


def skewed_config(**balance: Any) -> TrainConfig:
    """A router of sixteen experts on four ranks that nothing corrects; they move after step 3 of 5."""
    router = {
        "router": "sigmoid",
        "num_experts": 16,
        "num_experts_per_token": 2,
        "expert_intermediate_size": 8,
    }
    return tiny_config(
        dp=4,
        zero=1,
        num_microbatches=4,
        parallel={"expert_parallel_size": 4},
        model={"moe": router},
        logger={"name": "none"},
        training={"num_steps": 5},
        balance={"interval_steps": 3, **balance},
    )


@pytest.mark.parametrize("policy", ["swap", "pack"])
def test_the_measured_imbalance_falls(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, policy: str
) -> None:
    """A router that prefers the experts of the first ranks and is not corrected."""
    config = skewed_config(policy=policy)
    run = run_context(tiny_data, tmp_path)
    records = ranks.run(train_and_move, 4, config, run, next_placement, 0.03)[0][0]
    balances = [record.balance for record in records if record.balance is not None]
    moved = balances[2]
    assert moved.interval_before is not None
    assert moved.interval_after is not None
    assert moved.num_moved > 0
    # Three matrices of an expert, each with a master and two moments in fp32.
    assert moved.moved_bytes == moved.num_moved * 3 * 3 * 4 * 8 * config.model.hidden_size
    measured = [sum(each.rank_imbalance) / len(each.rank_imbalance) for each in balances]
    assert min(measured[:3]) > 1.5
    assert moved.interval_before == pytest.approx(sum(measured[:3]) / 3, rel=0.1)
    assert moved.interval_after < 1.15
    assert max(measured[3:]) < 1.25
    assert [StepRecord.from_json(record.to_json()) for record in records] == records
    assert records[2].scalars()["balance/num_moved"] == moved.num_moved
    # The same loads with a slot more on each rank.
    routing = records[0].moe
    assert routing is not None
    layout = ExpertLayout(num_experts=16, num_ranks=4, num_slots=5)
    for layer in routing.layers:
        assert imbalance(layer.load, place_experts([layer.load], layout)[0]) < 1.1


def test_policies_by_hand() -> None:
    loads, before = [6.0, 5, 1, 1, 1, 1], ((0, 1), (2, 3), (4, 5))
    for policy in ("swap", "pack"):
        after = next_placement(loads, before, BalanceConfig(policy=policy), 1)
        assert imbalance(loads, after) == pytest.approx(7 / 5)
    # One swap, of the pair that leaves least on the heavier rank.
    assert sum(len({*new} - {*old}) for new, old in zip(after, before, strict=True)) == 2
    config = BalanceConfig(goal=3.0)
    assert next_placement(loads, before, config, 1) is before
    assert next_placement([1.0] * 6, before, BalanceConfig(policy="pack"), 1) is before


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"dp": 2, "balance": {"interval_steps": 5}}, "parallel.expert_parallel_size=1"),
        (
            {
                "dp": 2,
                "parallel": {"expert_parallel_size": 2},
                "balance": {"interval_steps": 5, "num_nodes": 4},
            },
            "try balance.num_nodes=2",
        ),
        ({"balance": {"interval_steps": -1}}, "or to 0"),
        ({"balance": {"goal": 0.5}}, "1 at best"),
        ({"balance": {"max_swaps": 0}}, "at least 1"),
        ({"balance": {"num_nodes": 0}}, "at least 1"),
    ],
)
def test_senseless_values_are_refused(nodes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(model=MIXTURES["mixtral"], **nodes)
