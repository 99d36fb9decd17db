from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from parallel.mesh import MeshConfig, build_mesh, ranks_along, replica_ranks
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


def test_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.tensor_parallel_size=0"):
        MeshConfig(tensor_parallel_size=0)


def _sum_over_axes() -> dict[str, float]:
    mesh = build_mesh(
        MeshConfig(pipeline_parallel_size=2, data_parallel_size=2, tensor_parallel_size=2), mirrored=True
    )
    sums: dict[str, float] = {}
    for axis in ("tensor", "pipeline", "pipeline_reverse", "replica", "world"):
        value = torch.tensor(float(mesh.rank))
        dist.all_reduce(value, group=getattr(mesh, axis))
        sums[axis] = value.item()
    return sums


def test_groups_hold_the_right_ranks(ranks: RankPool) -> None:
    results = ranks.run(_sum_over_axes, 8)
    assert results[0] == {
        "tensor": 1, "pipeline": 4, "pipeline_reverse": 4, "replica": 0 + 2 + 4 + 6, "world": 28,
    }  # fmt: skip
    assert results[7]["replica"] == 1 + 3 + 5 + 7


def _build_with_wrong_world() -> None:
    build_mesh(MeshConfig(tensor_parallel_size=3))


def test_world_that_is_not_the_product_is_refused(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="2 processes were started"):
        ranks.run(_build_with_wrong_world, 2)
