"""The shortest makespan of a one-copy pipeline under a memory bound, by exhaustion with dominance.

Written apart from the search and the dependency table. Micro-batches are alike, so those of a kind and stage run in
order. A state is how many F, I and W of each stage are placed; of all ways to get there only those are kept that no
other is as early as in every respect (each rank's free time, each arrival still to be used).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

Counts = tuple[tuple[int, int, int], ...]  # by stage: F, I and W placed
Times = tuple[tuple[float, ...], tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]


def shortest_makespan(
    placement: tuple[int, ...],
    num_microbatches: int,
    costs: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]],
    *,
    latency: float,
    limit: int,
    joint_limit: int,
    upper: float,
) -> float:
    """The optimum, or `upper` where nothing is shorter. costs: F, I and W by stage."""
    num_stages, num_ranks = len(placement), max(placement) + 1
    forward, backward, weight = costs

    def delay(stage: int, other: int) -> float:
        return latency if placement[stage] != placement[other] else 0.0

    def remaining(counts: Counts, rank: int) -> float:
        return sum(
            (num_microbatches - placed) * cost[stage]
            for stage in range(num_stages)
            if placement[stage] == rank
            for placed, cost in zip(counts[stage], costs, strict=True)
        )

    def steps(counts: Counts, times: Times) -> Iterator[tuple[Counts, Times]]:
        free, forwards, backwards = times
        for stage in range(num_stages):
            rank = placement[stage]
            mine = [counts[s] for s in range(num_stages) if placement[s] == rank]
            live = sum(f - i for f, i, _ in mine)
            held = sum(i - w for _, i, w in mine)
            f, i, w = counts[stage]
            for kind, ready, cost in (
                (0, forwards[stage][:1], forward[stage]),
                (1, backwards[stage][:1], backward[stage]),
                (2, (0.0,) if w < i else (), weight[stage]),
            ):
                if not ready or (kind == 0 and (live >= limit or live + held >= joint_limit)):
                    continue
                end = max(free[rank], ready[0]) + cost
                new_free = (*free[:rank], end, *free[rank + 1 :])
                new_forwards, new_backwards = list(forwards), list(backwards)
                if kind == 0:
                    new_forwards[stage] = forwards[stage][1:]
                    if stage + 1 < num_stages:
                        new_forwards[stage + 1] = (*new_forwards[stage + 1], end + delay(stage, stage + 1))
                    else:
                        new_backwards[stage] = (*new_backwards[stage], end)
                elif kind == 1:
                    new_backwards[stage] = backwards[stage][1:]
                    if stage > 0:
                        new_backwards[stage - 1] = (*new_backwards[stage - 1], end + delay(stage, stage - 1))
                placed = (f + (kind == 0), i + (kind == 1), w + (kind == 2))
                yield (
                    (*counts[:stage], placed, *counts[stage + 1 :]),
                    (new_free, tuple(new_forwards), tuple(new_backwards)),
                )

    start: Times = (
        (0.0,) * num_ranks,
        ((0.0,) * num_microbatches, *[()] * (num_stages - 1)),
        ((),) * num_stages,
    )
    layer: dict[Counts, list[Times]] = {((0, 0, 0),) * num_stages: [start]}
    for _ in range(3 * num_stages * num_microbatches):
        following: dict[Counts, dict[tuple[float, ...], Times]] = defaultdict(dict)
        for counts, ways in layer.items():
            for times in ways:
                for new_counts, new_times in steps(counts, times):
                    if any(
                        new_times[0][rank] + remaining(new_counts, rank) >= upper - 1e-9
                        for rank in range(num_ranks)
                    ):
                        continue
                    following[new_counts][_flat(new_times)] = new_times
        layer = {counts: _undominated(ways) for counts, ways in following.items()}
    return min((max(times[0]) for ways in layer.values() for times in ways), default=upper)


def _flat(times: Times) -> tuple[float, ...]:
    free, forwards, backwards = times
    return (*free, *(t for of in forwards for t in of), *(t for of in backwards for t in of))


def _undominated(ways: dict[tuple[float, ...], Times]) -> list[Times]:
    kept: list[tuple[float, ...]] = []
    for flat in sorted(ways, key=lambda flat: (sum(flat), flat)):
        if not any(all(a <= b for a, b in zip(other, flat, strict=True)) for other in kept):
            kept.append(flat)
    return [ways[flat] for flat in kept]
