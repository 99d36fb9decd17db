"""A pipeline schedule as data: `Action`, `Schedule`, their text form and the rank-by-step grid.

One representation serves generation, verification, simulation, drawing, export and execution. The text of
an action (`3F12`, `0I4`, `(3F12;4B7)OVERLAP_F_B`, `1SEND_F0`, `0UNSHARD`) is the one that
torch.distributed.pipelining reads and writes, so schedules move both ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Kind(StrEnum):
    """What an action does; the value is its text."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's name for the input gradient
    W = "W"
    OVERLAP_F_B = "OVERLAP_F_B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
# Actions on a whole stage: they carry no micro-batch.
STAGE_WIDE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})

_SIMPLE = re.compile(
    r"(?P<stage>\d+)(?P<kind>SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|OFFLOAD|RELOAD|F|B|I|W)"
    r"(?P<microbatch>\d*)"
)
_PAIR = re.compile(r"\((?P<first>[^;()]+);(?P<second>[^;()]+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    `stage` is the pipeline stage, `microbatch` its global index over both directions (None for stage-wide
    kinds). An overlapped pair carries its forward and its backward in `parts`, and its own stage and
    micro-batch are those of the forward.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    __repr__ = __str__

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The action itself, or the two halves of a pair."""
        return self.parts or (self,)

    @staticmethod
    def pair(forward: Action, backward: Action) -> Action:
        """`forward` and `backward` run together, each free to hide the other's communication."""
        return Action(forward.stage, Kind.OVERLAP_F_B, forward.microbatch, (forward, backward))

    @staticmethod
    def parse(text: str) -> Action:
        """The inverse of `str(action)`.

        Raises ValueError: naming the text, where it is not an action.
        """
        text = text.strip()
        if match := _PAIR.fullmatch(text):
            return Action.pair(Action.parse(match["first"]), Action.parse(match["second"]))
        match = _SIMPLE.fullmatch(text)
        if match is None:
            raise ValueError(
                f"'{text}' is not a pipeline action: expected STAGE KIND MICROBATCH such as 3F12, 0I4, 1SEND_F0 "
                "or a pair (3F12;4B7)OVERLAP_F_B"
            )
        kind = Kind(match["kind"])
        if (kind in STAGE_WIDE) != (match["microbatch"] == ""):
            rule = "takes no micro-batch" if kind in STAGE_WIDE else "needs a micro-batch"
            raise ValueError(f"'{text}' is not a pipeline action: {kind.value} {rule}")
        microbatch = int(match["microbatch"]) if match["microbatch"] else None
        return Action(int(match["stage"]), kind, microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What every rank does, in order, and where every stage lives.

    `actions[rank]` is that rank's list. `placement[direction][stage]` is the rank that holds this stage for
    micro-batches of this direction; one-copy schedules have one direction. Micro-batches are numbered over
    both directions: direction 0 has the first half. pairs_chunks: whether a backward and the forward after it may
    become an overlapped pair, for what a rank sends to hide under it.
    """

    name: str
    num_stages: int
    num_microbatches: int
    placement: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]
    pairs_chunks: bool = field(default=False, compare=False)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_directions(self) -> int:
        return len(self.placement)

    def direction_of(self, microbatch: int) -> int:
        """The direction in which `microbatch` runs: contiguous, equal shares."""
        return microbatch * self.num_directions // self.num_microbatches

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that runs `stage` for `microbatch`."""
        return self.placement[self.direction_of(microbatch)][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages held by `rank`, in the order of their directions, then of their index."""
        return tuple(
            stage for ranks in self.placement for stage, holder in enumerate(ranks) if holder == rank
        )

    def replicas_of(self, stage: int) -> tuple[int, ...]:
        """Every rank that holds a copy of `stage`, ascending: one rank, or a mirror pair."""
        return tuple(sorted({ranks[stage] for ranks in self.placement}))

    def with_actions(self, actions: Iterable[Sequence[Action]]) -> Schedule:
        """The same schedule with other action lists; what a pass returns."""
        return replace(self, actions=tuple(tuple(rank_actions) for rank_actions in actions))
