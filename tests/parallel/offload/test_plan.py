"""What leaves and when: against every other choice, never over the budget, and small cases by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from counterflow.parallel.offload.plan import (
    Move,
    add_offload,
    least_bytes,
    plan_lru,
    plan_schedule,
    planned_bytes,
    without_offload,
)
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import COMPUTE, Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.offload_sizes import UnitBytes
from counterflow.parallel.pipeline.schedules.registry import generate

ONE = (UnitBytes(kept=1, most=1),)
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipe", "dualpipe_v")


def actions(text: str) -> list[Action]:
    return [Action.parse(cell) for cell in text.split()]


def some_order(seed: int, count: int) -> list[Action]:
    """Forwards in order, each backward somewhere after its forward."""
    draw = random.Random(seed)
    order: list[Action] = []
    made: list[int] = []
    waiting = list(range(count))
    while waiting or made:
        if waiting and (not made or draw.random() < 0.6):
            made.append(waiting.pop(0))
            order.append(Action(0, Kind.F, made[-1]))
        else:
            order.append(Action(0, Kind.B, made.pop(draw.randrange(len(made)))))
    return order


def fewest_moves(order: Sequence[Action], budget: int, lead: int) -> int | None:
    """Over all sets of units that could leave: there only in the actions next to their first and their last."""
    made = {each.microbatch: index for index, each in enumerate(order) if each.kind is Kind.F}
    used = {each.microbatch: index for index, each in enumerate(order) if each.kind is Kind.B}

    def fits(leaving: set[int | None]) -> bool:
        for index in range(len(order)):
            there = sum(
                made[unit] <= index <= used[unit]
                and not (unit in leaving and made[unit] + lead < index < used[unit] - lead)
                for unit in made
            )
            if there > budget:
                return False
        return True

    units = list(made)
    for count in range(len(units) + 1):
        if any(fits(set(leaving)) for leaving in itertools.combinations(units, count)):
            return count
    return None


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_moves_fewer(seed: int) -> None:
    order = some_order(seed, 6)
    for budget in range(1, 7):
        moves = plan_schedule(order, ONE, budget)
        expected = fewest_moves(order, budget, lead=1)
        if expected is None:
            expected = fewest_moves(order, budget, lead=0)
        assert len(moves) == expected
        assert max(planned_bytes(order, ONE, moves)) <= budget


@pytest.mark.parametrize("plan", [plan_schedule, plan_lru])
@pytest.mark.parametrize("name", SCHEDULES)
def test_never_over_the_budget(name: str, plan: object) -> None:
    """With stages of different sizes, what is made again in backwards, and overlapped pairs."""
    assert callable(plan)
    schedule = lower(generate(name, 4, 8), zero_stage=0, overlap=True)
    draw = random.Random(name)
    kept = [draw.randrange(50, 100) for _ in range(schedule.num_stages)]
    sizes = [UnitBytes(kept=size, most=size + draw.randrange(0, 20)) for size in kept]
    for of_rank in schedule.actions:
        compute = [action for action in of_rank if action.kind in COMPUTE]
        least, most = least_bytes(compute, sizes), max(planned_bytes(compute, sizes, ()))
        for budget in range(least, most, max(1, (most - least) // 7)):
            moves: tuple[Move, ...] = plan(compute, sizes, budget)
            assert max(planned_bytes(compute, sizes, moves)) <= budget
            assert moves
        assert plan(compute, sizes, most) == ()


def test_first_in_first_out_by_hand() -> None:
    """Four forwards, then their backwards, with room for three: what is needed last leaves, and is back in time."""
    order = actions("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3")
    # For 0F3 unit 1 leaves under 0F2, and comes back under 0B0; so unit 2 is out while that is in use.
    assert plan_schedule(order, ONE, 3) == (
        Move(unit=(0, 1), out=2, back=4),
        Move(unit=(0, 2), out=3, back=5),
    )
    # In use least recently is the first, which is needed next.
    assert plan_lru(order, ONE, 3) == (
        Move(unit=(0, 0), out=3, back=4),
        Move(unit=(0, 1), out=4, back=5),
    )


def test_without_room_for_a_copy_under_computation() -> None:
    order = actions("0F0 0F1 0F2 0B2 0B1 0B0")
    assert plan_schedule(order, ONE, 1) == (
        Move(unit=(0, 1), out=2, back=4),
        Move(unit=(0, 0), out=1, back=5),
    )


@pytest.mark.parametrize("policy", ["lru", "schedule"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_comes_out_is_sound(name: str, policy: str) -> None:
    schedule = lower(generate(name, 4, 8), zero_stage=3)
    sizes = [UnitBytes(kept=10, most=10)] * schedule.num_stages
    moved = add_offload(schedule, sizes, budget_bytes=30, policy=policy)  # type: ignore[arg-type]
    verify(moved)
    kinds = {action.kind for of_rank in moved.actions for action in of_rank}
    assert kinds >= {Kind.OFFLOAD, Kind.RELOAD}
    assert without_offload(moved) == schedule
    assert [tuple(map(Action.parse, map(str, of_rank))) for of_rank in moved.actions] == list(moved.actions)


def test_a_budget_below_what_is_worked_on() -> None:
    schedule: Schedule = lower(generate("1f1b", 2, 4), zero_stage=0)
    sizes = [UnitBytes(kept=10, most=15)] * 2
    with pytest.raises(ValueError, match=r"pipeline rank 0 needs 15 for what it works on at once"):
        add_offload(schedule, sizes, budget_bytes=14, policy="schedule")
