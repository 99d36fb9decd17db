"""The rank that keeps the others waiting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Slowest(NamedTuple):
    """A rank and its busy time. over_peers: over the median of the ranks that do the same work; None: it is alone."""

    rank: int
    busy_s: float
    over_peers: float | None


def slowest(busy_s: Sequence[float], same_work: Sequence[Sequence[int]]) -> Slowest:
    """Of ranks with `busy_s`, the one that took longest beside its peers; where none has any, beside all.

    same_work: sets of ranks that do the same work (those of one pipeline rank); every rank is in one.
    """
    found: Slowest | None = None
    for ranks in same_work:
        median = statistics.median(busy_s[rank] for rank in ranks)
        for rank in ranks if len(ranks) > 1 and median > 0 else ():
            over = busy_s[rank] / median
            if found is None or found.over_peers is None or over > found.over_peers:
                found = Slowest(rank, busy_s[rank], over)
    if found is not None:
        return found
    rank = max(range(len(busy_s)), key=lambda each: busy_s[each])
    return Slowest(rank, busy_s[rank], None)
