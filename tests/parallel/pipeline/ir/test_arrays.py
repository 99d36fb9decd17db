"""The arrays against the rules read action by action."""

from __future__ import annotations

import pytest

from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.ir.action import COMPUTE, RECEIVES, SENDS, Schedule
from counterflow.parallel.pipeline.ir.arrays import Products, leaves_of, live, maxima
from counterflow.parallel.pipeline.ir.dependencies import carried, destination, gives, needs
from counterflow.parallel.pipeline.schedules.registry import generate

SCHEDULES = [("1f1b", 3, 5), ("dualpipe", 4, 10), ("zbv", 2, 5), ("interleaved_1f1b", 2, 4)]


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), SCHEDULES)
def test_the_same_rules(name: str, num_ranks: int, num_microbatches: int) -> None:
    schedule = lower(generate(name, num_ranks, num_microbatches), zero_stage=3)
    leaves, products = leaves_of(schedule.actions), Products(schedule)
    flat = [action for actions in schedule.actions for action in actions]
    for table, rule in (
        (products.given(leaves), lambda action: gives(action) if action.kind in COMPUTE else []),
        (
            products.needed(leaves),
            lambda action: needs(action, schedule.num_stages) if action.kind in COMPUTE else [],
        ),
        (
            products.carried(leaves),
            lambda action: [carried(action)] if action.kind in SENDS | RECEIVES else [],
        ),
    ):
        found = sorted(
            (int(leaves.action[leaf]), products.product(number)) for leaf, number in zip(*table, strict=True)
        )
        assert found == sorted(
            (index, product) for index, action in enumerate(flat) for product in rule(action)
        )
    for number in range(products.count):
        product = products.product(number)
        assert products.holder[number] == schedule.rank_of(product[1], product[2])
        assert (destination(schedule, product) or 0) == max(0, products.receiver[number])


def test_places_and_live_activations() -> None:
    schedule: Schedule = generate("dualpipe", 2, 4)
    leaves = leaves_of(schedule.actions)
    pair = next(
        (rank, index)
        for rank, actions in enumerate(schedule.actions)
        for index, action in enumerate(actions)
        if action.parts
    )
    halves = [leaf for leaf in range(len(leaves.kind)) if leaves.place(leaf) == pair]
    assert [int(leaves.half[leaf]) for leaf in halves] == [0, 1]
    activations, _ = live(leaves)
    assert maxima(leaves, activations) == [3, 3]
