"""Two stages a rank in a V: ZB-V, V-Half and V-Min, each with its bound on memory.

Rank r holds the stages r and 2p-1-r, so a micro-batch goes down the ranks and comes back up, forward and backward,
and the ranks' memory is even. Each generator gives every rank the order of its F and I; `fill` then places the
weight gradients in a run where every action takes one unit: where a rank would wait, and where it would hold
too much.

ZB-V: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241v1, section 6. V-Half, V-Min: Qi et al.,
Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: a schedule repeats one micro-batch's building
block every 6 units (2F + 2I + 2W of a rank), so the lifespans in the block set the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.dependencies import Product, Value, gives, microbatch_of, needs

_INTERVAL = 6

Slot = tuple[Value, int]
"""A value and its stage: a product of any micro-batch."""


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """The rank of each of 2 * `num_ranks` stages: down the ranks, and back."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def v_schedule(
    name: str, num_microbatches: int, orders: Sequence[Sequence[Action]], *, max_held: int
) -> Schedule:
    num_ranks = len(orders)
    return Schedule(
        name=name,
        num_stages=2 * num_ranks,
        num_microbatches=num_microbatches,
        placement=(v_placement(num_ranks),),
        actions=tuple(map(tuple, fill(orders, num_microbatches, max_held=max_held))),
    )


def block_orders(
    num_ranks: int,
    num_microbatches: int,
    *,
    hops: tuple[int, int, int, int],
    turns: tuple[int, int, int],
) -> list[list[Action]]:
    """The order of F and I on each rank where one building block repeats every 6 units.

    hops: units from one rank to the next on the block's four ways: forward down and up, backward down and up.
    turns: units from the last rank of one way to the first of the next.
    """
    last = num_ranks - 1
    orders: list[list[Action]] = []
    up = hops[0] * last + turns[0]
    down_again = up + hops[1] * last + turns[1]
    up_again = down_again + hops[2] * last + turns[2]
    for rank in range(num_ranks):
        near, far = rank, 2 * num_ranks - 1 - rank
        block = (
            (hops[0] * rank, Kind.F, near),
            (up + hops[1] * (last - rank), Kind.F, far),
            (down_again + hops[2] * rank, Kind.I, far),
            (up_again + hops[3] * (last - rank), Kind.I, near),
        )
        assert len({time % _INTERVAL for time, _, _ in block}) == len(block), "the blocks collide"
        timed = sorted(
            (time + _INTERVAL * microbatch, kind, stage, microbatch)
            for time, kind, stage in block
            for microbatch in range(num_microbatches)
        )
        orders.append([Action(stage, kind, microbatch) for _, kind, stage, microbatch in timed])
    return orders


def fill(orders: Sequence[Sequence[Action]], num_microbatches: int, *, max_held: int) -> list[list[Action]]:
    """`orders` with the W that they lack, in a run where every action takes one unit and messages none.

    A rank runs its oldest W where its next action is not ready, or is a forward with which it would hold more
    than `max_held` activations and weight gradients to be computed. In `orders`, each stage takes the micro-batches
    in turn. Linear in the number of actions and idle units.
    """
    num_ranks = len(orders)
    num_stages = 2 * num_ranks
    rules = {
        (kind, stage): (_slots(needs(action, num_stages)), _slots(gives(action)))
        for kind in (Kind.F, Kind.I, Kind.W)
        for stage in range(num_stages)
        for action in (Action(stage, kind, 0),)
    }
    # Micro-batches of which a stage has each value; they come in turn, so a count tells which.
    made = {slot: 0 for _, given in rules.values() for slot in given}
    placed = [{action for action in order if action.kind is Kind.W} for order in orders]
    at, held = [0] * num_ranks, [0] * num_ranks
    owed: list[deque[Action]] = [deque() for _ in orders]
    result: list[list[Action]] = [[] for _ in orders]
    unfinished = list(range(num_ranks))
    while unfinished:
        finished: list[Slot] = []
        for rank in unfinished:
            action = orders[rank][at[rank]] if at[rank] < len(orders[rank]) else None
            if (
                action is not None
                and (action.kind is not Kind.F or held[rank] < max_held)
                and all(made[slot] > microbatch_of(action) for slot in rules[action.kind, action.stage][0])
            ):
                at[rank] += 1
            elif owed[rank]:
                action = owed[rank].popleft()
            else:
                continue
            result[rank].append(action)
            finished += rules[action.kind, action.stage][1]
            if action.kind is Kind.F:
                held[rank] += 1
            elif action.kind is Kind.W:
                held[rank] -= 1
            else:
                weight = Action(action.stage, Kind.W, action.microbatch)
                if weight not in placed[rank]:
                    owed[rank].append(weight)
        for slot in finished:
            made[slot] += 1
        unfinished = [rank for rank in unfinished if len(result[rank]) < 6 * num_microbatches]
        # A unit in which no rank starts anything would be followed by another.
        assert finished or not unfinished, "the orders wait for each other, or hold too much"
    return result


def _slots(products: Sequence[Product]) -> list[Slot]:
    return [(value, stage) for value, stage, _ in products]
