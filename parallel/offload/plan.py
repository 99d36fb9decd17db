"""Which activations a rank moves out, and when: OFFLOAD and RELOAD among its actions, decided before it starts.

What moves is a unit: all that the forward of one stage and micro-batch keeps for its backward. A unit is made by its F
and used once, by its B or I, so the order of a rank's actions says when each is needed.

Note [Room]
During every compute action the units that are there, those that come in and those still on their way out are within
the budget. With a `lead` of one, a unit's way out is under the next action and its way back under the one before its
use: copies run under computation. Where the budget has no room for that, the lead is zero, and copies are waited for.

Note [What leaves]
`schedule`: where a compute action would exceed the budget, of the units there the one that is needed last leaves
(Belady, IBM Systems Journal 5(2), 1966), and it leaves right after it was made. With units of one size no other choice
moves fewer. It comes back as early as there is room, in the order of use. `lru`: the unit that was made first leaves
when there is no room for what comes, and is back when its backward asks for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from counterflow.parallel.pipeline.analysis.passes import around_compute
from counterflow.parallel.pipeline.ir.action import COMPUTE, Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.dependencies import microbatch_of
from counterflow.parallel.pipeline.ir.offload_sizes import Unit, UnitBytes

LEADS = (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A unit that leaves and comes back; each before the compute action of this index."""

    unit: Unit
    out: int
    back: int


@dataclass(frozen=True, slots=True)
class _Life:
    unit: Unit
    made: int
    used: int
    kept: int


def add_offload(
    schedule: Schedule,
    sizes: Sequence[UnitBytes],
    *,
    budget_bytes: int,
    policy: Literal["lru", "schedule"],
) -> Schedule:
    """A pass: `schedule` with OFFLOAD and RELOAD, so that no rank exceeds the budget. sizes: by stage.

    Raises ValueError: where a rank cannot keep within it (`least_bytes`).
    """
    result: list[list[Action]] = []
    for rank, actions in enumerate(schedule.actions):
        compute = [action for action in actions if action.kind in COMPUTE]
        least = least_bytes(compute, sizes)
        if least > budget_bytes:
            raise ValueError(
                f"a budget of {budget_bytes} bytes for activations: pipeline rank {rank} needs {least} for what it "
                "works on at once, whatever leaves; raise it to that"
            )
        plan = plan_lru if policy == "lru" else plan_schedule
        moves = plan(compute, sizes, budget_bytes)
        # Behind the sends of the action before: others wait for those. What leaves makes room for what comes.
        after: dict[int, list[Action]] = defaultdict(list)
        for move in moves:
            after[move.out - 1].append(Action(move.unit[0], Kind.OFFLOAD, move.unit[1]))
        for move in moves:
            after[move.back - 1].append(Action(move.unit[0], Kind.RELOAD, move.unit[1]))
        result.append(around_compute(actions, {}, after))
    return schedule.with_actions(result)


def without_offload(schedule: Schedule) -> Schedule:
    """The inverse of `add_offload`."""
    return schedule.with_actions(
        [action for action in actions if action.kind not in (Kind.OFFLOAD, Kind.RELOAD)]
        for actions in schedule.actions
    )


def least_budget_bytes(schedule: Schedule, sizes: Sequence[UnitBytes]) -> int:
    """The least that every rank can keep within."""
    return max(
        least_bytes([action for action in actions if action.kind in COMPUTE], sizes)
        for actions in schedule.actions
    )


def least_bytes(compute: Sequence[Action], sizes: Sequence[UnitBytes]) -> int:
    """What a rank holds where it keeps nothing but what it works on."""
    return max((sum(_working(action, sizes)) for action in compute), default=0)


def _working(action: Action, sizes: Sequence[UnitBytes]) -> tuple[int, int]:
    """Bytes that a compute action makes, and that it needs there."""
    made = sum(sizes[leaf.stage].kept for leaf in action.leaves if leaf.kind is Kind.F)
    used = sum(sizes[leaf.stage].most for leaf in action.leaves if leaf.kind in (Kind.B, Kind.I))
    return made, used


def plan_schedule(
    compute: Sequence[Action], sizes: Sequence[UnitBytes], budget_bytes: int
) -> tuple[Move, ...]:
    """The moves of policy `schedule` for a rank's compute actions; see Note [What leaves]."""
    lives = _lives(compute, sizes)
    again = _again(compute, sizes)
    for lead in LEADS:
        leaving = _leaving(lives, again, budget_bytes, lead)
        if leaving is not None:
            return _placed(lives, leaving, again, budget_bytes, lead)
    raise AssertionError("with no lead there is room for what an action works on")


