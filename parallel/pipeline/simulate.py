"""Simulate a schedule: when every action runs, what each rank waits, how much it holds.

Only compute actions take time; values that cross ranks travel over links with latency and bandwidth. The order
comes from the dependency table that the passes and the verifier read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.pipeline.action import COMPUTE, Action, Kind, Schedule
from parallel.pipeline.config import CostsConfig
from parallel.pipeline.dependencies import Product, ScheduleError, destination, gives, needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Time of each action, in one unit; seconds where `latency_s` or `bandwidth_bytes_per_s` is set.

    forward, input_gradient, weight_gradient: F, I and W, one number for every stage or one per stage; a full
        backward is I + W.
    pair: an overlapped forward and backward; None: the sum of its halves, nothing hidden.
    latency_s: from the end of a message's transmission to its arrival.
    message_bytes, bandwidth_bytes_per_s: of an activation (or its gradient) between two stages, and of the
        link from one rank to another, which sends one message at a time; None: no limit.
    """

    forward: float | tuple[float, ...] = 1.0
    input_gradient: float | tuple[float, ...] = 1.0
    weight_gradient: float | tuple[float, ...] = 1.0
    pair: float | None = None
    latency_s: float = 0.0
    message_bytes: float = 0.0
    bandwidth_bytes_per_s: float | None = None

    def of(self, action: Action) -> float:
        """The time of one compute action."""
        if action.parts:
            return self.pair if self.pair is not None else sum(map(self.of, action.parts))
        if action.kind is Kind.F:
            return _of_stage(self.forward, action.stage)
        if action.kind is Kind.I:
            return _of_stage(self.input_gradient, action.stage)
        if action.kind is Kind.W:
            return _of_stage(self.weight_gradient, action.stage)
        assert action.kind is Kind.B, f"{action} takes no time"
        return _of_stage(self.input_gradient, action.stage) + _of_stage(self.weight_gradient, action.stage)

    @property
    def transmission_s(self) -> float:
        """How long one message occupies its link."""
        return self.message_bytes / self.bandwidth_bytes_per_s if self.bandwidth_bytes_per_s else 0.0


def _of_stage(cost: float | tuple[float, ...], stage: int) -> float:
    return cost[stage] if isinstance(cost, tuple) else cost


def costs_from(config: CostsConfig, num_stages: int) -> Costs:
    """The simulator's costs from the config: every stage alike."""
    return Costs(
        forward=(config.forward,) * num_stages,
        input_gradient=(config.input_gradient,) * num_stages,
        weight_gradient=(config.weight_gradient,) * num_stages,
        pair=config.pair,
    )


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

    intervals: every compute action, rank by rank, in order.
    busy, idle: time in actions, and the rest of the makespan.
    span: from the start of a rank's first action to the end of its last.
    peak_activations: most micro-batches whose forward has run and whose I or B has not ended.
    peak_held_weight_gradients: most micro-batches whose I has run and whose W has not ended.
    """

    intervals: tuple[Interval, ...]
    makespan: float
    busy: tuple[float, ...]
    span: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_held_weight_gradients: tuple[int, ...]

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


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Run `schedule`, in compute form or with any added actions, against `costs`.

    Each rank starts an action once its previous one has ended and everything it needs has arrived. Linear in
    the number of actions.

    Raises ScheduleError: the ranks wait for each other.
    """
    actions = [[action for action in of_rank if action.kind in COMPUTE] for of_rank in schedule.actions]
    times = _run(schedule, actions, costs)
    makespan = max((of_rank[-1][1] for of_rank in times if of_rank), default=0.0)
    peaks = [peak_live(of_rank) for of_rank in actions]
    return Simulation(
        intervals=tuple(
            Interval(rank=rank, action=action, start=start, end=end)
            for rank, of_rank in enumerate(actions)
            for action, (start, end) in zip(of_rank, times[rank], strict=True)
        ),
        makespan=makespan,
        busy=tuple(sum(end - start for start, end in of_rank) for of_rank in times),
        span=tuple(of_rank[-1][1] - of_rank[0][0] if of_rank else 0.0 for of_rank in times),
        peak_activations=tuple(activations for activations, _ in peaks),
        peak_held_weight_gradients=tuple(held for _, held in peaks),
    )


