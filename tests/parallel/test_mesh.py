from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from counterflow.parallel.mesh import (
    MeshConfig,
    build_mesh,
    expert_ranks,
    expert_replica_ranks,
    ranks_along,
    replica_ranks,
)
from tests.rank_pool import RankPool

sizes = st.integers(1, 4)


@given(sizes, sizes, sizes, sizes)
def test_rank_and_coordinate_are_inverse(pipeline: int, data: int, context: int, tensor: int) -> None:
    config = MeshConfig(
        pipeline_parallel_size=pipeline,
        data_parallel_size=data,
        context_parallel_size=context,
        tensor_parallel_size=tensor,
    )
    coordinates = [config.coordinate_of(rank) for rank in range(config.world_size)]
    assert len(set(coordinates)) == config.world_size
    assert [config.rank_of(coordinate) for coordinate in coordinates] == list(range(config.world_size))


def test_tensor_axis_is_innermost_and_pipeline_outermost() -> None:
    config = MeshConfig(pipeline_parallel_size=2, data_parallel_size=2, tensor_parallel_size=2)
    origin = config.coordinate_of(0)
    assert ranks_along(config, origin, "tensor") == [0, 1]
    assert ranks_along(config, origin, "data") == [0, 2]
    assert ranks_along(config, origin, "pipeline") == [0, 4]


def test_mirror_pairs_share_their_replica_ranks() -> None:
    config = MeshConfig(pipeline_parallel_size=4, data_parallel_size=2)
    assert replica_ranks(config, config.coordinate_of(0), mirrored=False) == [0, 1]
    assert replica_ranks(config, config.coordinate_of(0), mirrored=True) == [0, 1, 6, 7]
    assert replica_ranks(config, config.coordinate_of(7), mirrored=True) == [0, 1, 6, 7]
    assert replica_ranks(config, config.coordinate_of(2), mirrored=True) == [2, 3, 4, 5]


def experts_of(config: MeshConfig, rank: int) -> list[int]:
    return expert_ranks(config, config.coordinate_of(rank))


def copies_of(config: MeshConfig, rank: int, *, mirrored: bool = False) -> list[int]:
    return expert_replica_ranks(config, config.coordinate_of(rank), mirrored=mirrored)


def test_neighbours_exchange_tokens_and_the_rest_are_copies() -> None:
    """Four ranks a stage, data x tensor, experts over two of them."""
    config = MeshConfig(
        pipeline_parallel_size=2, data_parallel_size=2, tensor_parallel_size=2, expert_parallel_size=2
    )
    assert [experts_of(config, rank) for rank in (0, 1, 2, 3, 6)] == [[0, 1], [0, 1], [2, 3], [2, 3], [6, 7]]
    assert [copies_of(config, rank) for rank in (0, 1, 2, 7)] == [[0, 2], [1, 3], [0, 2], [5, 7]]
    assert copies_of(config, 1, mirrored=True) == [1, 3, 5, 7]
    assert experts_of(config, 1) == [0, 1], "the mirror holds other micro-batches: no tokens go there"


@given(sizes, sizes, sizes, sizes, st.booleans(), st.data())
def test_the_expert_view_cuts_the_ranks_of_a_stage_both_ways(
    pipeline: int, data: int, context: int, tensor: int, mirrored: bool, draw: st.DataObject
) -> None:
    size = data * context * tensor
    config = MeshConfig(
        pipeline_parallel_size=pipeline,
        data_parallel_size=data,
        context_parallel_size=context,
        tensor_parallel_size=tensor,
        expert_parallel_size=draw.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])),
    )
    rank = draw.draw(st.integers(0, config.world_size - 1))
    exchange, copies = experts_of(config, rank), copies_of(config, rank, mirrored=mirrored)
    assert [config.expert_rank_of(each) for each in exchange] == list(range(config.expert_parallel_size))
    assert {config.expert_rank_of(each) for each in copies} == {config.expert_rank_of(rank)}
    assert set(exchange) & set(copies) == {rank}
    # Every replica of the stage is reached by a copy and an exchange, once.
    reached = [each for copy in copies for each in experts_of(config, copy)]
    stage = replica_ranks(config, config.coordinate_of(rank), mirrored=mirrored)
    assert len(reached) == len(set(reached)) == len(stage) * tensor
    assert set(stage) <= set(reached)


def test_a_size_that_does_not_divide_the_ranks_of_a_stage_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"parallel\.expert_parallel_size=4.*= 6.*expert_parallel_size=2"
    ) as told:
        MeshConfig(
            pipeline_parallel_size=4, data_parallel_size=3, tensor_parallel_size=2, expert_parallel_size=4
        )
    assert "data_parallel_size=4" in str(told.value)


def test_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.tensor_parallel_size=0"):
        MeshConfig(tensor_parallel_size=0)


def _sum_over_axes() -> dict[str, float]:
    mesh = build_mesh(
        MeshConfig(pipeline_parallel_size=2, data_parallel_size=2, tensor_parallel_size=2), mirrored=True
    )
    sums: dict[str, float] = {}
    for axis in ("tensor", "pipeline", "replica", "world"):
        value = torch.tensor(float(mesh.rank))
        dist.all_reduce(value, group=getattr(mesh, axis))
        sums[axis] = value.item()
    return sums


def test_groups_hold_the_right_ranks(ranks: RankPool) -> None:
    results = ranks.run(_sum_over_axes, 8)
    assert results[0] == {
        "tensor": 1, "pipeline": 4, "replica": 0 + 2 + 4 + 6, "world": 28,
    }  # fmt: skip
    assert results[7]["replica"] == 1 + 3 + 5 + 7


def _expert_groups(expert: int) -> dict[str, object]:
    mesh = build_mesh(
        MeshConfig(data_parallel_size=2, tensor_parallel_size=2, expert_parallel_size=expert), mirrored=False
    )
    return {
        "expert": None if mesh.expert is None else dist.get_process_group_ranks(mesh.expert),
        "copies": None if mesh.expert_replica is None else dist.get_process_group_ranks(mesh.expert_replica),
        "shared": [
            mesh.expert is mesh.tensor,
            mesh.expert is mesh.world,
            mesh.expert_replica is mesh.replica,
        ],
    }


def test_expert_groups_are_those_of_other_axes_where_the_ranks_are_the_same(ranks: RankPool) -> None:
    found = {expert: ranks.run(_expert_groups, 4, expert) for expert in (1, 2, 4)}
    assert found[2][1] == {"expert": [0, 1], "copies": [1, 3], "shared": [True, False, True]}
    assert found[4][1] == {"expert": [0, 1, 2, 3], "copies": None, "shared": [False, True, False]}
    assert found[1][1] == {"expert": None, "copies": [0, 1, 2, 3], "shared": [False, False, False]}


def _build_with_wrong_world() -> None:
    build_mesh(MeshConfig(tensor_parallel_size=3))


def test_world_that_is_not_the_product_is_refused(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="2 processes were started"):
        ranks.run(_build_with_wrong_world, 2)
