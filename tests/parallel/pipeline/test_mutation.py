"""Mutants of good schedules: the verifier rejects each one that the executable model cannot run, and no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.verify import ScheduleError, verify
from counterflow.parallel.pipeline.ir.action import RECEIVES, SENDS, Action, Kind, Schedule
from counterflow.parallel.pipeline.schedules.registry import generate
from tests.parallel.pipeline.oracle import survives

SIZES = [
    (name, p, 2 * p if name == "dualpipe" else p) for name in ("gpipe", "1f1b", "dualpipe") for p in (2, 4, 8)
]

# These leave something undone or done twice, wherever they strike: no model need be asked.
ALWAYS_WRONG = {"drop", "duplicate", "wrong rank", "wrong micro-batch"}

OTHER_KIND = {
    Kind.F: Kind.B,
    Kind.B: Kind.I,
    Kind.I: Kind.B,
    Kind.W: Kind.B,
    Kind.SEND_F: Kind.SEND_B,
    Kind.SEND_B: Kind.SEND_F,
    Kind.RECV_F: Kind.RECV_B,
    Kind.RECV_B: Kind.RECV_F,
    Kind.UNSHARD: Kind.RESHARD,
    Kind.RESHARD: Kind.REDUCE_GRAD,
    Kind.REDUCE_GRAD: Kind.UNSHARD,
}


def accepted(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True


def executable(name: str, num_ranks: int, num_microbatches: int, zero_stage: int = 3) -> Schedule:
    return lower(generate(name, num_ranks, num_microbatches), zero_stage=zero_stage, reshard_after="use")


def with_rank(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    return schedule.with_actions([*schedule.actions[:rank], actions, *schedule.actions[rank + 1 :]])


def mutants(schedule: Schedule, rank: int, index: int) -> Iterator[tuple[str, Schedule]]:
    """Every mutant of one action."""
    actions = list(schedule.actions[rank])
    action, before, after = actions[index], actions[:index], actions[index + 1 :]
    yield "drop", with_rank(schedule, rank, before + after)
    yield "duplicate", with_rank(schedule, rank, [*before, action, action, *after])
    yield "duplicate", with_rank(schedule, rank, [*actions, action])
    if action.microbatch is not None and not action.parts:
        other = Action(action.stage, action.kind, (action.microbatch + 1) % schedule.num_microbatches)
        yield "wrong micro-batch", with_rank(schedule, rank, [*before, other, *after])
    if not action.parts:
        other = Action(action.stage, OTHER_KIND[action.kind], action.microbatch)
        yield "wrong kind", with_rank(schedule, rank, [*before, other, *after])
    else:
        yield "unpair", with_rank(schedule, rank, [*before, *action.parts, *after])
        yield "unpair, backward first", with_rank(schedule, rank, [*before, *reversed(action.parts), *after])
    neighbour = (rank + 1) % schedule.num_ranks
    moved = with_rank(schedule, rank, before + after)
    target = list(moved.actions[neighbour])
    yield "wrong rank", with_rank(moved, neighbour, [*target[:index], action, *target[index:]])
    if after:
        yield "swap", with_rank(schedule, rank, [*before, after[0], action, *after[1:]])
    for distance in (2, 5) if action.kind in SENDS | RECEIVES else (3,):
        late, early = after[:distance], before[-distance:]
        yield "late", with_rank(schedule, rank, [*before, *late, action, *after[distance:]])
        yield "early", with_rank(schedule, rank, [*before[:-distance], action, *early, *after])


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), SIZES)
def test_mutants_of_every_kind_are_judged_as_the_model_judges_them(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    # At p=8 an outer and a middle rank stand for the rest; the slow test takes all of them.
    ranks = range(num_ranks) if num_ranks < 8 else (0, 3)
    judge_mutants(name, num_ranks, num_microbatches, ranks, each=None if num_ranks == 2 else 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), SIZES)
def test_every_mutant_is_judged_as_the_model_judges_it(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    judge_mutants(name, num_ranks, num_microbatches, range(num_ranks))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_every_mutant_of_twice_the_micro_batches(name: str) -> None:
    judge_mutants(name, 8, 16, range(8))


def places(actions: Sequence[Action], each: int | None) -> list[int]:
    """The indices whose actions are mutated: `each` of every kind, spread from the first to the last; None: all."""
    if each is None:
        return list(range(len(actions)))
    by_kind: dict[tuple[Kind, ...], list[int]] = {}
    for index, action in enumerate(actions):
        by_kind.setdefault(tuple(leaf.kind for leaf in action.leaves), []).append(index)
    chosen: set[int] = set()
    for found in by_kind.values():
        last = len(found) - 1
        chosen |= {found[round((step + 0.5) * last / each)] for step in range(each)}
    return sorted(chosen)


def test_places_are_of_every_kind() -> None:
    actions = executable("dualpipe", 4, 8).actions[1]
    assert places(actions, None) == list(range(len(actions)))
    kinds = {tuple(leaf.kind for leaf in action.leaves) for action in actions}
    chosen = places(actions, 2)
    assert {tuple(leaf.kind for leaf in actions[index].leaves) for index in chosen} == kinds
    assert len(chosen) <= 2 * len(kinds)


def judge_mutants(
    name: str, num_ranks: int, num_microbatches: int, ranks: Iterable[int], *, each: int | None = None
) -> None:
    """Judge every mutant of these ranks' actions; `each`: of that many actions of every kind alone."""
    schedule = executable(name, num_ranks, num_microbatches)
    assert accepted(schedule)
    assert survives(schedule)
    rejected: Counter[str] = Counter()
    valid: Counter[str] = Counter()
    for rank in ranks:
        for index in places(schedule.actions[rank], each):
            for what, mutant in mutants(schedule, rank, index):
                verdict = accepted(mutant)
                place = f"{what} of {schedule.actions[rank][index]} at rank {rank}, step {index}"
                if what in ALWAYS_WRONG:
                    assert not verdict, place
                elif mutant.actions != schedule.actions:
                    assert verdict == survives(mutant), place
                (valid if verdict else rejected)[what] += 1
    assert rejected["swap"] > 0
    assert rejected["early"] > 0
    assert rejected["late"] > 0
    assert set(valid) <= {"swap", "late", "early", "unpair", "unpair, backward first"}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "dualpipe"])
