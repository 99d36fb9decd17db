"""Passes: each takes a schedule and returns one with more, or merged, actions.

`lower` composes them into what the runtime executes. A pass sees one rank's (kind, stage) sequence and the
positions of its messages only, so the ranks r and p-1-r of a two-copy schedule, whose sequences are equal, get
their collectives in the same order; the verifier proves it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

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

    A pair's receives stand before the pair, its sends after it. Receives of one channel are posted in the order
    of its sends. Each is posted `receive_ahead` compute actions before its use, or earlier where the message is
    ready earlier: before any action of the receiver that ends no sooner than the sender's, in a run with unit
    costs. So every send, taken in the order of that run, finds its receive posted or waits for actions that end
    strictly earlier, and no rank hangs even if sends block until received (as on NCCL), for any schedule. A
    gradient's receive stands behind the forward of its micro-batch, which tells its shape.

    Raises ScheduleError: the compute actions cannot run in this order, or a result is never used.
    """
    assert all(action.kind in COMPUTE for actions in schedule.actions for action in actions)
    ends: list[list[float]] = [[] for _ in schedule.actions]
    for interval in simulate(schedule, Costs()).intervals:
        ends[interval.rank].append(interval.end)
    receives: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.actions]
    made_at = [_indices(actions, gives) for actions in schedule.actions]
    used_at = [
        _indices(actions, lambda action: needs(action, schedule.num_stages)) for actions in schedule.actions
    ]

    # By stage and value, not by rank: mirror ranks then post the receives of one slot in the same order.
    channels = sorted(_messages(schedule).items(), key=lambda item: (item[1][0][0][1::-1], item[0]))
    for (source, receiver), messages in channels:
        posts: list[int] = []
        floor = 0
        for product, index in messages:
            value, stage, microbatch = product
            if product not in used_at[receiver]:
                raise ScheduleError(
                    f"no action on rank {receiver} uses what {schedule.actions[source][index]} of rank {source} "
                    "sends it"
                )
            if value is Value.INPUT_GRADIENT:
                floor = max(floor, made_at[receiver][Value.ACTIVATION, stage - 1, microbatch] + 1)
            ready = bisect_left(ends[receiver], ends[source][index])
            posts.append(max(floor, min(used_at[receiver][product] - receive_ahead, ready)))
        latest = posts[-1]
        for position in reversed(range(len(posts))):
            posts[position] = latest = min(latest, posts[position])
        for (product, _), post in zip(messages, posts, strict=True):
            receives[receiver][post].append(receive_of(product))

    return schedule.with_actions(
        [
            extended
            for index, action in enumerate(actions)
            for extended in (*receives[rank].get(index, ()), action, *_sends_after(schedule, action))
        ]
        for rank, actions in enumerate(schedule.actions)
    )


def _sends_after(schedule: Schedule, action: Action) -> list[Action]:
    return [send_of(product) for product in gives(action) if destination(schedule, product) is not None]


def _messages(schedule: Schedule) -> dict[tuple[int, int], list[tuple[Product, int]]]:
    """For each (source rank, destination rank): the products sent, in order, and the source's action's index."""
    messages: dict[tuple[int, int], list[tuple[Product, int]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            for product in gives(action):
                receiver = destination(schedule, product)
                if receiver is not None:
                    messages[rank, receiver].append((product, index))
    return messages


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
