"""Process groups that are made besides torch's default one, and their end.

Note [One order]
Where the world is bound to devices (`init_process_group(device_id=...)`), torch makes every further group by
ncclCommSplit, which is a collective of the whole world: a rank that leaves a call out hangs all others. And a group of
which only the members know is named by its ranks and by how many groups this rank has made, so that members that made
different numbers wait under different names. Therefore groups are made in one order that every rank follows, those
that it is not in included. For a member of no group a call costs a split on NCCL, and nothing on gloo.

A user's own pipeline may be over a part of the world, of which the rest knows nothing. Then its ranks follow one order
among themselves: they split the group that they have, or keep their numbers of groups in step (`among`).

Note [How long a group waits]
Left to itself torch lets a new group wait for half an hour, whatever the world does. Here it waits as the world does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist


class MakeGroup(Protocol):
    """Makes groups of ranks within a pipeline; every rank of the pipeline calls it, in one order."""

    def __call__(
        self, members: Sequence[int], name: str, *, device_type: str | None = None
    ) -> dist.ProcessGroup | None:
        """The group of `members`, None on other ranks. device_type: of all that travels; None: any."""
        ...


def new_groups(
    partition: Iterable[Sequence[int]], name: str, *, device_type: str | None = None
) -> dist.ProcessGroup | None:
    """This rank's group of disjoint sets of global ranks; None where it is in none.

    Every rank of the world calls this, with the same sets (Note [One order]). A group has the world's timeout, and its
    backends: where `device_type` is said, only that for tensors on such devices.
    """
    found: dist.ProcessGroup | None = None
    rank, world = dist.get_rank(), _world()
    timeout = timeout_of(world)
    for ranks in partition:
        group: object = dist.new_group(  # pyright: ignore[reportUnknownMemberType]
            list(ranks),
            timeout=timeout,
            backend=_backend(world, device_type),
            group_desc=name,
            device_id=world.bound_device_id,
        )
        if rank in ranks:
            found = cast(dist.ProcessGroup, group)
    return found


def new_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup | None:
    """A group of global `ranks`, None on the others; every rank of the world calls this."""
    return new_groups([ranks], name)


def among_rows(rows: Sequence[Sequence[int]]) -> MakeGroup:
    """Groups within disjoint rows of global ranks (the pipelines of a mesh), which all rows make at once."""

    def make(
        members: Sequence[int], name: str, *, device_type: str | None = None
    ) -> dist.ProcessGroup | None:
        return new_groups(
            [[row[member] for member in members] for row in rows], name, device_type=device_type
        )

    return make


def among(group: dist.ProcessGroup) -> MakeGroup:
    """Groups within `group`, of which ranks outside need not know; every rank of `group` calls this."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return among_rows([ranks])
    if _world().bound_device_id is None:
        _level(group)

    def make(
        members: Sequence[int], name: str, *, device_type: str | None = None
    ) -> dist.ProcessGroup | None:
        timeout, backend = timeout_of(group), _backend(group, device_type)
        if _world().bound_device_id is not None:
            return dist.split_group(
                group,
                [list(members)],
                timeout,
                group_desc=name,
                backend=None if device_type is None else f"{device_type}:{backend}",
            )
        if group.rank() not in members:
            _names()[_ClosedGroup()] = "made by others"
            return None
        made: object = dist.new_group(  # pyright: ignore[reportUnknownMemberType]
            [ranks[member] for member in members],
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc=name,
        )
        return cast(dist.ProcessGroup, made)

    return make


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long operations of `group` wait: of its devices' backends the longest."""
    found: list[timedelta] = []
    for device in _device_types(group):
        with suppress(RuntimeError, AttributeError):
            options: Any = group._get_backend(device).options
            found.append(options._timeout)
    return max(found, default=dist.distributed_c10d.default_pg_timeout)


def set_timeouts(timeout_s: float) -> None:
    """How long operations that begin from now on wait, of every group of this process; no rank needs to follow."""
    for group in list(_names()):
        if isinstance(group, dist.ProcessGroup):
            group.set_timeout(timedelta(seconds=timeout_s))


def abort_groups() -> None:
    """End every group of this process at once, whatever is under way; torch.distributed is not initialised afterwards.

    For a rank that has failed. To destroy NCCL's communicators would wait for operations that the other ranks have not
    come to, and may never; these are told that this rank is gone instead. It raises nothing.
    """
    if dist.is_initialized():
        with suppress(Exception):  # the failure is what is to be told
            _abort_process_group()


def _abort_process_group() -> None:
    getattr(dist.distributed_c10d, "_abort_process_group")()  # noqa: B009 - torch has no public one


def _level(group: dist.ProcessGroup) -> None:
    """Let every rank of `group` count as many groups as the one that has made most of them."""
    names = _names()
    types = {device.type for device in _device_types(group)}
    device = torch.device("cpu" if "cpu" in types else "cuda")
    count = torch.tensor(len(names), device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    while len(names) < int(count):
        names[_ClosedGroup()] = "made by others"


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    return world


def _backend(group: dist.ProcessGroup, device_type: str | None) -> str:
    """That of `group`, or only what it has for one kind of device."""
    backend = dist.get_backend(group)
    if device_type is None:
        return str(backend)
    return str(dist.distributed_c10d.BackendConfig(backend).get_device_backend_map()[device_type])


def _device_types(group: dist.ProcessGroup) -> list[torch.device]:
    return cast("list[torch.device]", getattr(group, "_device_types", []))


def _names() -> dict[object, str]:
    """torch's table of groups and their names."""
    return cast("dict[object, str]", getattr(dist.distributed_c10d, "_world").pg_names)  # noqa: B009


class _ClosedGroup:
    """What stands in torch's table for a group that was destroyed, or that only other ranks have made."""

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group that was made here, where torch.distributed has not been ended already.

    Hazard: torch names some groups by their ranks and by how many groups there are, so the next one of these ranks
    would be given the name of this one, and find the addresses of closed sockets under it. The table keeps its length.
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group(group)
    _names()[_ClosedGroup()] = "closed"
