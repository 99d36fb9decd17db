"""Which experts each rank holds, from recorded loads: hierarchical packing, replicas of hot experts. Pure functions.

Note [Method]
The idea is that of DeepSeek's expert-parallel load balancer (DeepSeek-V3, arXiv 2412.19437, section 3.4; EPLB): groups
of experts are packed to nodes, so that node-limited routing stays node-limited; within a node the spare slots go
one by one to the expert whose copies are the most loaded, which makes the largest load of a copy as small as it can
be; and the copies are packed to ranks, the largest first, each to the least loaded rank with room. What is packed
is then improved by exchanges between the most loaded bin and another. Where an expert has copies, its tokens are
taken to be shared evenly among them.

Nodes have equally many groups there. A node with a very hot group is then overloaded by the others that come with it,
so where spare slots allow it nodes may hold unequal numbers: those with less to do take more groups and have the fewer
copies. What no placement can help is a group with more load than the mean of a node: as long as groups stay on one
node, the imbalance is at least that load over the mean.

Loads are per layer and expert, in any unit; a slot holds one expert of a layer. Every layer is placed by itself.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# For each rank the global indices of the experts in its slots, in order; a replica is an index that comes again.
ExpertsByRank = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Where experts can be placed.

    num_ranks: of the expert axis, in order by node. num_slots: experts of a layer that a rank has room for; more
    than num_experts / num_ranks leaves room for replicas. num_groups: equal blocks of experts of which a token
    chooses some; where num_nodes divides them each stays on one node, else nodes count for nothing.

    Raises ValueError: where the sizes do not fit each other.
    """

    num_experts: int
    num_ranks: int
    num_slots: int
    num_nodes: int = 1
    num_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_ranks", "num_slots", "num_nodes", "num_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_ranks % self.num_nodes:
            raise ValueError(
                f"num_nodes={self.num_nodes}: must divide num_ranks={self.num_ranks}; nodes hold equally many ranks"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups}: must divide num_experts={self.num_experts}; groups are equal blocks"
            )
        if self.num_ranks * self.num_slots < self.num_experts:
            raise ValueError(
                f"num_slots={self.num_slots}: {self.num_ranks} ranks have {self.num_ranks * self.num_slots} slots for "
                f"{self.num_experts} experts; set num_slots to {-(-self.num_experts // self.num_ranks)} or more"
            )

    @property
    def bound_nodes(self) -> int:
        """Nodes that groups are bound to; 1 where they are not."""
        return self.num_nodes if self.num_groups % self.num_nodes == 0 else 1


def place_experts(loads: Sequence[Sequence[float]], layout: ExpertLayout) -> tuple[ExpertsByRank, ...]:
    """The placement of each layer, from its loads [layers, num_experts]; every slot is filled.

    Raises ValueError: where a layer has another number of loads.
    """
    return tuple(_place_layer(layer, layout) for layer in loads)


