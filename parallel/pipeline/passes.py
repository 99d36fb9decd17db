"""Passes: each takes a schedule and returns one with more, or merged, actions.

`lower` composes them into what the runtime executes. A pass sees one rank's (kind, stage) sequence and the
positions of its messages only, so the ranks r and p-1-r of a two-copy schedule, whose sequences are equal, get
their collectives in the same order; the verifier proves it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from parallel.pipeline.action import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from parallel.pipeline.dependencies import (
    Product,
    ScheduleError,
    Value,
    destination,
    each_leaf,
    gives,
    needs,
    receive_of,
    send_of,
    weights_read,
)
from parallel.pipeline.simulate import Costs, simulate


def lower(schedule: Schedule, *, zero_stage: int, reshard_after: str = "use") -> Schedule:
    """From compute actions to what the runtime executes.

    zero_stage: 3 adds UNSHARD and RESHARD; gradients are reduced at every stage.
    reshard_after: see `add_unshard`.

    Raises ValueError: an unknown `zero_stage` or `reshard_after`. ScheduleError: the schedule cannot run.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero.stage={zero_stage}: ZeRO has the stages 0 to 3; choose one of them")
    schedule = merge_backward(add_communication(schedule))
    if zero_stage == 3:
        schedule = add_unshard(schedule, reshard_after=reshard_after)
    return add_reduce_grad(schedule)


