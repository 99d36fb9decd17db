"""`auto` against an exhaustive search, and against every built-in schedule on random uneven costs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from counterflow.parallel.pipeline.analysis.costs import Costs, Link
from counterflow.parallel.pipeline.analysis.list_schedule import Policy, Problem, list_schedule
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.simulate import simulate
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.ir.arrays import leaves_of, live, maxima
from counterflow.parallel.pipeline.schedules.auto import lower_bound, placement_of, search
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.parallel.pipeline.optimal import shortest_makespan

# A tenth of the time of what a run's search may place; what is claimed here holds with either.
BUDGET = 50_000


def peaks(schedule: Schedule) -> tuple[int, int]:
    leaves = leaves_of(schedule.actions)
    activations, held = live(leaves)
    return max(maxima(leaves, activations)), max(maxima(leaves, activations + held))


def rivals(num_ranks: int, num_microbatches: int, num_chunks: int, limit: int) -> list[Schedule]:
    """Every built-in schedule of the placement within the limit, found by its placement alone."""
    found: list[Schedule] = []
    for name in generated_schedules():
        try:
            schedule = generate(name, num_ranks, num_microbatches)
        except ValueError:
            continue
        same = schedule.placement == (placement_of(num_ranks, num_chunks),)
        if same and max(verify(schedule).peak_activations) <= limit:
            found.append(schedule)
    return found


def uneven(seed: int, num_stages: int, *, integers: bool = False) -> Costs:
    generator = random.Random(seed)

    def row() -> tuple[float, ...]:
        return tuple(
            float(generator.randint(1, 9)) if integers else generator.uniform(0.5, 2.0)
            for _ in range(num_stages)
        )

    return Costs(
        forward=row(), input_gradient=row(), weight_gradient=row(), latency_s=float(generator.choice((0, 1)))
    )


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "num_chunks"), [(2, 3, 1), (2, 4, 1), (3, 3, 1), (3, 4, 1), (2, 3, 2)]
)
@pytest.mark.parametrize("seed", range(3))
def test_near_the_optimum(num_ranks: int, num_microbatches: int, num_chunks: int, seed: int) -> None:
    costs = uneven(seed, num_ranks * num_chunks, integers=True)
    found = search(costs, num_ranks, num_microbatches, num_chunks=num_chunks, budget=BUDGET)
    limit = num_chunks * num_ranks
    rows = (costs.forward, costs.input_gradient, costs.weight_gradient)
    optimum = shortest_makespan(
        placement_of(num_ranks, num_chunks),
        num_microbatches,
        tuple(row for row in rows if isinstance(row, tuple)),  # pyright: ignore[reportArgumentType]
        latency=costs.latency_s,
        limit=limit,
        joint_limit=max(
            [limit, *(peaks(other)[1] for other in rivals(num_ranks, num_microbatches, num_chunks, limit))]
        ),
        upper=found.makespan,
    )
    assert found.makespan <= 1.02 * optimum


def test_the_exhaustive_search_knows_what_is_known() -> None:
    """1f1b is optimal with backwards whole (W of no length), ZB-H1's makespan is at F = I = W."""
    even = ((1.0,) * 3, (1.0,) * 3, (1.0,) * 3)
    whole = ((1.0,) * 3, (2.0,) * 3, (0.0,) * 3)
    arguments = {"latency": 0.0, "limit": 3, "joint_limit": 3, "upper": 1e9}
    assert shortest_makespan((0, 1, 2), 3, whole, **arguments) == (3 + 2) * 3
    zero_bubble = simulate(generate("zb1p", 3, 3), Costs()).makespan
    assert shortest_makespan((0, 1, 2), 3, even, **arguments) <= zero_bubble < 15
    one = shortest_makespan((0, 1, 2), 3, even, latency=0.0, limit=1, joint_limit=1, upper=1e9)
    assert one > zero_bubble


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_a_built_in_schedule(num_chunks: int, seed: int) -> None:
    generator = random.Random(seed)
    num_ranks = generator.randint(2, 5)
    num_microbatches = generator.randint(num_ranks, 3 * num_ranks)
    memory_limit = generator.choice((None, num_ranks, 2 * num_ranks, max(2, num_ranks // 2)))
    costs = uneven(seed + 100, num_ranks * num_chunks)
    found = search(
        costs,
        num_ranks,
        num_microbatches,
        num_chunks=num_chunks,
        memory_limit=memory_limit,
        seed=seed,
        budget=BUDGET,
    )
    limit = num_chunks * (num_ranks if memory_limit is None else memory_limit)
    assert found.schedule.name == "auto"
    assert found.makespan == simulate(found.schedule, costs).makespan
    for rival in rivals(num_ranks, num_microbatches, num_chunks, limit):
        assert found.makespan <= simulate(rival, costs).makespan + 1e-12, rival.name
    assert not verify(found.schedule, max_live_activations=limit).executable
    for zero_stage in (0, 3):
        assert verify(lower(found.schedule, zero_stage=zero_stage)).executable


def test_it_gains_where_stages_are_uneven() -> None:
    costs = uneven(1, 8)
    found = search(costs, 8, 32)
    best = min(simulate(rival, costs).makespan for rival in rivals(8, 32, 1, 8))
    assert found.makespan < 0.995 * best
    problem = Problem(placement_of(8, 1), 8, 32, costs, limit=8, joint_limit=8)
    assert lower_bound(problem) <= found.makespan


def test_a_whole_backward_that_is_shorter_is_used() -> None:
    """B takes 2 where I and W take 3: taking every backward apart would cost 8 a rank."""
    costs = Costs(backward=2.0, input_gradient=1.5, weight_gradient=1.5)
    found = search(costs, 2, 8, budget=BUDGET)
    assert found.makespan <= simulate(generate("1f1b", 2, 8), costs).makespan
    assert any(action.kind == "B" for actions in found.schedule.actions for action in actions)


def test_pairs_that_hide_are_not_lost() -> None:
    """Only a built-in schedule has pairs: where they pay, it is what is found."""
    costs = Costs(pair_overlap=1.0)
    found = search(costs, 4, 12, num_chunks=2, memory_limit=5, budget=BUDGET)
    assert found.makespan <= simulate(generate("dualpipe_v", 4, 12), costs).makespan


def test_the_same_seed_finds_the_same() -> None:
    costs = uneven(7, 4)
    first = search(costs, 4, 8, seed=3, budget=BUDGET)
    search.cache_clear()
    assert search(costs, 4, 8, seed=3, budget=BUDGET) == first


def test_more_memory_is_no_worse_and_used() -> None:
    costs = Costs(latency_s=1.0)
    makespans = [search(costs, 4, 12, memory_limit=limit, budget=BUDGET).makespan for limit in (1, 2, 4, 7)]
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] < makespans[0]


def test_slow_links_and_many_micro_batches() -> None:
    costs = Costs(
        message_bytes=1.0, bandwidth_bytes_per_s=2.0, ranks_per_node=2, between_nodes=Link(latency_s=4.0)
    )
    found = search(costs, 4, 32, memory_limit=8, budget=BUDGET)
    verify(lower(found.schedule, zero_stage=0))
    assert found.makespan <= simulate(generate("zb_h2", 4, 32), costs).makespan


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("patience", [0.0, 1.0])
@pytest.mark.parametrize("forward_first", [False, True])
def test_every_list_schedule_is_sound(num_chunks: int, patience: float, forward_first: bool) -> None:
    for seed in range(6):
        num_ranks = 2 + seed % 3
        limit = num_chunks * (1 + seed % 4)
        costs = uneven(seed, num_ranks * num_chunks)
        problem = Problem(
            placement_of(num_ranks, num_chunks), num_ranks, 6, costs, limit=limit, joint_limit=limit + seed
        )
        for merged in (False, True):
            policy = Policy(
                ahead=(limit,) * num_ranks, patience=patience, forward_first=forward_first, merged=merged
            )
            schedule = problem.schedule(list_schedule(problem, policy))
            verify(schedule, max_live_activations=limit)
            assert peaks(schedule)[1] <= limit + seed


@pytest.mark.parametrize("budget", [20_000, 200_000])
def test_a_search_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """Its work is counted in actions placed, which is the same on every machine, not in seconds."""
    placed: list[int] = []
    run = Problem.run

    def counted(problem: Problem, orders: list[list[int]]) -> Any:
        placed.append(problem.num_actions)
        return run(problem, orders)

    monkeypatch.setattr(Problem, "run", counted)
    costs = uneven(50, 8)
    search(costs, 8, 32, seed=50, budget=budget)
    # Beside the moves, each start is timed once, and each of three results once for every rank.
    assert budget / 2 < sum(placed) <= 1.1 * budget + 60 * placed[0]
