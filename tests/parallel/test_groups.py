"""Process groups: every rank of the world calls for every one of them, in one order, with the world's timeout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from counterflow.parallel import groups
from counterflow.parallel.groups import among_rows, new_groups, timeout_of
from counterflow.parallel.mesh import MeshConfig, build_mesh, partition_by, pipelines_of, replica_ranks
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.api import build_pipeline
from counterflow.parallel.pipeline.runtime import p2p
from counterflow.parallel.pipeline.runtime.p2p import Transport
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
Call = tuple[tuple[int, ...], str]


@contextmanager
def alone_as(rank: int, world_size: int) -> Iterator[list[Call]]:
    """This process is `rank` of a world whose other ranks are not there; the groups that it asks torch for."""
    calls: list[Call] = []
    make: Callable[..., Any] = dist.new_group

    def spy(ranks: list[int], *args: Any, **options: Any) -> Any:
        assert not options.get("use_local_synchronization"), "only some ranks would make it"
        calls.append((tuple(ranks), options["group_desc"]))
        return make(ranks, *args, **options)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with mock.patch.object(dist, "new_group", spy):
            yield calls
    finally:
        dist.destroy_process_group()


def same_on_all_ranks(world_size: int, do: Callable[[], object]) -> list[Call]:
    """What every rank asked for; it fails where a rank skipped a call or made it in another place."""
    by_rank: list[list[Call]] = []
    for rank in range(world_size):
        with alone_as(rank, world_size) as calls:
            do()
        by_rank.append(calls)
    for rank, calls in enumerate(by_rank):
        assert calls == by_rank[0], f"rank {rank}"
    return by_rank[0]


def sizes_of(name: str) -> Iterator[tuple[int, int]]:
    """Numbers of ranks from 2 to 8 that the schedule fits, and micro-batches."""
    for num_ranks in range(2, 9):
        try:
            generate(name, num_ranks, 2 * num_ranks)
        except ValueError:
            continue
        yield num_ranks, 2 * num_ranks


@pytest.mark.parametrize("name", generated_schedules())
def test_every_rank_makes_the_communicators_of_all_channels(name: str) -> None:
    """As with NCCL, which needs one for each; two pipelines side by side."""
    found = 0
    for num_ranks, num_microbatches in sizes_of(name):
        schedule = lower(generate(name, num_ranks, num_microbatches), zero_stage=0, early_sends=True)
        pipelines = pipelines_of(MeshConfig(pipeline_parallel_size=num_ranks, data_parallel_size=2))

        def connect() -> None:
            mine = next(ranks for ranks in pipelines if dist.get_rank() in ranks)  # noqa: B023
            group = new_groups(pipelines, "pipeline")  # noqa: B023
            transport = Transport(group, device=CPU)
            with mock.patch.object(p2p, "channels_need_groups", return_value=True):
                transport.connect(schedule, among_rows(pipelines))  # noqa: B023
            own = [each for each in p2p.channels_of(schedule) if transport.rank in each[:2]]  # noqa: B023
            assert set(transport._own) == set(own)
            for source, destination, channel in own:
                assert dist.get_process_group_ranks(transport._own[source, destination, channel]) == sorted(
                    (mine[source], mine[destination])
                )
            transport.close()

        calls = same_on_all_ranks(2 * num_ranks, connect)
        assert len(calls) == 2 * (1 + len(p2p.channels_of(schedule)))
        found += 1
    assert found > 0


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(
    ("config", "shard_size"),
    [
        (MeshConfig(pipeline_parallel_size=3, data_parallel_size=2, tensor_parallel_size=2), None),
        (MeshConfig(pipeline_parallel_size=2, data_parallel_size=4, expert_parallel_size=2), 2),
        (
            MeshConfig(
                pipeline_parallel_size=2,
                data_parallel_size=2,
                tensor_parallel_size=2,
                expert_parallel_size=4,
            ),
            2,
        ),
        (MeshConfig(pipeline_parallel_size=4), None),
        (MeshConfig(), None),
    ],
)
def test_every_rank_makes_the_groups_of_the_mesh(
    config: MeshConfig, shard_size: int | None, mirrored: bool
) -> None:
    def build() -> None:
        mesh = build_mesh(config, mirrored=mirrored, shard_size=shard_size)
        for name in ("tensor", "pipeline", "replica", "shard", "shard_replica", "expert", "expert_replica"):
            group = getattr(mesh, name)
            assert group is None or mesh.rank in dist.get_process_group_ranks(group), name
        mesh.close()

    calls = same_on_all_ranks(config.world_size, build)
    assert len({ranks for ranks, _ in calls}) == len(calls), "groups of the same ranks are one"


def test_a_partition_has_every_rank_once() -> None:
    config = MeshConfig(pipeline_parallel_size=3, data_parallel_size=2, tensor_parallel_size=2)
    found = partition_by(config, lambda at: replica_ranks(config, at, mirrored=True))
    assert found == ((0, 2, 8, 10), (1, 3, 9, 11), (4, 6), (5, 7))
    assert pipelines_of(config) == ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11))


WIDTH = 8


def make_stage(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def step(name: str, own_groups: bool, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    with mock.patch.object(p2p, "channels_need_groups", return_value=own_groups):
        size = dist.get_world_size() if group is None else group.size()
        with build_pipeline(make_stage, name, num_microbatches=2 * size, group=group) as pipeline:
            assert bool(pipeline.runtime.transport._own) == own_groups
            inputs = torch.randn(4 * size, WIDTH, generator=torch.Generator().manual_seed(1))
            losses = pipeline.step(inputs, inputs, nn.functional.mse_loss).losses
            return [losses, *(each.grad for each in pipeline.parameters() if each.grad is not None)]


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [*((name, 4) for name in generated_schedules()), ("1f1b", 3), ("interleaved_1f1b", 8), ("dualpipe", 8)],
)
def test_a_step_over_a_communicator_for_each_channel(ranks: RankPool, name: str, num_ranks: int) -> None:
    own, shared = (ranks.run(step, num_ranks, name, own_groups) for own_groups in (True, False))
    for found, expected in zip(own, shared, strict=True):
        assert len(found) > 2
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def step_beside_others() -> list[Tensor]:
    """Two pipelines of three ranks, over groups that a user made; of both, ranks have made different numbers before."""
    rank = dist.get_rank()
    mine = [0, 1, 2] if rank < 3 else [3, 4, 5]
    group = dist.new_group(mine, use_local_synchronization=True)
    if rank in (1, 2, 5):
        dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return step("1f1b", True, group)


def test_a_pipeline_over_a_part_of_the_world(ranks: RankPool) -> None:
    expected = ranks.run(step, 3, "1f1b", False)
    for rank, found in enumerate(ranks.run(step_beside_others, 6)):
        assert all(torch.equal(*pair) for pair in zip(found, expected[rank % 3], strict=True))


def test_groups_are_made_in_one_place() -> None:
    """Where their order and their timeouts are kept."""
    root = Path(__file__).parents[2]
    makes = re.compile(r"\bdist\.(?:new_group|new_subgroups|split_group|init_device_mesh)\b|\bDeviceMesh\b")
    found = {
        str(path.relative_to(root))
        for folder in ("parallel", "models", "framework", "launch")
        for path in (root / folder).rglob("*.py")
        if makes.search(path.read_text())
    }
    assert found == {"parallel/groups.py"}


def timeouts() -> list[timedelta]:
    world = dist.group.WORLD
    assert world is not None
    before = timeout_of(world)
    world.set_timeout(timedelta(seconds=17))
    mesh = build_mesh(MeshConfig(pipeline_parallel_size=2, data_parallel_size=2))
    found = [timeout_of(group) for group in mesh.made]
    groups.set_timeouts(9)
    return [before, *found, *(timeout_of(group) for group in (world, *mesh.made))]


def test_groups_wait_as_long_as_the_world_does(ranks: RankPool) -> None:
    for before, *found in ranks.run(timeouts, 4):
        assert before == timedelta(seconds=120), "what the pool was told"
        assert found == [timedelta(seconds=17)] * 2 + [timedelta(seconds=9)] * 3
