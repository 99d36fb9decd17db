"""What a schedule's file says of it: all that the rest of the project knows of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from counterflow.parallel.pipeline.analysis.costs import Costs
from counterflow.parallel.pipeline.config import ScheduleConfig
from counterflow.parallel.pipeline.ir.action import Kind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A schedule of compute actions. note: what a user should know of how it came about; empty: nothing."""

    schedule: Schedule
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualStages:
    """What a published formula is about: equal stages without communication.

    num_chunks: stages of a rank. forward, backward, weight_gradient, pair: the time of one action of a stage.
    """

    num_ranks: int
    num_microbatches: int
    num_chunks: int
    forward: float
    backward: float
    weight_gradient: float
    pair: float

    @property
    def busy(self) -> float:
        """The time that one stage works."""
        return self.num_microbatches * (self.forward + self.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A published formula of the bubble. of: from the sizes and times, the idle and the busy time of a rank."""

    text: str
    of: Callable[[EqualStages], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaBubble:
    """A published bubble formula's value: idle time per rank, and its share of idle and busy time together."""

    text: str
    idle: float
    fraction: float


def any_size(num_ranks: int, num_microbatches: int) -> None:
    """Every number of ranks and of micro-batches fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDefinition:
    """A schedule by name. Every module of this package that has a `SCHEDULE` adds one.

    title: for tables. summary: one line for the help and for the choice of the config. paper: its source; empty: none.
    alternates: whether a pipeline of one rank has one micro-batch under way at a time, each forward followed by its
        whole backward, as DeepSpeed's engine needs it.
    """

    name: str
    title: str
    summary: str
    paper: str = ""
    alternates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedSchedule(ScheduleDefinition):
    """A schedule that needs more than sizes. source: makes it from its config for a number of pipeline ranks."""

    source: Callable[[ScheduleConfig, int], Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSchedule(ScheduleDefinition):
    """A schedule that is a pure function of sizes.

    generate: (num_ranks, num_microbatches) -> Schedule, for sizes that `validate` accepts; where `any_chunks`, the
        number of chunks comes third.
    validate: (num_ranks, num_microbatches) -> None; raises ValueError where the schedule does not fit them.
    num_chunks: stages that a rank holds for micro-batches of one direction, unless asked otherwise.
    any_chunks: whether it may be asked otherwise.
    mirrored: whether a stage has copies on the ranks r and p-1-r.
    has_pairs: whether it has overlapped pairs of a forward and a backward, or gets some where they hide something.
    formula: of its bubble; None: none is published.
    torch_name: the class of torch.distributed.pipelining that runs a schedule of the same shape; None: there is none.
    """

    generate: Callable[..., Schedule]
    validate: Callable[[int, int], None] = any_size
    num_chunks: int = 1
    any_chunks: bool = False
    mirrored: bool = False
    has_pairs: bool = False
    formula: Formula | None = None
    torch_name: str | None = None

    def bubble(
        self, num_ranks: int, num_microbatches: int, costs: Costs, *, num_chunks: int | None = None
    ) -> FormulaBubble | None:
        """The value of the published formula; None where there is none. num_chunks: stages of a rank.

        It is exact for equal stages without communication in the balanced case only: print it beside a simulated value,
        never instead of it. Costs that differ between stages enter by their mean.
        """
        if self.formula is None:
            return None
        forward, backward, weight_gradient = (costs.mean_of_kind(kind) for kind in (Kind.F, Kind.B, Kind.W))
        idle, busy = self.formula.of(
            EqualStages(
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                num_chunks=self.num_chunks if num_chunks is None else num_chunks,
                forward=forward,
                backward=backward,
                weight_gradient=weight_gradient,
                pair=costs.of_pair(forward, backward),
            )
        )
        return FormulaBubble(text=self.formula.text, idle=idle, fraction=idle / (idle + busy))
