"""What all units of a rank have in common, as one record: axes, dtypes, where masters are, how gradients travel."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from counterflow.parallel.collectives import Axis
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.zero.config import ZeroConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAxes:
    """The ranks that hold the same parameters, and how they are grouped for hybrid sharding.

    whole: all of them; optimizer state is sharded over it. shard: the group of this rank over which parameters are
    sharded and gathered at stage 3, a node say; whole where there is one group. across: the ranks of the other
    groups that have this rank's place there; alone where there is one group. A rank's index in `whole` is its index
    in `across` times the size of `shard`, plus that in `shard`.
    """

    whole: Axis
    shard: Axis
    across: Axis

    @staticmethod
    def of(whole: Axis) -> ReplicaAxes:
        """One group."""
        return ReplicaAxes(whole=whole, shard=whole, across=Axis(name=whole.name))

    @property
    def is_hybrid(self) -> bool:
        """Whether there is more than one group."""
        return self.across.size > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroContext:
    """What a `ShardedStage` and its units need to know beside the parameters.

    replica: the ranks that hold a copy of the stage. expert_replica: those that hold the same experts of it; None: the
    stage has none. expert: the axis over which copies of experts are spread; None: there are none.
    pipeline: this rank's place along the pipeline. tensor: over which partial gradients are summed.
    dtype: of the computation; masters are fp32.
    compression: how gradients and parameters travel. reduce_dtype: in which gradients are summed over replicas, unless
    they are compressed. host_masters: masters are in memory of the host, to be updated there.
    """

    config: ZeroConfig
    replica: ReplicaAxes
    pipeline: int = 0
    tensor: Axis = field(default_factory=Axis)
    expert_replica: ReplicaAxes | None = None
    expert: Axis | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    reduce_dtype: torch.dtype = torch.float32
    host_masters: bool = False
