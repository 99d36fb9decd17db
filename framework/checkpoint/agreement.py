"""Ranks that do one thing: what rank 0 decides, and what all find, are the same on every rank, mistakes included.

A group of None is this process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from counterflow.framework.checkpoint.manifest import CheckpointError
from counterflow.parallel.collectives import Axis, named

T = TypeVar("T")


def from_rank_0(decide: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What `decide` returns on the group's rank 0, which alone calls it.

    Raises, on every rank alike, the ValueError or CheckpointError that it raised there.
    """
    if group is None:
        return decide()
    told: list[Any] = [_attempt(decide) if dist.get_rank(group) == 0 else None]
    with named("broadcast of objects", Axis(group=group, name="world")):
        dist.broadcast_object_list(told, group=group, group_src=0)
    value, error = told[0]
    if error is not None:
        raise error
    return value


def on_all(find: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """What `find` returns on each rank of the group, by rank.

    Raises, on every rank alike, what it raised anywhere, with the ranks: ValueError where that is all there was, else
    CheckpointError.
    """
    if group is None:
        return [find()]
    told: list[Any] = [None] * dist.get_world_size(group)
    with named("all-gather of objects", Axis(group=group, name="world")):
        dist.all_gather_object(told, _attempt(find), group=group)
    errors = {rank: error for rank, (_, error) in enumerate(told) if error is not None}
    if errors:
        ranks_of: dict[str, list[int]] = {}
        for rank, error in errors.items():
            ranks_of.setdefault(str(error), []).append(rank)
        kinds = {type(error) for error in errors.values()}
        raise (kinds.pop() if len(kinds) == 1 else CheckpointError)(by_rank(ranks_of))
    return [value for value, _ in told]


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in `group`, and how many there are."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def by_rank(ranks_of: dict[str, list[int]]) -> str:
    """Texts with the ranks each is from; the first three of them."""
    texts = [f"{_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()]
    if len(texts) > 3:
        texts[3:] = [f"and {len(texts) - 3} more"]
    return "; ".join(texts)


def _attempt(function: Callable[[], T]) -> tuple[T | None, ValueError | CheckpointError | None]:
    try:
        return function(), None
    except CheckpointError as error:
        return None, CheckpointError(str(error))
    except ValueError as error:
        return None, ValueError(str(error))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:4]))}{f' and {len(ranks) - 4} more' if len(ranks) > 4 else ''}"
