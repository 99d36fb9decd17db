"""`auto`: a schedule for uneven stages and slow links, searched for on given costs under a memory bound.

One copy of every stage, one stage a rank (`line`) or two in a V (rank r has the stages r and 2p-1-r). The search
starts from the built-in schedules of that placement and from list schedules under many policies, and improves the
best of them along the critical path. It ends with the best schedule that it has seen, so it is never worse, in
simulated makespan, than a built-in one within the same bound.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from counterflow.parallel.pipeline.analysis.cost_profile import load_profile
from counterflow.parallel.pipeline.analysis.costs import Costs, costs_from
from counterflow.parallel.pipeline.analysis.list_schedule import Policy, Problem, list_schedule
from counterflow.parallel.pipeline.analysis.local_search import Orders, improve
from counterflow.parallel.pipeline.analysis.simulate import simulate
from counterflow.parallel.pipeline.config import CostsConfig, ScheduleConfig
from counterflow.parallel.pipeline.ir.action import Kind, Schedule
from counterflow.parallel.pipeline.ir.arrays import leaves_of, live, maxima
from counterflow.parallel.pipeline.schedules.definition import Source, SourcedSchedule
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules

# Actions that a search may place, unless told otherwise: about a second.
BUDGET = 1_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule and its simulated makespan. origin: where the search started from."""

    schedule: Schedule
    makespan: float
    origin: str


