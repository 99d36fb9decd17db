"""The rule table, row by row, and the replay machine."""

from __future__ import annotations

from itertools import accumulate

import pytest

from counterflow.parallel.pipeline.ir.action import Action
from counterflow.parallel.pipeline.ir.dependencies import (
    Value,
    carried,
    channel_of,
    destination,
    gives,
    needs,
    receive_of,
    replay,
    send_of,
    weights_read,
)
from counterflow.parallel.pipeline.schedules.registry import generate

Y, DX, DW = Value.ACTIVATION, Value.INPUT_GRADIENT, Value.WEIGHT_GRADIENT


@pytest.mark.parametrize(
    ("text", "needed", "given", "weights"),
    [
        ("0F5", [], [(Y, 0, 5)], (0,)),
        ("2F5", [(Y, 1, 5)], [(Y, 2, 5)], (2,)),
        ("2I5", [(Y, 2, 5), (DX, 3, 5)], [(DX, 2, 5)], (2,)),
        ("2B5", [(Y, 2, 5), (DX, 3, 5)], [(DX, 2, 5), (DW, 2, 5)], (2,)),
        ("3B5", [(Y, 3, 5)], [(DX, 3, 5), (DW, 3, 5)], (3,)),
        ("2W5", [(DX, 2, 5)], [(DW, 2, 5)], ()),
        (
            "(1F6;2B5)OVERLAP_F_B",
            [(Y, 0, 6), (Y, 2, 5), (DX, 3, 5)],
            [(Y, 1, 6), (DX, 2, 5), (DW, 2, 5)],
            (1, 2),
        ),
    ],
)
def test_rules(
    text: str,
    needed: list[tuple[Value, int, int]],
    given: list[tuple[Value, int, int]],
    weights: tuple[int, ...],
) -> None:
    action = Action.parse(text)
    assert needs(action, num_stages=4) == needed
    assert gives(action) == given
    assert weights_read(action) == weights


def test_routes_of_two_copies() -> None:
    schedule = generate("dualpipe", 4, 8)
    for product, send, receive, channel in [
        ((Y, 1, 0), "1SEND_F0", "2RECV_F0", (1, 2)),  # direction 0 goes up
        ((Y, 1, 4), "1SEND_F4", "2RECV_F4", (2, 1)),  # direction 1 goes down
        ((DX, 1, 0), "1SEND_B0", "0RECV_B0", (1, 0)),
        ((DX, 1, 4), "1SEND_B4", "0RECV_B4", (2, 3)),
    ]:
        assert destination(schedule, product) == channel[1]
        assert str(send_of(product)) == send
        assert str(receive_of(product)) == receive
        for action in map(Action.parse, (send, receive)):
            assert carried(action) == product
            assert channel_of(schedule, action) == channel
    assert destination(schedule, (Y, 3, 0)) is None
    assert destination(schedule, (DX, 0, 0)) is None
    assert destination(schedule, (DW, 1, 0)) is None


@pytest.mark.parametrize(
    ("waits", "rest"),
    [
        ([[], [2], [0], [1]], [2, 4]),  # 0; 2 after 0; 1 after 2; 3 after 1
        ([[], [3], [0], [1]], [1, 3]),  # 1 and 3 wait for each other
        ([[0], [], [], []], [0, 4]),  # 0 waits for itself
        ([[2, 3], [], [], []], [2, 4]),
    ],
)
def test_replay_rests_where_ranks_wait_for_each_other(waits: list[list[int]], rest: list[int]) -> None:
    first = [0, *accumulate(map(len, waits))]
    assert replay([0, 2, 4], first, [mark for of in waits for mark in of]) == rest
