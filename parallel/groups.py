"""Process groups that some ranks make among themselves, and their end."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist


def new_group(ranks: list[int], name: str) -> dist.ProcessGroup:
    """A process group of global `ranks`, whose members alone call this."""
    group: object = dist.new_group(  # pyright: ignore[reportUnknownMemberType]
        ranks, use_local_synchronization=True, group_desc=name
    )
    return cast(dist.ProcessGroup, group)


class _ClosedGroup:
    """What stands in torch's table for a group that was destroyed."""

    def shutdown(self) -> None: ...


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group that `new_group` made, where torch.distributed has not been ended already.

    Hazard: torch names a group by its ranks and by how many groups there are, so the next one of these ranks would be
    given the name of this one, and find the addresses of closed sockets under it. The table keeps its length instead.
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group(group)
    names = cast("dict[object, str]", getattr(dist.distributed_c10d, "_world").pg_names)  # noqa: B009
    names[_ClosedGroup()] = "closed"