def add_communication(schedule: Schedule, *, receive_ahead: int = 1) -> Schedule:
    """Add a send after each action whose result another rank needs, and the receive before its use.

    A pair's receives stand before the pair, its sends after it.

    Note [Why no rank hangs]
    Messages are ordered by the time at which they are ready in a run with unit costs; of those ready at once, the
    ones to higher ranks come first, in the order of their sources, then the ones to lower ranks, in the opposite
    order. Every rank's sends follow that order, and a receive is posted before the first action that ends no
    sooner than its message is ready: so all that a message can wait for (its own rank's earlier actions and
    messages, its receive, and what stands before that on the receiver) comes strictly earlier in one order, and
    all of it comes to pass, even where sends block and all messages to one side share one in-order communicator.
    That holds for any compute schedule. A receive may then move `receive_ahead` compute actions ahead of its
    use, but never past a message of its own communicator, which would reorder it, nor past the forward of its
    micro-batch, which tells a gradient's shape.

    Raises ScheduleError: the compute actions cannot run in this order, or a result is never used.
    """
    assert all(action.kind in COMPUTE for actions in schedule.actions for action in actions)
    ends: list[list[float]] = [[] for _ in schedule.actions]
    for interval in simulate(schedule, Costs()).intervals:
        ends[interval.rank].append(interval.end)
    made_at = [_indices(actions, gives) for actions in schedule.actions]
    used_at = [
        _indices(actions, lambda action: needs(action, schedule.num_stages)) for actions in schedule.actions
    ]
    sends: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.actions]
    receives: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.actions]
    behind: dict[tuple[int, bool], int] = defaultdict(
        int
    )  # (rank, communicator) -> where its last message stands

    for message in _messages(schedule, ends):
        product, source, receiver = message.product, message.source, message.receiver
        value, stage, microbatch = product
        if product not in used_at[receiver]:
            raise ScheduleError(
                f"no action on rank {receiver} uses what rank {source} sends it: {send_of(product)}"
            )
        first = behind[receiver, message.upward]
        if value is Value.INPUT_GRADIENT:
            first = max(first, made_at[receiver][Value.ACTIVATION, stage - 1, microbatch] + 1)
        ready = bisect_left(ends[receiver], message.ready)
        post = max(first, min(ready, used_at[receiver][product] - receive_ahead))
        assert post <= ready
        sends[source][message.index].append(send_of(product))
        receives[receiver][post].append(receive_of(product))
        behind[source, message.upward] = message.index + 1
        behind[receiver, message.upward] = post

    return schedule.with_actions(
        [
            extended
            for index, action in enumerate(actions)
            for extended in (*receives[rank].get(index, ()), action, *sends[rank].get(index, ()))
        ]
        for rank, actions in enumerate(schedule.actions)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """`product`, made by the source's action `index` at the time `ready`."""

    product: Product
    source: int
    index: int
    receiver: int
    ready: float

    @property
    def upward(self) -> bool:
        """To a higher rank: which of the two communicators carries it."""
        return self.source < self.receiver


def _messages(schedule: Schedule, ends: Sequence[Sequence[float]]) -> list[_Message]:
    """Every message, in the order of Note [Why no rank hangs]."""
    messages = [
        _Message(product=product, source=rank, index=index, receiver=receiver, ready=ends[rank][index])
        for rank, actions in enumerate(schedule.actions)
        for index, action in enumerate(actions)
        for product in gives(action)
        if (receiver := destination(schedule, product)) is not None
    ]
    return sorted(
        messages,
        key=lambda message: (
            message.ready,
            not message.upward,
            message.source if message.upward else -message.source,
        ),
    )


def _indices(
    actions: Sequence[Action], products_of: Callable[[Action], Sequence[Product]]
) -> dict[Product, int]:
    return {product: index for index, action in enumerate(actions) for product in products_of(action)}


def merge_backward(schedule: Schedule) -> Schedule:
    """Merge I and W of one stage and micro-batch into B where only receives stand between them.

    Run it after `add_communication`: a send between I and W keeps them apart, so that no gradient waits for a
    weight gradient. The receives move ahead of the B, which posts them earlier and reorders no channel.
    """
    return schedule.with_actions(list(_merged(actions)) for actions in schedule.actions)


def _merged(actions: Sequence[Action]) -> Iterator[Action]:
    index = 0
    while index < len(actions):
        action = actions[index]
        index += 1
        if action.kind is Kind.I:
            after = index
            while after < len(actions) and actions[after].kind in RECEIVES:
                after += 1
            if after < len(actions) and actions[after] == Action(action.stage, Kind.W, action.microbatch):
                yield from actions[index:after]
                action = Action(action.stage, Kind.B, action.microbatch)
                index = after + 1
        yield action


def add_unshard(schedule: Schedule, reshard_after: str = "use", *, prefetch: int = 1) -> Schedule:
    """Add UNSHARD ahead of the first action that reads a stage's weights, RESHARD after the last.

    reshard_after: `use` reshards a stage after each use unless it is used again so soon that it would be
        gathered anew at once; `step` keeps it from its first use in the step to its last.
    prefetch: how many compute actions before its use a stage is unsharded.

    W reads no weights. At the end every stage is resharded.

    Raises ValueError: an unknown `reshard_after`.
    """
    if reshard_after not in ("use", "step"):
        raise ValueError(
            f"zero.reshard_after={reshard_after}: parameters are resharded after each `use` or after the `step`; "
            "choose one of them"
        )
    keep = prefetch + 1 if reshard_after == "use" else None
    return schedule.with_actions(_unsharding(actions, keep, prefetch) for actions in schedule.actions)


def _unsharding(actions: Sequence[Action], keep: int | None, prefetch: int) -> list[Action]:
    """One rank's list; a stage stays unsharded over gaps of at most `keep` compute actions (None: over all)."""
    unshard: dict[int, list[int]] = defaultdict(list)  # compute action -> stages to unshard before it
    reshard: dict[int, list[int]] = defaultdict(list)  # compute action -> stages to reshard after it
    last_use: dict[int, int] = {}
    compute = [action for action in actions if action.kind in COMPUTE]
    for index, action in enumerate(compute):
        for stage in dict.fromkeys(weights_read(action)):
            last = last_use.get(stage)
            if last is not None and keep is not None and index - last > keep:
                reshard[last].append(stage)
                last = None
            if last is None:
                unshard[max(0, index - prefetch)].append(stage)
            last_use[stage] = index
    for stage, last in last_use.items():
        reshard[last].append(stage)

    before: list[list[Action]] = []
    after: list[list[Action]] = []
    for index in range(len(compute)):
        before.append([Action(stage, Kind.UNSHARD) for stage in unshard.get(index, ())])
        after.append([Action(stage, Kind.RESHARD) for stage in reshard.get(index, ())])
    return _around_compute(actions, before, after)


def add_reduce_grad(schedule: Schedule) -> Schedule:
    """Add REDUCE_GRAD after each stage's last weight gradient on each rank, behind its sends and reshards."""
    return schedule.with_actions(_reducing(actions) for actions in schedule.actions)


def _reducing(actions: Sequence[Action]) -> list[Action]:
    compute = [action for action in actions if action.kind in COMPUTE]
    last: dict[int, int] = {}
    for index, leaf in each_leaf(compute):
        if any(value is Value.WEIGHT_GRADIENT for value, _, _ in gives(leaf)):
            last[leaf.stage] = index
    after: list[list[Action]] = [[] for _ in compute]
    for stage, index in last.items():
        after[index].append(Action(stage, Kind.REDUCE_GRAD))
    return _around_compute(actions, [[] for _ in compute], after)


def _around_compute(
    actions: Sequence[Action], before: Sequence[Sequence[Action]], after: Sequence[Sequence[Action]]
) -> list[Action]:
    """Insert `before[i]` right before the i-th compute action, `after[i]` behind the sends that follow it."""
    result: list[Action] = []
    pending: Sequence[Action] = ()
    index = 0
    for action in actions:
        if action.kind not in SENDS and action.kind is not Kind.RESHARD:
            result += pending
            pending = ()
        if action.kind in COMPUTE:
            result += [*before[index], action]
            pending = after[index]
            index += 1
        else:
            result.append(action)
    return [*result, *pending]


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a lowered `schedule`, in its order, with their communication: what evaluation executes.

    Where `schedule` unshards, a stage is whole from its first forward to its last.
    """
    forwards = schedule.with_actions(
        [leaf for action in actions for leaf in action.leaves if leaf.kind is Kind.F]
        for actions in schedule.actions
    )
    lowered = add_communication(forwards)
    is_sharded = any(action.kind is Kind.UNSHARD for actions in schedule.actions for action in actions)
    return add_unshard(lowered, reshard_after="step") if is_sharded else lowered