def plan_lru(compute: Sequence[Action], sizes: Sequence[UnitBytes], budget_bytes: int) -> tuple[Move, ...]:
    """The moves of policy `lru` for a rank's compute actions."""
    there: dict[Unit, int] = {}  # bytes, in the order of use
    out: dict[Unit, int] = {}
    moves: list[Move] = []
    for index, action in enumerate(compute):
        made = [_unit_of(leaf) for leaf in action.leaves if leaf.kind is Kind.F]
        used = [_unit_of(leaf) for leaf in action.leaves if leaf.kind in (Kind.B, Kind.I)]
        others = [unit for unit in there if unit not in used]
        total = sum(_working(action, sizes)) + sum(there[unit] for unit in others)
        for unit in others:
            if total <= budget_bytes:
                break
            total -= there.pop(unit)
            out[unit] = index
        for unit in used:
            if unit in out:
                moves.append(Move(unit=unit, out=out.pop(unit), back=index))
            there.pop(unit, None)
        for unit in made:
            there[unit] = sizes[unit[0]].kept
    return tuple(moves)


def planned_bytes(
    compute: Sequence[Action], sizes: Sequence[UnitBytes], moves: Sequence[Move]
) -> tuple[int, ...]:
    """What is there during each compute action, where every copy is done before the next: the least of Note [Room]."""
    away = {move.unit: move for move in moves}
    lives = _lives(compute, sizes)
    return tuple(
        again
        + sum(
            life.kept
            for life in lives
            if life.made <= index <= life.used
            and not (life.unit in away and away[life.unit].out <= index < away[life.unit].back)
        )
        for index, again in enumerate(_again(compute, sizes))
    )


def _unit_of(leaf: Action) -> Unit:
    return leaf.stage, microbatch_of(leaf)


def _lives(compute: Sequence[Action], sizes: Sequence[UnitBytes]) -> list[_Life]:
    """Every unit of a rank in the order of use."""
    made: dict[Unit, int] = {}
    lives: list[_Life] = []
    for index, action in enumerate(compute):
        for leaf in action.leaves:
            if leaf.kind is Kind.F:
                made[_unit_of(leaf)] = index
            elif leaf.kind in (Kind.B, Kind.I):
                unit = _unit_of(leaf)
                lives.append(_Life(unit, made[unit], index, sizes[leaf.stage].kept))
    return lives


def _again(compute: Sequence[Action], sizes: Sequence[UnitBytes]) -> list[int]:
    """What each action makes again for its own use, where activations are recomputed."""
    return [
        sum(
            sizes[leaf.stage].most - sizes[leaf.stage].kept
            for leaf in action.leaves
            if leaf.kind in (Kind.B, Kind.I)
        )
        for action in compute
    ]


def _leaving(
    lives: Sequence[_Life], again: Sequence[int], budget_bytes: int, lead: int
) -> frozenset[Unit] | None:
    """The units that leave; None: the budget has no room for this lead."""
    starting: dict[int, list[_Life]] = defaultdict(list)
    for life in lives:
        starting[life.made].append(life)
    live: dict[Unit, _Life] = {}
    leaving: set[Unit] = set()
    for index, more in enumerate(again):
        live |= {life.unit: life for life in starting[index]}
        live = {unit: life for unit, life in live.items() if life.used >= index}
        total = more
        candidates: list[_Life] = []
        for unit, life in live.items():
            is_between = life.made + lead < index < life.used - lead
            if unit not in leaving or not is_between:
                total += life.kept
            if unit not in leaving and is_between:
                candidates.append(life)
        for life in sorted(candidates, key=lambda each: each.used, reverse=True):
            if total <= budget_bytes:
                break
            leaving.add(life.unit)
            total -= life.kept
        if total > budget_bytes:
            return None
    return frozenset(leaving)


def _placed(
    lives: Sequence[_Life], leaving: frozenset[Unit], again: Sequence[int], budget_bytes: int, lead: int
) -> tuple[Move, ...]:
    """When each unit of `leaving` goes and comes back: as early as there is room."""
    load = list(again)
    for life in lives:
        for index in range(life.made, life.used + 1):
            is_between = life.made + lead < index < life.used - lead
            load[index] += 0 if life.unit in leaving and is_between else life.kept
    moves: list[Move] = []
    earliest = 0
    for life in lives:
        if life.unit not in leaving:
            continue
        back, bound = life.used - lead, max(earliest, life.made + lead + 1)
        while back > bound and load[back - 1] + life.kept <= budget_bytes:
            back -= 1
            load[back] += life.kept
        earliest = back
        moves.append(Move(unit=life.unit, out=life.made + 1, back=back))
    return tuple(moves)