def _run(
    schedule: Schedule, actions: Sequence[Sequence[Action]], costs: Costs
) -> list[list[tuple[float, float]]]:
    """(start, end) of every action."""
    num_ranks, num_stages = len(actions), schedule.num_stages
    times: list[list[tuple[float, float]]] = [[] for _ in range(num_ranks)]
    available: list[dict[Product, float]] = [{} for _ in range(num_ranks)]
    sleeper: list[Product | None] = [None] * num_ranks
    link_free: dict[tuple[int, int], float] = {}
    awake = list(range(num_ranks))
    while awake:
        rank = awake.pop()
        here, mine = available[rank], actions[rank]
        free = times[rank][-1][1] if times[rank] else 0.0
        for index in range(len(times[rank]), len(mine)):
            action = mine[index]
            start = free
            for product in needs(action, num_stages):
                arrival = here.get(product)
                if arrival is None:
                    sleeper[rank] = product
                    break
                if arrival > start:
                    start = arrival
            else:
                free = start + costs.of(action)
                times[rank].append((start, free))
                for product in gives(action):
                    here[product] = free
                    receiver = destination(schedule, product)
                    if receiver is None:
                        continue
                    sent = max(free, link_free.get((rank, receiver), 0.0)) + costs.transmission_s
                    link_free[rank, receiver] = sent
                    available[receiver][product] = sent + costs.latency_s
                    if sleeper[receiver] == product:
                        sleeper[receiver] = None
                        awake.append(receiver)
                continue
            break
    stuck = [rank for rank in range(num_ranks) if len(times[rank]) < len(actions[rank])]
    if stuck:
        waiting = "; ".join(f"rank {rank} at {actions[rank][len(times[rank])]}" for rank in stuck[:8]) + (
            "; ..." if len(stuck) > 8 else ""
        )
        raise ScheduleError(f"the ranks wait for each other or for an action that no rank has: {waiting}")
    return times


def peak_live(actions: Sequence[Action]) -> tuple[int, int]:
    """Most live activations, and most held weight gradients, along one rank's list.

    An activation lives from its F to its I or B. After I, what W needs is held until W. In a pair the forward
    stores before the backward frees.
    """
    activations = held = peak_activations = peak_held = 0
    for action in actions:
        for leaf in action.leaves:
            if leaf.kind is Kind.F:
                activations += 1
                peak_activations = max(peak_activations, activations)
            elif leaf.kind is Kind.B or leaf.kind is Kind.I:
                activations -= 1
            if leaf.kind is Kind.I:
                held += 1
                peak_held = max(peak_held, held)
            elif leaf.kind is Kind.W:
                held -= 1
    return peak_activations, peak_held


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaBubble:
    """A published bubble formula: idle time per rank, and its share of idle and busy time together."""

    text: str
    idle: float
    fraction: float


def bubble_formula(name: str, num_ranks: int, num_microbatches: int, costs: Costs) -> FormulaBubble | None:
    """The published formula for the schedule `name`, or None where there is none.

    Exact for equal stages without communication in the balanced case only: print it beside a simulated value,
    never instead of it. Costs that differ between stages enter by their mean.
    """
    forward, input_gradient, weight_gradient = (
        sum(cost) / len(cost) if isinstance(cost, tuple) else cost
        for cost in (costs.forward, costs.input_gradient, costs.weight_gradient)
    )
    backward = input_gradient + weight_gradient
    busy = num_microbatches * (forward + backward)
    if name == "naive":
        text, idle = "(PP-1) m (F+B)", (num_ranks - 1) * busy
    elif name in ("gpipe", "1f1b"):
        text, idle = "(PP-1)(F+B)", (num_ranks - 1) * (forward + backward)
    elif name == "dualpipe":
        pair = forward + backward if costs.pair is None else costs.pair
        text = "(PP/2-1)(F&B+B-3W)"
        idle = (num_ranks / 2 - 1) * (pair + backward - 3 * weight_gradient)
        busy -= _mean_pairs(num_ranks, num_microbatches) * (forward + backward - pair)
    else:
        return None
    return FormulaBubble(text=text, idle=idle, fraction=idle / (idle + busy))


def _mean_pairs(num_ranks: int, num_microbatches: int) -> float:
    """Overlapped pairs per rank of dualpipe, averaged over its ranks."""
    half = num_ranks // 2
    return sum(num_microbatches - 2 * num_ranks + half + depth + 1 for depth in range(half)) / half - 1 / half
