"""Gradients of experts with copies: the sum of all, equal in every copy to the bit, and counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.optimizer import ModelOptimizer
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.expert.copies import copies_on
from counterflow.parallel.expert.placement import ExpertsByRank
from counterflow.parallel.mesh import MeshConfig, build_mesh
from counterflow.parallel.parameters import ParameterPlacement, place, placement_of
from counterflow.parallel.zero.config import ZeroConfig
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.stage import ShardedStage
from tests.rank_pool import RankPool

NUM_EXPERTS = 6
SHAPES = {"up": (5, 3), "down": (3, 5)}
# Copies on one rank too, and experts without any.
FIRST = {2: ((0, 1, 2, 4, 5), (3, 4, 5, 0, 0)), 4: ((0, 1, 2), (2, 3, 0), (4, 5, 0), (1, 0, 3))}
SECOND = {2: ((4, 3, 2, 4, 5), (1, 1, 5, 0, 3)), 4: ((5, 1, 5), (2, 3, 0), (4, 5, 5), (1, 4, 3))}


def copies_of(placed: ExpertsByRank, rank: int) -> dict[str, Any]:
    return {"experts": placed[rank], "copies": copies_on(placed, rank)}


class Stacks(nn.Module):
    """Two stacks of experts and a weight of all ranks; nothing is computed with them."""

    def __init__(self, placed: ExpertsByRank, rank: int) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.empty(7))
        for name, shape in SHAPES.items():
            stack = nn.Parameter(torch.empty(len(placed[rank]), *shape))
            placement = ParameterPlacement(global_shape=(NUM_EXPERTS, *shape), **copies_of(placed, rank))
            setattr(self, name, place(stack, placement))


def gradient(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reduced(
    config: MeshConfig, zero: int, mirrored: bool
) -> list[tuple[dict[tuple[str, int], list[Tensor]], float, int, int]]:
    """For two placements, the second after a move: gradients of all copies of each expert, norm, and bytes sent."""
    mesh, meter = build_mesh(config, mirrored=mirrored), ByteMeter()
    expert = Axis(group=mesh.expert, name="expert", meter=meter)
    module = Stacks(FIRST[expert.size], expert.rank)
    stage = ShardedStage(
        module,
        ZeroContext(
            config=ZeroConfig(stage=zero),  # type: ignore[arg-type]
            replica=ReplicaAxes.of(Axis(group=mesh.replica)),
            tensor=Axis(group=mesh.tensor),
            expert_replica=ReplicaAxes.of(Axis(group=mesh.expert_replica, name="expert_data", meter=meter)),
            expert=expert,
        ),
    )
    optimizer = ModelOptimizer(
        [stage], OptimizerConfig(), tensor=Axis(group=mesh.tensor), world=Axis(group=mesh.world)
    )
    found: list[tuple[dict[tuple[str, int], list[Tensor]], float, int, int]] = []
    for placements in (FIRST, SECOND):
        placed = placements[expert.size]
        for name in SHAPES:
            parameter = getattr(module, name)
            place(parameter, replace(placement_of(parameter), **copies_of(placed, expert.rank)))
        optimizer.read_placements()
        meter.reset()
        stage.begin_step()
        stage.unshard()
        stage.wait_unshard()
        for number, name in enumerate(SHAPES):
            buffer = stage.gradient_buffer(getattr(module, name))
            buffer.copy_(gradient(10 * mesh.rank + number, tuple(buffer.shape)))
        stage.gradient_buffer(module.whole).fill_(1.0)
        stage.reduce_grad()
        stage.finish_step()
        sent = meter.sent_bytes()
        found.append(
            (
                gathered(stage),
                optimizer.gradient_norm(),
                sent.get("expert", 0),
                sent.get("expert_data", 0),
            )
        )
    return found


def gathered(stage: ShardedStage) -> dict[tuple[str, int], list[Tensor]]:
    """The gradients of every copy of each expert, flat, wherever it or its parts are."""
    mine = [
        (
            slot.name,
            slot.placement.experts,
            slot.placement.copies,
            fragment.start,
            fragment.grad.clone(),
            slot.shape,
        )
        for unit in stage.units
        for fragment in unit.fragments()
        if (slot := fragment.slot).placement.experts is not None
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    stacks: dict[tuple[str, int], tuple[tuple[int, ...], Tensor]] = {}
    for name, experts, copies, start, values, shape in (each for parts in everyone for each in parts):
        _, whole = stacks.setdefault((name, copies.rank), (experts, torch.full(shape, torch.nan).view(-1)))
        part = whole[start : start + len(values)]
        assert (part.isnan() | (part == values[: len(part)])).all(), "replicas of a rank differ"
        assert not values[len(part) :].any(), "padding gets no gradient"
        part.copy_(values[: len(part)])
    found: dict[tuple[str, int], list[Tensor]] = {}
    for (name, _), (experts, whole) in sorted(stacks.items()):
        for expert, row in zip(experts, whole.view(len(experts), -1), strict=True):
            assert not row.isnan().any()
            found.setdefault((name, expert), []).append(row)
    return found


MESHES = {
    "ep2 of dp2": (MeshConfig(data_parallel_size=2, expert_parallel_size=2), False),
    "ep2 of dp4 tp2": (
        MeshConfig(data_parallel_size=4, tensor_parallel_size=2, expert_parallel_size=2),
        False,
    ),
    "mirror ep4 of dp4": (
        MeshConfig(pipeline_parallel_size=2, data_parallel_size=4, expert_parallel_size=4),
        True,
    ),
    "mirror ep2 of dp4": (
        MeshConfig(pipeline_parallel_size=2, data_parallel_size=4, expert_parallel_size=2),
        True,
    ),
}


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", MESHES)
def test_every_copy_has_the_sum_to_the_bit(ranks: RankPool, name: str, zero: int) -> None:
    config, mirrored = MESHES[name]
    size = config.expert_parallel_size
    per_rank = ranks.run(reduced, config.world_size, config, zero, mirrored)
    for index, placements in enumerate((FIRST, SECOND)):
        placed = placements[size]
        gradients, norm, sent, _ = per_rank[0][index]
        squares = 7.0 * (config.world_size // config.tensor_parallel_size) ** 2
        for number, (stack, shape) in enumerate(SHAPES.items()):
            for expert in range(NUM_EXPERTS):
                terms = [
                    gradient(10 * rank + number, (len(placed[0]), *shape))[slot].double()
                    for rank in range(config.world_size)
                    for slot, held in enumerate(placed[config.expert_rank_of(rank)])
                    if held == expert
                ]
                expected = sum(terms, torch.zeros(())).view(-1)
                squares += float(expected.square().sum())
                copies = gradients[stack, expert]
                assert len(copies) == sum(experts.count(expert) for experts in placed)
                torch.testing.assert_close(copies[0].double(), expected, rtol=1e-6, atol=1e-6)
                assert all(torch.equal(copy, copies[0]) for copy in copies)
        # `whole` is replicated over the tensor axis and counted by its first rank.
        assert norm == pytest.approx(squares**0.5, rel=1e-6)
        assert all(each[index][1] == norm for each in per_rank)
        # To each other rank that has the expert its 15 numbers of either stack.
        others = [
            len({r for r in range(size) if expert in placed[r]}) - 1 for expert in sorted(set(placed[0]))
        ]
        assert sent == 4 * 2 * 15 * sum(others)
