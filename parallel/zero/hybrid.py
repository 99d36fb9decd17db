"""Sums of gradients over replicas in groups: within the group first, then across the groups (unit.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from counterflow.parallel.collectives import Axis
from counterflow.parallel.compress.gradients import GradientReduction
from counterflow.parallel.compress.reduction import PendingReduction, PlainReduction, Steps
from counterflow.parallel.memory_parts import memory_of


class HybridReduction:
    """A `Reduction` that ends in this rank's piece: a reduce-scatter over `within`, then `across` on the shard.

    across: over the groups, compressed where the config says so; links between nodes are the slow ones.
    """

    def __init__(self, within: Axis, across: GradientReduction, *, dtype: torch.dtype) -> None:
        self._within, self._across = PlainReduction(within, dtype), across
        self._num_within = within.size

    def start(self, buffer: Tensor, out: Tensor | None) -> PendingReduction:
        """See `Reduction.start`. Group: those within, then across."""
        assert out is not None, "parameters are sharded"
        return PendingReduction(self._steps(buffer, out))

    def _steps(self, buffer: Tensor, out: Tensor) -> Steps:
        with memory_of("gradients"):
            shard = buffer.new_empty(buffer.numel() // self._num_within)
        within = yield from self._within.steps(buffer, shard)
        second = self._across.start(shard, out)
        yield second
        return within + second.wait()
