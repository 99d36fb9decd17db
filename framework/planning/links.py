"""The time of communication in a cluster, by operation, size and where the ranks of a group are.

Note [Groups]
A group has `size` ranks, `per_node` of them on each node. Ranks of the other groups of the same axis communicate at
the same time, so each rank counts on its own share of its node's network cards; a ring that passes through a node
with `per_node` ranks uses the cards of all of them. Collectives over several nodes are rings within nodes and rings
between them (all-reduce, gather, scatter) or exchanges over both kinds of link at once (all-to-all).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from counterflow.framework.planning.cluster import Cluster
from counterflow.framework.planning.kernels import Efficiencies

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all_reduce", "all_gather", "reduce_scatter", "all2all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate. per_node: how many of them share a node. See Note [Groups]."""

    size: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.size / self.per_node)

    @staticmethod
    def strided(size: int, stride: int, gpus_per_node: int) -> Group:
        """`size` ranks, each `stride` behind the last; ranks are numbered node by node."""
        return Group(size=size, per_node=max(1, min(size, gpus_per_node // stride)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Seconds of an operation. measured: of the links within a node, as framework/planning/data/hardware has them."""

    cluster: Cluster
    share: Efficiencies
    measured: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def collective(self, operation: str, num_bytes: float, group: Group) -> float:
        """num_bytes: of the whole tensor: what a gather makes, a scatter takes, a rank exchanges."""
        if group.size == 1 or num_bytes <= 0:
            return 0.0
        if operation == ALL_TO_ALL:
            return self._exchange(num_bytes, group)
        rounds = 2 if operation == ALL_REDUCE else 1
        within, nodes = min(group.per_node, group.size), group.num_nodes
        if nodes == 1:
            return self._within(operation, num_bytes, group.size)
        # One ring through all: the slower of what a node's ranks pass on and of what its cards do.
        share = (group.size - 1) / group.size
        inter = self.inter_bytes_per_s * within
        rate = min(inter, self.intra_bytes_per_s) if within > 1 else inter
        latency = self.cluster.inter_latency_s * nodes + self.cluster.intra_latency_s * (within - 1)
        return rounds * (num_bytes * share / rate + latency)

    def p2p(self, num_bytes: float, *, same_node: bool) -> float:
        rate = self.intra_bytes_per_s if same_node else self.inter_bytes_per_s
        latency = self.cluster.intra_latency_s if same_node else self.cluster.inter_latency_s
        return num_bytes / rate + latency

    @property
    def intra_bytes_per_s(self) -> float:
        return self.cluster.intra_bytes_per_s * self.share.intra

    @property
    def inter_bytes_per_s(self) -> float:
        return self.cluster.inter_bytes_per_s * self.share.inter

    def _within(self, operation: str, num_bytes: float, size: int) -> float:
        rounds = 2 if operation == ALL_REDUCE else 1
        share = (size - 1) / size
        if (found := self.measured.get(operation)) is not None:
            fixed = found.get("fixed_latency_us_by_comm_num", {}).get(
                str(size), found.get("fixed_latency_us", 0.0)
            )
            latency = 1e-6 * (fixed + found["latency_us"] * (size - 1))
            rate = self.cluster.intra_bytes_per_s * found["efficient_factor"]
            return rounds * num_bytes * share / rate + latency
        return rounds * (
            num_bytes * share / self.intra_bytes_per_s + self.cluster.intra_latency_s * (size - 1)
        )

    def _exchange(self, num_bytes: float, group: Group) -> float:
        """An even all-to-all: what goes to ranks of the node, and at the same time what goes to others."""
        if group.num_nodes == 1:
            return self._within(ALL_TO_ALL, num_bytes, group.size)
        inside = num_bytes * (group.per_node - 1) / group.size / self.intra_bytes_per_s
        outside = num_bytes * (group.size - group.per_node) / group.size / self.inter_bytes_per_s
        return max(inside, outside) + self.cluster.inter_latency_s * math.log2(group.size)
