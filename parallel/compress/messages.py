"""Messages between every two ranks of an axis, both ways at once.

A gloo send begins when word has come that its receive is posted, and that word travels behind what the other side has
begun to send on the same connection. Where a collective sends before it receives, as the all-gather does, a rank that
comes to it a little later makes the two directions take turns: on a slow link, twice the time. Here every receive is
posted before the first send. And gloo's reduce-scatter is an all-reduce, which sends everything twice. So on CPUs
gathers and reductions are made of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from counterflow.parallel.collectives import Axis, named


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Messages under way, and the tensors that they are sent from."""

    works: tuple[dist.Work, ...]
    sent: tuple[Tensor, ...]
    axis: Axis

    def wait(self) -> None:
        """Return once all have arrived, here and from here."""
        with named("exchange of messages", self.axis):
            for work in self.works:
                work.wait()


def suits(tensor: Tensor, axis: Axis) -> bool:
    """Whether messages are quicker than a collective on `tensor`: with gloo, not with NCCL."""
    return axis.size > 1 and tensor.device.type == "cpu"


def gather(whole: Tensor, shard: Tensor, axis: Axis) -> Messages:
    """Start to fill `whole` [n * M] with the `shard` [M] of each of the n ranks, in rank order. Group: the axis."""
    parts = list(whole.view(axis.size, -1))
    parts.pop(axis.rank).copy_(shard)
    return exchange(parts, [shard] * len(parts), axis)


def exchange(received: Sequence[Tensor], sent: Sequence[Tensor], axis: Axis) -> Messages:
    """Start sending sent[i] to the i-th other rank of `axis`, and filling received[i] with what that sends here.

    All are contiguous. Ranks start their exchanges on one group in one order. Group: the axis.
    """
    axis.count(sum(message.nbytes for message in sent))
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    operations = [
        dist.P2POp(operation, message, group=axis.group, group_peer=peer)
        for operation, messages in ((dist.irecv, received), (dist.isend, sent))
        for peer, message in zip(others, messages, strict=True)
    ]
    return Messages(works=tuple(dist.batch_isend_irecv(operations)), sent=tuple(sent), axis=axis)
