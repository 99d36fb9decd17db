"""How many bytes a schedule sends: over each link of the pipeline, and over the data axis.

The counts are payloads of one step and one pipeline, by the convention of
`counterflow.parallel.collectives.ByteMeter`, which counts the same while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from counterflow.parallel.pipeline.analysis.costs import Costs
from counterflow.parallel.pipeline.analysis.passes import passes_after
from counterflow.parallel.pipeline.ir.action import Kind, Schedule
from counterflow.parallel.pipeline.ir.arrays import Products
from counterflow.parallel.pipeline.ir.dependencies import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkVolume:
    """From pipeline rank `source` to `target`: activations go forward, their gradients backward."""

    source: int
    target: int
    num_messages: int
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataVolume:
    """What one rank of each pipeline stage group sends over the data axis (and the mirror); one entry per rank.

    unshard_bytes: gathered parameters, those after an optimizer step (ZeRO-1 and 2) too. reduce_bytes: gradients.
    """

    unshard_bytes: tuple[float, ...]
    reduce_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """What a step sends. data: None where the size of the parameters is not known."""

    links: tuple[LinkVolume, ...]
    data: DataVolume | None = None

    @property
    def forward_bytes(self) -> float:
        return sum(link.forward_bytes for link in self.links)

    @property
    def backward_bytes(self) -> float:
        return sum(link.backward_bytes for link in self.links)

    @property
    def by_axis(self) -> dict[str, float]:
        """Over all pipeline ranks; `data` only where it is known."""
        axes = {"pipeline": self.forward_bytes + self.backward_bytes}
        if self.data is not None:
            axes["data"] = sum(self.data.unshard_bytes) + sum(self.data.reduce_bytes)
        return axes


def pipeline_volume(schedule: Schedule, costs: Costs) -> tuple[LinkVolume, ...]:
    """Bytes of every link that `schedule` sends over, by its ranks; `costs` say how large a message is."""
    products = Products(schedule)
    sent = np.flatnonzero(products.receiver >= 0)
    sizes = np.array([costs.bytes_at(boundary) for boundary in range(schedule.num_stages - 1)] or [0.0])
    size = sizes[products.boundary[sent]]
    is_forward = sent // (products.count // len(Value)) == Value.ACTIVATION
    pairs, index = np.unique(
        products.holder[sent] * schedule.num_ranks + products.receiver[sent], return_inverse=True
    )
    forward = np.bincount(index, size * is_forward, minlength=len(pairs)).tolist()
    backward = np.bincount(index, size * ~is_forward, minlength=len(pairs)).tolist()
    counts = np.bincount(index, minlength=len(pairs)).tolist()
    return tuple(
        LinkVolume(
            source=pair // schedule.num_ranks,
            target=pair % schedule.num_ranks,
            num_messages=counts[number],
            forward_bytes=forward[number],
            backward_bytes=backward[number],
        )
        for number, pair in enumerate(pairs.tolist())
    )


def data_volume(
    executable: Schedule,
    *,
    parameter_bytes: Sequence[float],
    gradient_bytes: Sequence[float],
    data_parallel_size: int,
    zero_stage: int,
    gathered_bytes: Callable[[int, int, Sequence[Kind]], float] | None = None,
) -> DataVolume:
    """What the gathers and reductions of `executable` (a lowered schedule) send.

    parameter_bytes, gradient_bytes: of each whole stage on one tensor-parallel rank, as they are gathered and reduced.
    gathered_bytes: by a rank of a stage from an UNSHARD to its RESHARD, by what reads it in between; None: all of it,
    once.
    """
    unshard = [0.0] * executable.num_ranks
    reduce = [0.0] * executable.num_ranks
    for rank, actions in enumerate(executable.actions):
        passes = passes_after(actions)
        for index, action in enumerate(actions):
            if action.kind is not Kind.UNSHARD and action.kind is not Kind.REDUCE_GRAD:
                continue
            size = data_parallel_size * len(executable.replicas_of(action.stage))
            share = (size - 1) / size
            if action.kind is Kind.UNSHARD:
                whole = parameter_bytes[action.stage]
                if gathered_bytes is not None:
                    whole = gathered_bytes(rank, action.stage, passes[index])
                unshard[rank] += share * whole
                continue
            # An all-reduce is a reduce-scatter and an all-gather.
            reduce[rank] += share * gradient_bytes[action.stage] * (2 if zero_stage == 0 else 1)
            if zero_stage in (1, 2):
                unshard[rank] += share * parameter_bytes[action.stage]
    return DataVolume(unshard_bytes=tuple(unshard), reduce_bytes=tuple(reduce))