def _place_layer(loads: Sequence[float], layout: ExpertLayout) -> ExpertsByRank:
    _check_loads(loads, layout.num_experts)
    nodes = layout.bound_nodes
    equal = layout.num_groups // nodes
    slots_per_node = layout.num_ranks // nodes * layout.num_slots
    room = min(slots_per_node * layout.num_groups // layout.num_experts, layout.num_groups - nodes + 1)
    candidates = (_place_groups(loads, layout, most) for most in range(equal, max(equal, room) + 1))
    placed = [candidate for candidate in candidates if candidate is not None]
    return min(placed, key=lambda candidate: imbalance(loads, candidate))


def _place_groups(loads: Sequence[float], layout: ExpertLayout, most: int) -> ExpertsByRank | None:
    """The placement with at most so many groups on a node; None where a node then has none."""
    nodes = layout.bound_nodes
    ranks_per_node = layout.num_ranks // nodes
    group_size = layout.num_experts // layout.num_groups
    groups = [range(first, first + group_size) for first in range(0, layout.num_experts, group_size)]
    # Groups without experts take the places that are left.
    groups += [range(0)] * (most * nodes - layout.num_groups)
    placed: list[tuple[int, ...]] = []
    for members in pack([sum(loads[expert] for expert in group) for group in groups], nodes):
        if not any(groups[member] for member in members):
            return None
        experts = sorted(expert for member in members for expert in groups[member])
        counts = replicate(
            [loads[expert] for expert in experts],
            ranks_per_node * layout.num_slots,
            most=ranks_per_node,
        )
        copies = [expert for expert, count in zip(experts, counts, strict=True) for _ in range(count)]
        shares = [
            loads[expert] / count for expert, count in zip(experts, counts, strict=True) for _ in range(count)
        ]
        bins = pack(shares, ranks_per_node, kinds=copies)
        placed += [tuple(sorted(copies[item] for item in items)) for items in bins]
    return tuple(placed)


def replicate(loads: Sequence[float], num_copies: int, *, most: int | None = None) -> list[int]:
    """How many copies each expert gets of `num_copies` in all, so that the most loaded copy has as little as can be.

    most: copies of one expert that are of use (a second one on the same rank is of none); exceeded where there
    are more slots than that gives.
    """
    counts = [1] * len(loads)
    # The greedy choice is optimal: a copy more for any other expert leaves the largest share as it is.
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    full: list[int] = []
    for _ in range(num_copies - len(loads)):
        while heap and most is not None and counts[heap[0][1]] >= most:
            full.append(heapq.heappop(heap)[1])
        if not heap:
            heap, most = [(-loads[expert] / counts[expert], expert) for expert in full], None
            heapq.heapify(heap)
        _, expert = heapq.heappop(heap)
        counts[expert] += 1
        heapq.heappush(heap, (-loads[expert] / counts[expert], expert))
    return counts


def pack(weights: Sequence[float], num_bins: int, *, kinds: Sequence[int] | None = None) -> list[list[int]]:
    """Indices of `weights` in `num_bins` bins of equally many, the largest sum kept small.

    kinds: items of one kind are kept out of each other's bin where they can be; None: each is of its own.
    """
    kinds = range(len(weights)) if kinds is None else kinds
    assert len(weights) % num_bins == 0
    room = len(weights) // num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    sums = [0.0] * num_bins
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        target = min(
            (index for index in range(num_bins) if len(bins[index]) < room),
            key=lambda index: (
                any(kinds[other] == kinds[item] for other in bins[index]),
                sums[index],
                index,
            ),
        )
        bins[target].append(item)
        sums[target] += weights[item]
    exchange(bins, weights, kinds)
    return bins


def exchange(
    bins: list[list[int]],
    weights: Sequence[float],
    kinds: Sequence[int] | None = None,
    *,
    goal: float = 0.0,
    most: int | None = None,
) -> None:
    """Swap items of the heaviest bin with lighter ones of another, in place, while that lowers the largest sum.

    It ends when the largest sum is at most `goal`, or after `most` swaps.
    """
    kinds = range(len(weights)) if kinds is None else kinds
    sums = [sum(weights[item] for item in items) for items in bins]
    for items in bins:
        items.sort(key=lambda item: weights[item])
    # Every swap lowers the heavier of two bins; the limit only guards against steps as small as rounding.
    for _ in range(4 * len(weights) if most is None else most):
        heavy = max(range(len(bins)), key=lambda index: (sums[index], -index))
        if sums[heavy] <= goal:
            return
        best = (sums[heavy] * (1 - 1e-12), 0, 0, 0)
        for other in range(len(bins)):
            gap = sums[heavy] - sums[other]
            if gap <= 0:
                continue
            lighter = [weights[item] for item in bins[other]]
            for position, item in enumerate(bins[heavy]):
                # The sums become equal where the two differ by half of the gap.
                middle = bisect_left(lighter, weights[item] - gap / 2)
                for place in (middle - 1, middle):
                    if not 0 <= place < len(lighter):
                        continue
                    moved = weights[item] - lighter[place]
                    larger = max(sums[heavy] - moved, sums[other] + moved)
                    if larger < best[0] and not _would_meet(kinds, bins, (heavy, position), (other, place)):
                        best = (larger, position, other, place)
        _, position, other, place = best
        if best[0] >= sums[heavy] * (1 - 1e-12):
            return
        bins[heavy][position], bins[other][place] = bins[other][place], bins[heavy][position]
        for index in (heavy, other):
            bins[index].sort(key=lambda item: weights[item])
            sums[index] = sum(weights[item] for item in bins[index])


def _would_meet(
    kinds: Sequence[int], bins: list[list[int]], first: tuple[int, int], second: tuple[int, int]
) -> bool:
    """Whether a swap brings an item to another of its kind."""
    for (source, position), (target, place) in ((first, second), (second, first)):
        kind = kinds[bins[source][position]]
        if any(kinds[item] == kind for index, item in enumerate(bins[target]) if index != place):
            return True
    return False


def improve(
    loads: Sequence[float],
    experts_by_rank: ExpertsByRank,
    *,
    num_nodes: int = 1,
    goal: float = 1.0,
    most_swaps: int | None = None,
) -> ExpertsByRank:
    """A better placement of a layer without replicas by few swaps of experts between ranks of the same node.

    goal: imbalance at which a node is left as it is. most_swaps: in a node. Experts that stay keep their slots.
    """
    per_node = len(experts_by_rank) // num_nodes
    placed: list[tuple[int, ...]] = []
    for node in range(num_nodes):
        bins = [list(experts) for experts in experts_by_rank[node * per_node : (node + 1) * per_node]]
        mean = sum(loads[expert] for experts in bins for expert in experts) / per_node
        exchange(bins, loads, goal=goal * mean, most=most_swaps)
        placed += map(tuple, bins)
    return aligned(placed, experts_by_rank, num_nodes=len(experts_by_rank))


def aligned(
    placed: Sequence[Sequence[int]], before: Sequence[Sequence[int]], *, num_nodes: int = 1
) -> ExpertsByRank:
    """`placed` with ranks of a node, and whole nodes, renamed so that many experts stay where they were `before`.

    Loads of ranks are but renamed. An expert that stays on its rank keeps its slot. num_nodes: equal to the number
    of ranks, ranks keep their names.
    """
    per_node = len(placed) // num_nodes
    nodes = [list(range(node * per_node, (node + 1) * per_node)) for node in range(num_nodes)]
    if per_node > 1:
        held = [[expert for rank in ranks for expert in placed[rank]] for ranks in nodes]
        held_before = [[expert for rank in ranks for expert in before[rank]] for ranks in nodes]
        nodes = [nodes[source] for source in _matched(held, held_before)]
    result: list[tuple[int, ...]] = []
    for node, ranks in enumerate(nodes):
        old = before[node * per_node : (node + 1) * per_node]
        new = [placed[rank] for rank in ranks]
        order = _matched(new, old) if per_node > 1 else [0]
        result += [_in_slots(new[source], old[target]) for target, source in enumerate(order)]
    return tuple(result)


def _matched(new: Sequence[Sequence[int]], old: Sequence[Sequence[int]]) -> list[int]:
    """For each of `old` the index of one of `new`, each once, those with most in common first."""
    counted, counted_old = [Counter(each) for each in new], [Counter(each) for each in old]
    pairs = sorted(
        (-(counted[source] & counted_old[target]).total(), source != target, target, source)
        for source in range(len(new))
        for target in range(len(old))
    )
    found: dict[int, int] = {}
    taken: set[int] = set()
    for _, _, target, source in pairs:
        if target not in found and source not in taken:
            found[target] = source
            taken.add(source)
    return [found[target] for target in range(len(old))]


def _in_slots(experts: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """`experts` in an order in which those that were there before are in their old slots."""
    coming = Counter(experts)
    slots: list[int | None] = [None] * len(experts)
    for slot, expert in enumerate(before[: len(experts)]):
        if coming[expert] > 0:
            slots[slot] = expert
            coming[expert] -= 1
    rest = iter(sorted(coming.elements()))
    return tuple(next(rest) if expert is None else expert for expert in slots)


def rank_loads(loads: Sequence[float], experts_by_rank: ExpertsByRank) -> list[float]:
    """The load of each rank in a layer, copies of an expert sharing its load evenly."""
    copies = Counter(expert for experts in experts_by_rank for expert in experts)
    return [sum(loads[expert] / copies[expert] for expert in experts) for experts in experts_by_rank]


def imbalance(loads: Sequence[float], experts_by_rank: ExpertsByRank) -> float:
    """The largest load of a rank in a layer over the mean: 1 is even. Without any load it is 1."""
    by_rank = rank_loads(loads, experts_by_rank)
    total = sum(by_rank)
    return max(by_rank) * len(by_rank) / total if total > 0 else 1.0


def _check_loads(loads: Sequence[float], num_experts: int) -> None:
    if len(loads) != num_experts or any(not load >= 0 for load in loads):
        raise ValueError(
            f"a layer has {len(loads)} loads, the smallest {min(loads, default=0)}: there must be one for each of "
            f"{num_experts} experts, none of them negative or NaN"
        )
