"""Simulate a schedule: when every action runs, what each rank waits, how much it holds.

Only compute actions take time; values that cross ranks travel over links with latency and bandwidth. The order
comes from the dependency table that the passes and the verifier read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from counterflow.parallel.pipeline.analysis.copy_timing import Copy, CopyModel, RankCopies
from counterflow.parallel.pipeline.analysis.costs import Costs, costs_from
from counterflow.parallel.pipeline.ir.action import COMPUTE, Action, Schedule
from counterflow.parallel.pipeline.ir.arrays import CODES, KINDS, Ints, Leaves, Products, leaves_of, peaks
from counterflow.parallel.pipeline.ir.dependencies import RULES, ScheduleError

__all__ = [
    "Costs",
    "Interval",
    "Simulation",
    "Work",
    "costs_from",
    "peak_live",
    "simulate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An action on a rank from `start` to `end`, simulated or measured."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a simulated step shows; tuples have one entry per rank.

    actions, starts, ends: every compute action in order, and when it starts and ends.
    busy, idle: time in actions, and the rest of the makespan.
    span: from the start of a rank's first action to the end of its last.
    peak_activations: most micro-batches whose forward has run and whose I or B has not ended.
    peak_held_weight_gradients: most micro-batches whose I has run and whose W has not ended.
    copies, stall, peak_bytes: of a schedule whose activations are offloaded, every OFFLOAD and RELOAD, the time that
    compute actions waited for them, and the most bytes that were there at once; empty for others.
    """

    actions: tuple[tuple[Action, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    span: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_held_weight_gradients: tuple[int, ...]
    copies: tuple[tuple[Copy, ...], ...] = ()
    stall: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """Every compute action, rank by rank, in order; made anew at each call."""
        return tuple(
            Interval(rank=rank, action=action, start=start, end=end)
            for rank, of_rank in enumerate(zip(self.actions, self.starts, self.ends, strict=True))
            for action, start, end in zip(*of_rank, strict=True)
        )

    @property
    def idle(self) -> tuple[float, ...]:
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_makespan(self) -> float:
        """Idle share of the ranks' time from the first action anywhere to the last anywhere."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def bubble_span(self) -> float:
        """1 - mean busy time / longest span of a rank.

        The figure of the zero-bubble papers (Qi et al., arXiv 2401.10241, section 5: the cost of a schedule is
        the longest execution time of a stage). It leaves out the time a rank waits for its first and after its
        last action, which the neighbouring steps may fill where the optimizer does not synchronise.
        """
        return 1 - sum(self.busy) / (len(self.busy) * max(self.span))


def simulate(schedule: Schedule, costs: Costs, copies: CopyModel | None = None) -> Simulation:
    """Run `schedule`, in compute form or with any added actions, against `costs`.

    Each rank starts an action once its previous one has ended and everything it needs has arrived. Linear in
    the number of actions. copies: where `schedule` offloads activations; None: that takes no time.

    Raises ScheduleError: the ranks wait for each other. ValueError: costs of another number of stages.
    """
    costs.check_stages(schedule.num_stages)
    actions = tuple(
        tuple([action for action in of_rank if action.kind in COMPUTE]) for of_rank in schedule.actions
    )
    leaves = leaves_of(actions)
    orders = [range(first, last) for first, last in pairwise(leaves.offsets.tolist())]
    lanes = [] if copies is None else [RankCopies(of_rank, copies) for of_rank in schedule.actions]
    starts, ends = Work(schedule, leaves, costs).run(orders, lanes)
    stuck = [rank for rank, order in enumerate(orders) if len(ends[rank]) < len(order)]
    if stuck:
        waiting = "; ".join(f"rank {rank} at {actions[rank][len(ends[rank])]}" for rank in stuck[:8]) + (
            "; ..." if len(stuck) > 8 else ""
        )
        raise ScheduleError(f"the ranks wait for each other or for an action that no rank has: {waiting}")
    peak_activations, peak_held = peaks(leaves)
    return Simulation(
        actions=actions,
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        makespan=max((of_rank[-1] for of_rank in ends if of_rank), default=0.0),
        busy=tuple(
            sum([end - start for start, end in zip(*of_rank, strict=True)])
            for of_rank in zip(starts, ends, strict=True)
        ),
        span=tuple(last[-1] - first[0] if first else 0.0 for first, last in zip(starts, ends, strict=True)),
        peak_activations=tuple(peak_activations),
        peak_held_weight_gradients=tuple(peak_held),
        copies=tuple(tuple(lane.copies) for lane in lanes),
        stall=tuple(lane.stall for lane in lanes),
        peak_bytes=tuple(lane.peak_bytes for lane in lanes),
    )


class Work:
    """The compute actions of a schedule by number, to be run in any order on the ranks that have them.

    What an action needs from its own rank must come before it in `leaves`: where it does not, it never starts. In
    other orders the caller sees to that.
    """

    def __init__(self, schedule: Schedule, leaves: Leaves, costs: Costs) -> None:
        products = Products(schedule)
        self.nothing, never = products.count, products.count + 1
        leaf, product = products.needed(leaves)
        crosses = products.holder[product] != leaves.rank[leaf]
        maker = products.makers(leaves)[product]
        is_late = ~crosses & ((maker < 0) | (maker >= leaves.action[leaf]))
        self.needs = _columns(
            leaves, [(leaf[crosses], product[crosses]), (leaf[is_late], never)], self.nothing
        )
        leaf, product = products.given(leaves)
        is_sent = products.receiver[product] >= 0
        leaf, product = leaf[is_sent], product[is_sent]
        self.routes = _routes(products, product, schedule.num_ranks, costs)
        self.gives = list(
            zip(
                _columns(leaves, [(leaf, product)], self.nothing),
                _columns(leaves, [(leaf, self.routes.index)], -1),
                strict=True,
            )
        )
        self.duration = _durations(leaves, costs, schedule.num_stages)

    def run(
        self, orders: Sequence[Sequence[int]], lanes: Sequence[RankCopies] = ()
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Start and end of every action of each rank, in the order of `orders`, as far as the ranks come.

        lanes: each rank's copies, where they take time.
        """
        needs, gives, duration = self.needs, self.gives, self.duration
        link, transmission, latency = self.routes.link, self.routes.transmission, self.routes.latency
        arrival = [math.inf] * self.nothing + [0.0, math.inf]
        sleeper = [-1] * len(arrival)  # the rank that waits for this product
        link_free = [0.0] * len(link)
        starts: list[list[float]] = [[] for _ in orders]
        ends: list[list[float]] = [[] for _ in orders]
        awake = deque(range(len(orders)))
        while awake:
            rank = awake.popleft()
            order, my_starts, my_ends = orders[rank], starts[rank], ends[rank]
            free = my_ends[-1] if my_ends else 0.0
            for position in range(len(my_ends), len(order)):
                action = order[position]
                start = free
                for column in needs:
                    if (arrived := arrival[column[action]]) > start:
                        start = arrived
                if start == math.inf:
                    missing = next(column[action] for column in needs if arrival[column[action]] == math.inf)
                    sleeper[missing] = rank
                    break
                if lanes:
                    start = lanes[rank].before(position, free, start)
                    lanes[rank].after(position, start + duration[action])
                free = start + duration[action]
                my_starts.append(start)
                my_ends.append(free)
                for column, routes in gives:
                    if (route := routes[action]) >= 0:
                        sent = max(free, link_free[link[route]]) + transmission[route]
                        link_free[link[route]] = sent
                        product = column[action]
                        arrival[product] = sent + latency[route]
                        if sleeper[product] >= 0:
                            awake.append(sleeper[product])
                            sleeper[product] = -1
        return starts, ends


def _columns(leaves: Leaves, entries: Sequence[tuple[Ints, Ints | int]], nothing: int) -> list[list[int]]:
    """One value per action and half of a pair, from (leaves, their values); later entries replace earlier ones."""
    half = leaves.half
    columns = np.full((1 + int(half.any()), leaves.num_actions), nothing)
    for leaf, values in entries:
        columns[half[leaf], leaves.action[leaf]] = values
    return columns.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Routes:
    """A route is a boundary between stages on a link between ranks. index: of each product; the others by route."""

    index: Ints
    link: list[int]
    transmission: list[float]
    latency: list[float]


def _routes(products: Products, sent: Ints, num_ranks: int, costs: Costs) -> _Routes:
    """Of the products `sent`."""
    key = (products.boundary[sent] * num_ranks + products.holder[sent]) * num_ranks + products.receiver[sent]
    keys, index = np.unique(key, return_inverse=True)
    pairs: dict[int, int] = {}
    link_of: list[int] = []
    transmission: list[float] = []
    latency: list[float] = []
    for key in keys.tolist():
        boundary, pair = divmod(key, num_ranks * num_ranks)
        link = costs.link(*divmod(pair, num_ranks))
        link_of.append(pairs.setdefault(pair, len(pairs)))
        bandwidth = link.bandwidth_bytes_per_s
        transmission.append(costs.bytes_at(boundary) / bandwidth if bandwidth else 0.0)
        latency.append(link.latency_s)
    return _Routes(index=index, link=link_of, transmission=transmission, latency=latency)


def _durations(leaves: Leaves, costs: Costs, num_stages: int) -> list[float]:
    """The time of every action."""
    table = np.zeros((len(KINDS), num_stages))
    for kind in RULES:
        table[CODES[kind]] = [costs.of_kind(kind, stage) for stage in range(num_stages)]
    of_leaf: list[float] = table[leaves.kind, leaves.stage].tolist()
    if len(of_leaf) == leaves.num_actions:
        return of_leaf
    first = np.searchsorted(leaves.action, np.arange(leaves.num_actions + 1)).tolist()
    return [
        of_leaf[one] if other - one == 1 else costs.of_pair(*of_leaf[one:other])
        for one, other in pairwise(first)
    ]


def peak_live(actions: Sequence[Action]) -> tuple[int, int]:
    """Most live activations, and most held weight gradients, along one rank's list.

    An activation lives from its F to its I or B. After I, what W needs is held until W. In a pair the forward
    stores before the backward frees.
    """
    (activations,), (held,) = peaks(leaves_of([actions]))
    return activations, held