def test_a_missing_kind_is_noticed_though_consistent(name: str) -> None:
    schedule = executable(name, 4, 8)
    for kinds in (
        {Kind.REDUCE_GRAD},
        {Kind.UNSHARD},
        {Kind.SEND_F, Kind.RECV_F},
        {Kind.RECV_B},
        SENDS | RECEIVES,
    ):
        mutant = schedule.with_actions(
            [action for action in actions if action.kind not in kinds] for actions in schedule.actions
        )
        assert not accepted(mutant), kinds


def test_an_order_that_buffers_forgive_and_rendezvous_does_not() -> None:
    schedule = executable("dualpipe", 2, 4, zero_stage=0)
    late = schedule.with_actions(
        receives_at_the_last_moment(schedule, rank) for rank in range(schedule.num_ranks)
    )
    with pytest.raises(ScheduleError, match="though not with buffered sends"):
        verify(late)


def receives_at_the_last_moment(schedule: Schedule, rank: int) -> list[Action]:
    """The list of `rank` with each receive right before its use.

    Neighbours that send to each other at the same time then wait, each in its send, for the other's receive.
    """
    result: list[Action] = []
    pending: dict[tuple[int, int], Action] = {}
    for action in schedule.actions[rank]:
        if action.kind in RECEIVES:
            pending[action.stage, action.microbatch] = action
            continue
        for leaf in action.leaves:
            if leaf.kind in (Kind.F, Kind.B, Kind.I) and (leaf.stage, leaf.microbatch) in pending:
                result.append(pending.pop((leaf.stage, leaf.microbatch)))
        result.append(action)
    return result


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shuffle_is_judged_as_the_model_judges_it(data: st.DataObject) -> None:
    name, num_ranks, num_microbatches = data.draw(st.sampled_from(SIZES[:2] + SIZES[3:5] + SIZES[6:8]))
    schedule = executable(name, num_ranks, num_microbatches, data.draw(st.sampled_from((0, 3))))
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, num_ranks - 1))
        actions = list(schedule.actions[rank])
        source = data.draw(st.integers(0, len(actions) - 1))
        target = data.draw(st.integers(max(0, source - 6), min(len(actions) - 1, source + 6)))
        actions.insert(target, actions.pop(source))
        schedule = with_rank(schedule, rank, actions)
    assert accepted(schedule) == survives(schedule)
