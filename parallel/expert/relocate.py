"""Moving experts between ranks: which elements of a flat stack of experts go from where to where. Pure.

A parameter of experts is a stack [slots, out, in], flat in memory. Each rank holds a range of its own stack: all of
it, or under ZeRO the shard that it updates. So the parts of one expert may come from and go to several ranks, and
several ranks may hold the same part; then one that exchanges tokens with the receiver sends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from counterflow.parallel.expert.copies import places_of
from counterflow.parallel.expert.placement import ExpertsByRank


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a rank holds of its flat stack: elements [start, stop). ep_rank: its place on the expert axis.

    axis: which expert axis it is on; ranks of one exchange tokens.
    """

    ep_rank: int
    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`length` elements from `source_start` of the stack on rank `source` to `target_start` of that on `target`."""

    source: int
    target: int
    source_start: int
    target_start: int
    length: int


def plan_moves(
    before: ExpertsByRank, after: ExpertsByRank, holdings: Mapping[int, Holding], expert_numel: int
) -> list[Move]:
    """The moves from one placement of a layer to another, in one order whoever asks; those within a rank included.

    holdings: by global rank, of every rank of the stage. expert_numel: elements of one expert.
    """
    places = places_of(before)
    ranks_of: dict[int, list[int]] = {}
    for rank in sorted(holdings):
        ranks_of.setdefault(holdings[rank].ep_rank, []).append(rank)
    moves: list[Move] = []
    for ep_rank, experts in enumerate(after):
        for slot, expert in enumerate(experts):
            if before[ep_rank][slot] == expert:
                continue
            # The nearest copy, which is likely on the same node.
            source_ep_rank, source_slot = min(places[expert], key=lambda place: abs(place[0] - ep_rank))
            for target in ranks_of[ep_rank]:
                near = sorted(
                    ranks_of[source_ep_rank],
                    key=lambda rank: (holdings[rank].axis != holdings[target].axis, rank),
                )
                moves += _cover(
                    target,
                    slot * expert_numel,
                    {rank: holdings[rank] for rank in near},
                    source_slot * expert_numel,
                    holdings[target],
                    expert_numel,
                )
    return moves


def _cover(
    target: int,
    target_base: int,
    sources: Mapping[int, Holding],
    source_base: int,
    held: Holding,
    expert_numel: int,
) -> Iterator[Move]:
    """Moves that bring one expert's part of what `target` holds, each element from the first source that has it."""
    wanted = [_within(held, target_base, expert_numel)]
    for source, holding in sources.items():
        has_start, has_stop = _within(holding, source_base, expert_numel)
        rest: list[tuple[int, int]] = []
        for start, stop in wanted:
            first, last = max(start, has_start), min(stop, has_stop)
            if first >= last:
                rest.append((start, stop))
                continue
            yield Move(
                source=source,
                target=target,
                source_start=source_base + first,
                target_start=target_base + first,
                length=last - first,
            )
            rest += [(start, first), (last, stop)]
        wanted = [(start, stop) for start, stop in rest if start < stop]
    assert not any(start < stop for start, stop in wanted), "a part of an expert is nowhere"


def _within(holding: Holding, base: int, length: int) -> tuple[int, int]:
    """The part of a holding within [base, base + length), counted from `base`; empty where stop <= start."""
    return max(holding.start - base, 0), min(holding.stop - base, length)
