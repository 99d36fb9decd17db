"""The device mesh: sizes of the axes, rank <-> coordinate arithmetic (pure), and the process groups.

Ranks are laid out with the tensor axis innermost, then context, data and pipeline, so that the axes that talk
most sit closest together.

Note [The expert view]
Experts see the ranks of one pipeline coordinate, in rank order, as a second pair of axes: position i along data x
context x tensor has expert rank i mod expert_parallel_size, so that neighbours exchange tokens, and the rest of the
division is the expert data-parallel axis, whose ranks hold the same experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes (config group `parallel`).

    The world is pipeline x data x context x tensor. expert_parallel_size: ranks among which the experts of a layer
    are shared out; it takes no ranks of its own, but divides data x context x tensor (Note [The expert view]).
    `sequence_parallel` shards activations between tensor-parallel regions over the tensor axis (Korthikanti et
    al., arXiv 2205.05198).
    """

    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        for name in (
            "pipeline_parallel_size",
            "data_parallel_size",
            "context_parallel_size",
            "tensor_parallel_size",
            "expert_parallel_size",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(
                    f"parallel.{name}={value}: an axis has at least one rank; set it to 1 or more"
                )
        if self.ranks_per_stage % self.expert_parallel_size:
            raise ValueError(
                f"parallel.expert_parallel_size={self.expert_parallel_size}: must divide data x context x tensor = "
                f"{self.ranks_per_stage}, the ranks that hold a stage; try parallel.expert_parallel_size="
                f"{gcd(self.ranks_per_stage, self.expert_parallel_size)}, or "
                f"parallel.data_parallel_size={self.expert_parallel_size}"
            )

    @property
    def world_size(self) -> int:
        return (
            self.pipeline_parallel_size
            * self.data_parallel_size
            * self.context_parallel_size
            * self.tensor_parallel_size
        )

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of one pipeline coordinate: data x context x tensor."""
        return self.data_parallel_size * self.context_parallel_size * self.tensor_parallel_size

    def expert_rank_of(self, rank: int) -> int:
        """The expert rank of global `rank`: which share of each layer's experts it holds."""
        return rank % self.ranks_per_stage % self.expert_parallel_size

    def coordinate_of(self, rank: int) -> Coordinate:
        """The coordinate of global `rank`."""
        rest, tensor = divmod(rank, self.tensor_parallel_size)
        rest, context = divmod(rest, self.context_parallel_size)
        pipeline, data = divmod(rest, self.data_parallel_size)
        return Coordinate(pipeline=pipeline, data=data, context=context, tensor=tensor)

    def rank_of(self, coordinate: Coordinate) -> int:
        """The inverse of `coordinate_of`."""
        rank = coordinate.pipeline
        rank = rank * self.data_parallel_size + coordinate.data
        rank = rank * self.context_parallel_size + coordinate.context
        return rank * self.tensor_parallel_size + coordinate.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """A rank's place on each axis."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One rank's view of the mesh: its coordinate and the process groups it belongs to.

    A group of this rank alone is None, the group of all ranks is torch's default, and groups of the same ranks
    are one: with gloo each costs a thread that wakes a hundred times a second.

    tensor, pipeline: the groups along one axis, ordered by coordinate.
    replica: the ranks that hold the same parameters: data x context, times the mirror pair where the schedule
        keeps two copies of each stage. ZeRO shards over it, gradients are reduced over it.
    shard, shard_replica: of `replica`, the group of this rank where parameters are sharded within groups (`replica`
        itself where they are not), and the ranks of all groups that have its place there.
    expert_shard, expert_shard_replica: the same of `expert_replica`.
    expert: the ranks that share the experts of a layer out among them and exchange tokens, by expert rank.
    expert_replica: the ranks that hold the same experts: of the same expert rank, times the mirror pair.
    world: every rank.
    embedding: the ranks of the first and the last stage at this coordinate of the other axes, which hold the two
        copies of a tied embedding; on ranks between them, and where both stages share a rank, this rank alone.
    made: the groups that `build_mesh` made, which `close` destroys; torch's default group is not among them.
    """

    config: MeshConfig
    rank: int
    coordinate: Coordinate
    tensor: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None
    replica: dist.ProcessGroup | None
    shard: dist.ProcessGroup | None
    shard_replica: dist.ProcessGroup | None
    expert: dist.ProcessGroup | None
    expert_replica: dist.ProcessGroup | None
    expert_shard: dist.ProcessGroup | None
    expert_shard_replica: dist.ProcessGroup | None
    embedding: dist.ProcessGroup | None
    world: dist.ProcessGroup | None
    made: tuple[dist.ProcessGroup, ...] = ()

    def close(self) -> None:
        """Destroy the groups of this mesh; every rank calls it, with no collective under way.

        torch keeps each group, with its threads and connections, until it is destroyed and nobody holds it.
        """
        from counterflow.parallel.groups import destroy_group

        for group in self.made:
            destroy_group(group)


def ranks_along(config: MeshConfig, coordinate: Coordinate, *axes: str) -> list[int]:
    """Global ranks that share every axis of `coordinate` but `axes`, ascending."""
    sizes = {
        "pipeline": config.pipeline_parallel_size,
        "data": config.data_parallel_size,
        "context": config.context_parallel_size,
        "tensor": config.tensor_parallel_size,
    }
    values = [range(size) if axis in axes else [getattr(coordinate, axis)] for axis, size in sizes.items()]
    return [
        config.rank_of(Coordinate(pipeline=pipeline, data=data, context=context, tensor=tensor))
        for pipeline, data, context, tensor in product(*values)
    ]


def replica_ranks(config: MeshConfig, coordinate: Coordinate, *, mirrored: bool) -> list[int]:
    """Global ranks that hold the same parameters as the rank at `coordinate`, ascending.

    `mirrored`: each stage has copies on pipeline ranks r and p-1-r (two-copy DualPipe).
    """
    size = config.pipeline_parallel_size
    pair = {coordinate.pipeline, size - 1 - coordinate.pipeline} if mirrored else {coordinate.pipeline}
    ranks = ranks_along(config, coordinate, "pipeline", "data", "context")
    return [rank for rank in ranks if config.coordinate_of(rank).pipeline in pair]


def expert_ranks(config: MeshConfig, coordinate: Coordinate) -> list[int]:
    """Global ranks with which the rank at `coordinate` exchanges tokens, by expert rank."""
    first, size = config.rank_of(coordinate), config.expert_parallel_size
    first -= config.expert_rank_of(first)
    return list(range(first, first + size))


def expert_replica_ranks(config: MeshConfig, coordinate: Coordinate, *, mirrored: bool) -> list[int]:
    """Global ranks that hold the same experts as the rank at `coordinate`, ascending; see `replica_ranks`."""
    size, mine = config.ranks_per_stage, config.expert_rank_of(config.rank_of(coordinate))
    pipelines = {
        config.coordinate_of(rank).pipeline for rank in replica_ranks(config, coordinate, mirrored=mirrored)
    }
    return [
        rank
        for pipeline in sorted(pipelines)
        for rank in range(pipeline * size + mine, (pipeline + 1) * size, config.expert_parallel_size)
    ]


def embedding_ranks(config: MeshConfig, coordinate: Coordinate, *, mirrored: bool) -> list[int]:
    """Global ranks between which a tied embedding's gradients are added, ascending (see `Mesh.embedding`)."""
    last = config.pipeline_parallel_size - 1
    if mirrored or coordinate.pipeline not in (0, last):
        return [config.rank_of(coordinate)]
    ranks = ranks_along(config, coordinate, "pipeline")
    return [rank for rank in ranks if config.coordinate_of(rank).pipeline in (0, last)]


def in_groups(ranks: list[int], rank: int, size: int) -> tuple[list[int], list[int]]:
    """`ranks` in groups of `size` neighbours: the group of `rank`, and the ranks that have its place in theirs."""
    assert len(ranks) % size == 0, f"{len(ranks)} ranks in groups of {size}"
    index = ranks.index(rank)
    start = index - index % size
    return ranks[start : start + size], ranks[index % size :: size]


def expert_shard_size(config: MeshConfig, num_replicas: int, shard_size: int) -> int:
    """How many of the `num_replicas` of an expert are among the ranks of a group of `shard_size` replicas."""
    return gcd(num_replicas, max(1, shard_size * config.tensor_parallel_size // config.expert_parallel_size))


def partition_by(
    config: MeshConfig, ranks_of: Callable[[Coordinate], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """The sets that `ranks_of` cuts the ranks of the mesh into, by their lowest rank: the same on every rank."""
    found: dict[int, tuple[int, ...]] = {}
    for rank in range(config.world_size):
        if rank not in found:
            ranks = tuple(ranks_of(config.coordinate_of(rank)))
            found |= dict.fromkeys(ranks, ranks)
    return tuple(dict.fromkeys(found.values()))


def pipelines_of(config: MeshConfig) -> tuple[tuple[int, ...], ...]:
    """The global ranks of each pipeline of the mesh, in the order of its stages."""
    return partition_by(config, lambda at: ranks_along(config, at, "pipeline"))


def build_mesh(config: MeshConfig, *, mirrored: bool = False, shard_size: int | None = None) -> Mesh:
    """Build this rank's process groups; torch.distributed must be initialised with the world of `config`.

    shard_size: see `ZeroConfig`; it divides the replicas of a stage.
    Raises ValueError: where the number of processes is not the product of the axes.
    """
    # Not above: configs are read before torch is needed, and importing it takes a second.
    import torch.distributed as dist

    from counterflow.parallel.groups import new_group

    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size != config.world_size:
        raise ValueError(
            f"{world_size} processes were started, but pipeline x data x context x tensor = {config.world_size}; "
            "start as many processes as the product of the parallel.*_size values"
        )
    coordinate = config.coordinate_of(rank)
    groups: dict[tuple[int, ...], Any] = {tuple(range(world_size)): dist.group.WORLD}
    made: list[Any] = []

    def group(ranks_of: Callable[[Coordinate], list[int]], name: str) -> Any:
        sets = partition_by(config, ranks_of)
        for ranks in sets:
            # Every rank follows, those that are not among them too: see parallel/groups.py.
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = new_group(ranks, name)
                if rank in ranks:
                    made.append(groups[ranks])
        return next((groups[ranks] for ranks in sets if rank in ranks and len(ranks) > 1), None)

    def replicas(coordinate: Coordinate) -> list[int]:
        return replica_ranks(config, coordinate, mirrored=mirrored)

    def expert_replicas(coordinate: Coordinate) -> list[int]:
        return expert_replica_ranks(config, coordinate, mirrored=mirrored)

    def in_shards(coordinate: Coordinate) -> tuple[list[int], list[int]]:
        ranks = replicas(coordinate)
        return in_groups(ranks, config.rank_of(coordinate), shard_size or len(ranks))

    def in_expert_shards(coordinate: Coordinate) -> tuple[list[int], list[int]]:
        ranks = expert_replicas(coordinate)
        size = expert_shard_size(config, len(ranks), shard_size) if shard_size else len(ranks)
        return in_groups(ranks, config.rank_of(coordinate), size)

    return Mesh(
        config=config,
        rank=rank,
        coordinate=coordinate,
        tensor=group(lambda at: ranks_along(config, at, "tensor"), "tensor"),
        pipeline=group(lambda at: ranks_along(config, at, "pipeline"), "pipeline"),
        replica=group(replicas, "replica"),
        shard=group(lambda at: in_shards(at)[0], "shard"),
        shard_replica=group(lambda at: in_shards(at)[1], "replica of a shard"),
        expert=group(lambda at: expert_ranks(config, at), "expert"),
        expert_replica=group(expert_replicas, "expert replica"),
        expert_shard=group(lambda at: in_expert_shards(at)[0], "expert shard"),
        expert_shard_replica=group(lambda at: in_expert_shards(at)[1], "replica of an expert shard"),
        embedding=group(lambda at: embedding_ranks(config, at, mirrored=mirrored), "embedding"),
        world=None if world_size == 1 else dist.group.WORLD,
        made=tuple(made),
    )
