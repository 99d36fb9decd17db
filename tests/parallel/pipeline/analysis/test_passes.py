"""Passes on schedules by hand, and their promises on every size."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.parallel.pipeline.analysis.passes import (
    add_communication,
    add_reduce_grad,
    add_unshard,
    lower,
    merge_backward,
    pair_chunks,
)
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import COMPUTE, Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.dependencies import ScheduleError
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.parallel.pipeline.oracle import survives
from tests.parallel.pipeline.schedules.test_registry import fitting_sizes


def parse(*rows: str, placement: tuple[tuple[int, ...], ...], microbatches: int) -> Schedule:
    return Schedule(
        name="by hand",
        num_stages=len(placement[0]),
        num_microbatches=microbatches,
        placement=placement,
        actions=tuple(tuple(map(Action.parse, row.split())) for row in rows),
    )


def text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.actions]


def test_sends_follow_and_receives_precede() -> None:
    schedule = parse("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", placement=((0, 1),), microbatches=2)
    assert text(add_communication(schedule, receive_ahead=0)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        # The second activation is ready while 1F0 runs, so its receive stands before that.
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_no_message_within_a_rank() -> None:
    schedule = parse("0F0 2F0 2B0 0B0", "1F0 1B0", placement=((0, 1, 0),), microbatches=1)
    assert text(add_communication(schedule, receive_ahead=0)) == [
        "0F0 0SEND_F0 2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
    ]
    local = parse("0F0 1F0 1B0 0B0", placement=((0, 0),), microbatches=1)
    assert add_communication(local) == local


def test_pairs_wait_before_and_send_behind() -> None:
    lowered = add_communication(generate("dualpipe", 4, 8))
    for actions in lowered.actions:
        for index, action in enumerate(actions):
            if action.kind is Kind.OVERLAP_F_B:
                forward, backward = action.parts
                expected: set[str] = set()
                if forward.stage < 3:
                    expected.add(f"{forward.stage}SEND_F{forward.microbatch}")
                if backward.stage > 0:
                    expected.add(f"{backward.stage}SEND_B{backward.microbatch}")
                assert set(map(str, actions[index + 1 : index + 1 + len(expected)])) == expected


def test_a_user_is_told_what_is_out_of_order() -> None:
    circular = parse("0F0 0B0", "1B0 1F0", placement=((0, 1),), microbatches=1)
    with pytest.raises(ScheduleError, match="rank 1 at 1B0"):
        add_communication(circular)
    unused = parse("0F0 0B0", "", placement=((0, 1),), microbatches=1)
    with pytest.raises(ScheduleError):
        add_communication(unused)


def test_merge_keeps_a_send_ahead_of_its_weight_gradient() -> None:
    schedule = parse("0F0 0I0 0W0", "1F0 1I0 1W0", placement=((0, 1),), microbatches=1)
    assert text(merge_backward(add_communication(schedule))) == [
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0",
    ]
    apart = parse("0I0 0RECV_B1 0W0 0I1 0W2", placement=((0,),), microbatches=3)
    assert text(merge_backward(apart)) == ["0RECV_B1 0B0 0I1 0W2"]


def test_unshard_by_hand() -> None:
    schedule = parse("0F0 1F0 1F1 1F2 1I0 1W0 0F1 0F2", placement=((0, 0),), microbatches=3)
    assert text(add_unshard(schedule, "use")) == [
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1F1 1F2 1I0 1RESHARD 0UNSHARD 1W0 0F1 0F2 0RESHARD"
    ]
    assert text(add_unshard(schedule, "step")) == [
        "0UNSHARD 1UNSHARD 0F0 1F0 1F1 1F2 1I0 1RESHARD 1W0 0F1 0F2 0RESHARD"
    ]
    # Used again after one other action: gathered anew at once, so it is kept.
    assert text(add_unshard(parse("0F0 1F0 0F1", placement=((0, 0),), microbatches=2), "use")) == [
        "0UNSHARD 1UNSHARD 0F0 1F0 1RESHARD 0F1 0RESHARD"
    ]


def test_reduce_after_the_last_weight_gradient() -> None:
    schedule = parse("0F0 0I0 0F1 0B1 0W0", "1F0 1B0 1F1 1B1", placement=((0, 1),), microbatches=2)
    assert text(add_reduce_grad(add_communication(schedule)))[0].endswith("0W0 0REDUCE_GRAD")
    assert text(add_reduce_grad(add_unshard(add_communication(schedule))))[1].endswith(
        "1B1 1SEND_B1 1RESHARD 1REDUCE_GRAD"
    )


@pytest.mark.parametrize(
    ("zero_stage", "reshard_after", "key"), [(4, "use", "zero.stage=4"), (3, "no", "=no")]
)
def test_lower_refuses(zero_stage: int, reshard_after: str, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        lower(generate("1f1b", 2, 2), zero_stage=zero_stage, reshard_after=reshard_after)


@given(
    sizes=fitting_sizes(),
    zero_stage=st.sampled_from((0, 1, 2, 3)),
    reshard_after=st.sampled_from(("use", "step")),
)
@settings(max_examples=60, deadline=None)
def test_lowered_schedules_run(sizes: tuple[str, int, int], zero_stage: int, reshard_after: str) -> None:
    schedule = generate(*sizes)
    lowered = lower(schedule, zero_stage=zero_stage, reshard_after=reshard_after)
    verify(lowered)
    assert survives(lowered)
    for actions in lowered.actions:
        kinds = {action.kind for action in actions}
        assert (Kind.UNSHARD in kinds) == (zero_stage == 3)
        for first, second in pairwise(actions):
            assert (first.kind, second.kind) != (Kind.RESHARD, Kind.UNSHARD) or first.stage != second.stage
            assert (first.kind, second.kind) != (Kind.I, Kind.W) or first.stage != second.stage


@given(sizes=fitting_sizes(), receive_ahead=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_a_gradient_is_awaited_once_its_shape_is_known(
    sizes: tuple[str, int, int], receive_ahead: int
) -> None:
    lowered = add_communication(generate(*sizes), receive_ahead=receive_ahead)
    assert survives(add_reduce_grad(lowered))
    for actions in lowered.actions:
        run: set[Any] = set()
        for action in actions:
            if action.kind is Kind.RECV_B:
                assert (action.stage, action.microbatch) in run
            run |= {(leaf.stage, leaf.microbatch) for leaf in action.leaves if leaf.kind is Kind.F}


@given(
    data=st.data(),
    placement=st.sampled_from(
        [((0, 1, 2),), ((0, 1, 2, 2, 1, 0),), ((0, 1, 0, 1),), ((0, 1, 2, 3), (3, 2, 1, 0)), ((1, 0), (0, 1))]
    ),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=120, deadline=None)
def test_no_order_that_can_run_hangs_once_it_communicates(
    data: st.DataObject, placement: tuple[tuple[int, ...], ...], seed: int
) -> None:
    """Any list a scheduler could come up with: lowered, it ends with buffered and with blocking sends."""
    schedule = random_schedule(placement, 2 * data.draw(st.integers(1, 4)), random.Random(seed))
    lowered = merge_backward(add_communication(schedule, receive_ahead=data.draw(st.integers(0, 3))))
    lowered = add_reduce_grad(lowered)
    if len(placement) == 1:
        lowered_and_sharded = add_reduce_grad(add_unshard(merge_backward(add_communication(schedule))))
        verify(lowered_and_sharded)
        verify(lowered)
    assert survives(without_reductions_of_copies(lowered) if len(placement) > 1 else lowered)


def random_schedule(
    placement: tuple[tuple[int, ...], ...], microbatches: int, rng: random.Random
) -> Schedule:
    """Compute actions in a random order that respects what they need."""
    num_stages = len(placement[0])
    actions: list[list[Action]] = [[] for _ in range(1 + max(map(max, placement)))]
    waiting = [
        (microbatch, [Action(stage, Kind.F, microbatch) for stage in range(num_stages)])
        for microbatch in range(microbatches)
    ]
    for microbatch, chain in waiting:
        for stage in reversed(range(num_stages)):
            chain.append(Action(stage, Kind.I if rng.random() < 0.4 else Kind.B, microbatch))
    deferred: list[Action] = []
    while waiting or deferred:
        if deferred and (not waiting or rng.random() < 0.3):
            action = deferred.pop(rng.randrange(len(deferred)))
        else:
            microbatch, chain = rng.choice(waiting)
            action = chain.pop(0)
            if not chain:
                waiting.remove((microbatch, chain))
        if action.kind is Kind.I:
            deferred.append(Action(action.stage, Kind.W, action.microbatch))
        direction = action.microbatch * len(placement) // microbatches
        actions[placement[direction][action.stage]].append(action)
    return Schedule(
        name="random",
        num_stages=num_stages,
        num_microbatches=microbatches,
        placement=placement,
        actions=tuple(map(tuple, actions)),
    )


def without_reductions_of_copies(schedule: Schedule) -> Schedule:
    """Random orders of mirror ranks reduce in different orders; put the reductions last, in one order."""
    return schedule.with_actions(
        [
            *(action for action in actions if action.kind in COMPUTE or action.microbatch is not None),
            *(Action(stage, Kind.REDUCE_GRAD) for stage in sorted(schedule.stages_of(rank))),
        ]
        for rank, actions in enumerate(schedule.actions)
    )


def test_early_sends_split_what_others_wait_for() -> None:
    schedule = parse("0F0 0B0", "1F0 1B0", placement=((0, 1),), microbatches=1)
    assert text(lower(schedule, zero_stage=0, early_sends=True)) == [
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1REDUCE_GRAD",
    ]


@pytest.mark.parametrize("name", sorted(generated_schedules()))
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_early_sends_keep_the_order_and_end_no_later(name: str, zero_stage: int) -> None:
    schedule = generate(name, 4, 8)
    early = lower(schedule, zero_stage=zero_stage, early_sends=True)
    verify(early)
    for before, after in zip(schedule.actions, early.actions, strict=True):
        leaves = [leaf for action in before for leaf in action.leaves]
        expected = [
            (leaf.stage, leaf.microbatch, leaf.kind is Kind.F) for leaf in leaves if leaf.kind is not Kind.W
        ]
        kept = [
            (action.stage, action.microbatch, action.kind is Kind.F)
            for action in after
            if action.kind in COMPUTE and action.kind is not Kind.W
        ]
        assert kept == expected
    assert simulate(early, Costs()).makespan <= simulate(schedule, Costs()).makespan
    held, peak = simulate(early, Costs()), simulate(schedule, Costs())
    assert held.peak_activations == peak.peak_activations
    for rank in range(4):
        assert held.peak_held_weight_gradients[rank] <= peak.peak_held_weight_gradients[rank] + 1


def test_a_backward_is_paired_with_the_forward_after_it() -> None:
    schedule = parse("0F0 2B9 0F1 2B8 2F5 2I7 0F2 2B6", placement=((0, 0, 0),), microbatches=10)
    assert text(pair_chunks(schedule)) == ["0F0 (0F1;2B9)OVERLAP_F_B (2F5;2B8)OVERLAP_F_B 2I7 0F2 2B6"]


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_chunks_in_pairs_run_wherever_chunks_do(num_chunks: int) -> None:
    """Verified with every transport, for one more activation a rank and at most one more slot at either end."""
    for num_ranks in range(1, 6):
        for num_microbatches in range(1, 3 * num_ranks + 2):
            schedule = generate("interleaved_1f1b", num_ranks, num_microbatches, num_chunks=num_chunks)
            for early_sends in (False, True):
                lowered = lower(schedule, zero_stage=3, early_sends=early_sends, overlap=True)
                assert verify(lowered).executable
            paired = pair_chunks(schedule)
            apart, together = simulate(schedule, Costs()), simulate(paired, Costs())
            assert together.makespan <= apart.makespan + 2
            for rank, actions in enumerate(paired.actions):
                assert sorted((each.stage, each.microbatch) for each in schedule.actions[rank]) == sorted(
                    (leaf.stage, leaf.microbatch) for each in actions for leaf in each.leaves
                )
                assert together.peak_activations[rank] <= apart.peak_activations[rank] + 1
                if num_microbatches % num_ranks == 0:
                    # Of the turns of a rank all are pairs but those of its warm-up (Narayanan et al.) and one more.
                    warm_up = (num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank)
                    pairs = sum(each.kind is Kind.OVERLAP_F_B for each in actions)
                    assert pairs == max(0, num_chunks * num_microbatches - warm_up - 1)


def test_one_chunk_a_rank_is_not_paired() -> None:
    schedule = generate("interleaved_1f1b", 4, 8, num_chunks=1)
    assert pair_chunks(schedule) == schedule


def test_overlap_keeps_pairs_whole_whatever_leaves_early() -> None:
    for name in ("dualpipe", "dualpipe_v"):
        schedule = generate(name, 4, 10)
        lowered = lower(schedule, zero_stage=0, early_sends=True, overlap=True)
        verify(lowered)
        before, after = (
            [each for actions in of.actions for each in actions if each.kind is Kind.OVERLAP_F_B]
            for of in (schedule, lowered)
        )
        assert before == after
        # What is in no pair still leaves early, and without overlap pairs are taken apart as ever.
        assert any(each.kind is Kind.I for actions in lowered.actions for each in actions)
        apart = lower(schedule, zero_stage=0, early_sends=True)
        assert not any(each.kind is Kind.OVERLAP_F_B for actions in apart.actions for each in actions)


@pytest.mark.parametrize(
    "name", sorted(set(generated_schedules()) - {"dualpipe", "dualpipe_v", "interleaved_1f1b"})
)
def test_overlap_changes_no_schedule_without_pairs(name: str) -> None:
    schedule = generate(name, 4, 8)
    assert lower(schedule, zero_stage=3, early_sends=True, overlap=True) == lower(
        schedule, zero_stage=3, early_sends=True
    )
