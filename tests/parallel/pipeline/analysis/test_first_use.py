"""What a GPU makes a rank wait for once: which schedules hang in it, and that none does after the warm-up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from counterflow.parallel.pipeline.analysis.first_use import Flow, Waits, opening, serial, stuck
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.runtime.p2p import channels_of
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules

EVEN, EVERY = (2, 4, 6, 8), tuple(range(2, 9))
# The numbers of ranks, of 2 to 8 with twice as many micro-batches, where a first message blocks the host ...
HANG_IN_CONNECTING = {"gpipe": EVERY, "dualpipe": EVEN, "v_half": EVERY[1:], "v_min": EVERY}
# ... and where the first computation of its kind waits for every message under way.
HANG_IN_LOADING = {"dualpipe": EVEN, "v_half": (3, 5, 7), "v_min": EVERY}


def lowered(name: str) -> Iterator[Schedule]:
    """For every number of ranks from 2 to 8 that it fits."""
    for num_ranks in range(2, 9):
        try:
            schedule = generate(name, num_ranks, 2 * num_ranks)
        except ValueError:
            continue
        yield lower(schedule, zero_stage=3, early_sends=True)


def flows_of(schedule: Schedule) -> list[Flow]:
    """In the order in which the transport opens them."""
    return [
        (source, destination, channel.stage, channel.kind is Kind.SEND_F)
        for source, destination, channel in channels_of(schedule)
    ]


def by_hand(*rows: str) -> Schedule:
    return Schedule(
        name="by hand",
        num_stages=len(rows),
        num_microbatches=1,
        placement=(tuple(range(len(rows))),),
        actions=tuple(tuple(map(Action.parse, row.split())) for row in rows),
    )


@pytest.mark.parametrize("name", generated_schedules())
def test_the_warm_up_hangs_nowhere_and_afterwards_nothing_does(name: str) -> None:
    for schedule in lowered(name):
        assert not stuck(opening(schedule, flows_of(schedule)), opens=True)
        rehearsal = serial(schedule)
        verify(rehearsal)
        assert not stuck(rehearsal, waits=Waits.ALWAYS), "no kernel of it has run before"
        assert not stuck(schedule), "all channels have been used, and all kernels"


@pytest.mark.parametrize("name", generated_schedules())
def test_which_schedules_hang_without_it(name: str) -> None:
    connecting, loading = (
        tuple(schedule.num_ranks for schedule in lowered(name) if stuck(schedule, opens=opens, waits=waits))
        for opens, waits in ((True, Waits.NEVER), (False, Waits.FIRST))
    )
    assert connecting == HANG_IN_CONNECTING.get(name, ())
    assert loading == HANG_IN_LOADING.get(name, ())


def test_a_first_message_waits_for_its_other_end() -> None:
    """Both send first: buffered sends pass, and each rests in its own where it is the channel's first."""
    crossed = by_hand("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1I0 1SEND_B0 1W0")
    assert not stuck(crossed, opens=True)
    late = by_hand("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1I0 1SEND_B0 1W0")
    assert not stuck(late)
    assert stuck(late, opens=True) == ((0, Action.parse("0RECV_B0")), (1, Action.parse("1RECV_F0")))


def test_a_first_kernel_waits_for_receives_that_it_does_not_need() -> None:
    ahead = by_hand("0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1I0 1SEND_B0 1W0")
    assert not stuck(ahead)
    assert stuck(ahead, waits=Waits.FIRST) == ((0, Action.parse("0F0")), (1, Action.parse("1F0")))


def test_channels_opened_in_another_order_on_each_rank_hang() -> None:
    (schedule, *_) = lowered("1f1b")
    flows = flows_of(schedule)
    right, wrong = opening(schedule, flows), opening(schedule, flows[::-1])
    assert not stuck(wrong, opens=True), "any one order will do"
    mixed = schedule.with_actions([right.actions[0], wrong.actions[1]])
    assert len(stuck(mixed, opens=True)) == 2
