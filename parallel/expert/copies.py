"""Experts in several places: which copy a token goes to, and which slots are copies of one expert. Pure functions.

Note [Which copy]
A rank that has a copy of an expert keeps its tokens for it, so none of them is sent. The others send theirs to the
copies in turn, by the position among the rank's tokens for that expert, and to copies on their own node first. How
often each comes up is fixed beforehand so that all copies of an expert get equally many turns, if every rank sends
equally many tokens: that is as even as can be told without asking the other ranks. Nothing is remembered between
micro-batches, so that a forward which is run again sends every token to the same copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterflow.parallel.expert.placement import ExpertsByRank

# A rank of the expert axis and a slot there.
Place = tuple[int, int]


def places_of(experts_by_rank: ExpertsByRank) -> dict[int, tuple[Place, ...]]:
    """Where each expert is, in order by rank and slot."""
    found: dict[int, tuple[Place, ...]] = {}
    for rank, experts in enumerate(experts_by_rank):
        for slot, expert in enumerate(experts):
            found[expert] = (*found.get(expert, ()), (rank, slot))
    return found


def has_copies(experts_by_rank: ExpertsByRank) -> bool:
    """Whether any expert is in more than one slot."""
    held = [expert for experts in experts_by_rank for expert in experts]
    return len(set(held)) < len(held)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCopies:
    """A stack of experts, one in each slot of `rank`, of which some are in other slots as well.

    is_first: for each slot whether it is the first place of its expert: the one that is saved and counted.
    shared: the places of every expert that is here and in another slot too, in order of the experts.
    """

    rank: int
    is_first: tuple[bool, ...]
    shared: tuple[tuple[Place, ...], ...]


def copies_on(experts_by_rank: ExpertsByRank, rank: int) -> ExpertCopies:
    """What the stacks of `rank` have in common with those of others."""
    places, here = places_of(experts_by_rank), experts_by_rank[rank]
    return ExpertCopies(
        rank=rank,
        is_first=tuple(places[expert][0] == (rank, slot) for slot, expert in enumerate(here)),
        shared=tuple(places[expert] for expert in sorted(set(here)) if len(places[expert]) > 1),
    )


def turns(
    places: Sequence[Place], *, num_ranks: int, num_nodes: int = 1, start: int = 0
) -> list[tuple[Place, ...]]:
    """For each rank the places that its tokens for an expert go to in turn (Note [Which copy]).

    places: the expert's. num_nodes: neighbouring ranks, equally many each, are a node. start: shifts which copy comes
    first, so that experts do not all begin alike.

    Over all ranks together every place comes up equally often, and each rank has as many turns as there are places.
    """
    count, per_node = len(places), num_ranks // num_nodes
    if count == 1:
        return [(places[0],)] * num_ranks
    left = [num_ranks] * count
    found: list[list[int]] = [[] for _ in range(num_ranks)]
    had = [[0] * count for _ in range(num_ranks)]

    def take(rank: int, reach: int) -> bool:
        """Give `rank` a turn with a copy whose rank is in the same block of `reach` ranks, if there is one."""
        if len(found[rank]) == count:
            return False
        near = [
            index
            for index, (holder, _) in enumerate(places)
            if left[index] and holder // reach == rank // reach
        ]
        if not near:
            return False
        # Those it had least, then those that most turns are left of; the rest lets ranks begin with different ones.
        chosen = min(near, key=lambda index: (had[rank][index], -left[index], (index - rank - start) % count))
        left[chosen] -= 1
        had[rank][chosen] += 1
        found[rank].append(chosen)
        return True

    for reach in (1, per_node, num_ranks):
        # One turn each at a time, so that no rank takes all that is near before another gets any.
        while any([take(rank, reach) for rank in range(num_ranks)]):
            pass
    return [tuple(places[index] for index in taken) for taken in found]