def placement_of(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Stage -> rank: a line, or a V of two chunks."""
    line = tuple(range(num_ranks))
    return line if num_chunks == 1 else (*line, *reversed(line))


def built_in(num_ranks: int, num_microbatches: int, num_chunks: int) -> Iterator[Schedule]:
    """Every built-in schedule of the same placement that fits the sizes."""
    placement = (placement_of(num_ranks, num_chunks),)
    for name, generator in generated_schedules().items():
        if generator.mirrored:
            continue
        try:
            schedule = generate(
                name, num_ranks, num_microbatches, num_chunks=num_chunks if generator.any_chunks else None
            )
        except ValueError:
            continue
        if schedule.placement == placement:
            yield schedule


@lru_cache(maxsize=8)
def search(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    memory_limit: int | None = None,
    seed: int = 0,
    budget: int = BUDGET,
) -> Candidate:
    """The best schedule found; the same for the same arguments.

    num_chunks: stages of a rank: 1, or 2 in a V; `costs` are of num_ranks * num_chunks stages.
    memory_limit: most micro-batches, 1 or more, whose activations a rank may hold for all of its stages, that is
        `num_chunks` times as many stage activations; None: what 1f1b holds. What W needs is bounded as well:
        activations and held weight gradients together stay within the most that a built-in schedule within the
        limit keeps.
    budget: number of actions that the search may place. Its work is counted, not timed: it is the same everywhere.

    Raises ValueError: costs of another number of stages.
    """
    costs.check_stages(num_ranks * num_chunks)
    limit = num_chunks * (min(num_ranks, num_microbatches) if memory_limit is None else memory_limit)
    fitting: list[Candidate] = []
    joint_limit = limit
    for schedule in built_in(num_ranks, num_microbatches, num_chunks):
        activations, together = _peaks(schedule)
        if activations <= limit:
            joint_limit = max(joint_limit, together)
            makespan = simulate(schedule, costs).makespan
            fitting.append(Candidate(schedule=schedule, makespan=makespan, origin=schedule.name))
    problem = Problem(
        placement_of(num_ranks, num_chunks),
        num_ranks,
        num_microbatches,
        costs,
        limit=limit,
        joint_limit=joint_limit,
    )
    found = min(
        [*_searched(problem, fitting, seed, budget), *fitting], key=lambda candidate: candidate.makespan
    )
    return replace(found, schedule=replace(found.schedule, name="auto"))


def lower_bound(problem: Problem) -> float:
    """No schedule ends before the busiest rank, which cannot begin before its first input comes."""
    bound = arrival = 0.0
    first_input: dict[int, float] = {}
    for stage, rank in enumerate(problem.placement):
        first_input.setdefault(rank, arrival)
        arrival += problem.costs.of_kind(Kind.F, stage)
        arrival += problem.delay[stage] if stage + 1 < problem.num_stages else 0.0
    for rank, stages in enumerate(problem.stages_of):
        work = 0.0
        for stage in stages:
            forward, input_gradient, weight_gradient, backward = (
                problem.costs.of_kind(kind, stage) for kind in Problem.KINDS
            )
            work += forward + min(backward, input_gradient + weight_gradient)
        bound = max(bound, first_input[rank] + problem.num_microbatches * work)
    return bound


def _searched(problem: Problem, fitting: list[Candidate], seed: int, budget: int) -> Iterator[Candidate]:
    """List schedules, and what moves make of the best of all."""
    generator = random.Random(seed)
    bound = lower_bound(problem)
    tried = [
        _Try.of(problem, _orders(problem, candidate.schedule), candidate.origin) for candidate in fitting
    ]
    best: _Try | None = None
    policies = _policies(problem)
    num_passes = max(len(policies) // 4, budget // 20 // problem.num_actions)
    for turn in range(num_passes):
        if turn < len(policies):
            policy = policies[turn]
        else:
            assert best is not None
            assert best.policy is not None
            policy = _perturbed(best.policy, problem, generator)
        made = _Try.of(problem, list_schedule(problem, policy), "list schedule", policy)
        tried.append(made)
        if best is None or made.makespan <= best.makespan:
            best = made
    tried.sort(key=lambda made: made.makespan)
    num_runs = min(4000, budget // problem.num_actions)
    for made, share in zip(tried, (2, 4, 4), strict=False):
        orders = improve(problem, made.orders, num_runs=num_runs // share, bound=bound, generator=generator)
        for variant in (orders, _merged(problem, orders)):
            schedule = problem.schedule(variant)
            makespan = simulate(schedule, problem.costs).makespan
            yield Candidate(schedule=schedule, makespan=makespan, origin=made.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    makespan: float
    orders: Orders
    origin: str
    policy: Policy | None

    @staticmethod
    def of(problem: Problem, orders: Orders, origin: str, policy: Policy | None = None) -> _Try:
        _, ends = problem.run(orders)
        makespan = max(of_rank[-1] for of_rank in ends)
        return _Try(makespan=makespan, orders=orders, origin=origin, policy=policy)


def _policies(problem: Problem) -> list[Policy]:
    """To begin with: few or many forwards ahead, patient or not, I or F first."""
    p, limit = problem.num_ranks, problem.limit
    chunks = len(problem.stages_of[0])
    shapes = {
        tuple(limit for _ in range(p)),
        tuple(max(chunks, round(limit * (p - rank) / p)) for rank in range(p)),
        tuple(max(chunks, min(limit, chunks * (2 * (p - rank) - 1))) for rank in range(p)),
    }
    merges = [False, True] if problem.merging_pays else [False]
    return [
        Policy(ahead=ahead, patience=patience, forward_first=forward_first, merged=merged)
        for patience in (0.0, 1.0, 0.5)
        for ahead in sorted(shapes)
        for merged in merges
        for forward_first in (False, True)
    ]


def _perturbed(policy: Policy, problem: Problem, generator: random.Random) -> Policy:
    """Some ranks run one micro-batch more or less ahead, and another patience."""
    ahead = list(policy.ahead)
    for rank in range(len(ahead)):
        if generator.random() < 2 / len(ahead):
            least = len(problem.stages_of[rank])
            ahead[rank] = min(problem.limit, max(least, ahead[rank] + generator.choice((-2, -1, 1, 2))))
    patience = generator.choice((policy.patience, policy.patience, 0.0, 0.25, 0.5, 0.75, 1.0))
    return replace(policy, ahead=tuple(ahead), patience=patience)


def _orders(problem: Problem, schedule: Schedule) -> Orders:
    """The order of a built-in schedule: pairs taken apart, and backwards, unless one B is shorter than I and W."""
    orders: Orders = []
    for actions in schedule.actions:
        order: list[int] = []
        for leaf in (leaf for action in actions for leaf in action.leaves):
            assert leaf.microbatch is not None
            kind = Problem.KINDS.index(leaf.kind)
            kinds = (1, 2) if kind == 3 and not problem.merging_pays else (kind,)
            order += [problem.number(of, leaf.stage, leaf.microbatch) for of in kinds]
        orders.append(order)
    return orders


def _merged(problem: Problem, orders: Orders) -> Orders:
    """Each W that stands right behind its I made one B with it, where the step is no longer for it."""
    if not problem.merging_pays:
        return orders
    best = _Try.of(problem, orders, "")
    for rank in range(problem.num_ranks):
        order: list[int] = []
        for number in best.orders[rank]:
            kind, stage, microbatch = problem.parts(number)
            if kind == 2 and order and order[-1] == problem.number(1, stage, microbatch):
                order[-1] = problem.number(3, stage, microbatch)
            else:
                order.append(number)
        made = _Try.of(problem, [*best.orders[:rank], order, *best.orders[rank + 1 :]], "")
        if made.makespan <= best.makespan:
            best = made
    return best.orders


def _peaks(schedule: Schedule) -> tuple[int, int]:
    """Most live activations on a rank, and most activations and held weight gradients together."""
    leaves = leaves_of(schedule.actions)
    activations, held = live(leaves)
    return max(maxima(leaves, activations)), max(maxima(leaves, activations + held))


def _auto(config: ScheduleConfig, num_ranks: int) -> Source:
    found = [
        search(
            costs_from(config.costs, num_ranks * num_chunks),
            num_ranks,
            config.num_microbatches,
            num_chunks=num_chunks,
            memory_limit=config.memory_limit_activations,
            seed=config.search_seed,
        )
        for num_chunks in _chunks(config, num_ranks)
    ]
    best = min(found, key=lambda candidate: candidate.makespan)
    return Source(schedule=best.schedule, note=f"auto: makespan {best.makespan:g}, found from {best.origin}")


def _chunks(config: ScheduleConfig, num_ranks: int) -> tuple[int, ...]:
    """Stages of a rank to search with: what is asked for, or what the costs are of."""
    if config.num_chunks is not None:
        if config.num_chunks > 2:
            raise ValueError(
                f"schedule.num_chunks={config.num_chunks}: auto places one stage on a rank, or two in a V; set it to "
                "1, to 2, or to null for what the costs are of"
            )
        return (config.num_chunks,)
    if config.costs.profile is not None:
        # Of two stages a rank it tells the costs of one a rank as well, so both are searched.
        return (1, 2) if load_profile(config.costs.profile).num_stages == 2 * num_ranks else (1,)
    return (2,) if 2 * num_ranks in _lengths(config.costs) else (1,)


def _lengths(costs: CostsConfig) -> set[int]:
    """Of the costs that are given per stage."""
    given = (costs.forward, costs.input_gradient, costs.weight_gradient, costs.backward, costs.recompute)
    return {len(cost) for cost in given if isinstance(cost, tuple)}


SCHEDULE = SourcedSchedule(
    name="auto",
    title="a searched schedule",
    summary="searched for on given costs within a memory bound, never worse than the others of its placement; costs: "
    "schedule.costs.profile (`counterflow profile` writes one), schedule.costs.forward=[..] and so on",
    source=_auto,
)
