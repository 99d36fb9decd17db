"""Passes: each takes a schedule and returns one with more, or merged, actions.

`lower` composes them into what the runtime executes. A pass sees one rank's (kind, stage) sequence and the
positions of its messages only, so the ranks r and p-1-r of a two-copy schedule, whose sequences are equal, get
their collectives in the same order; the verifier proves it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.ir.action import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.arrays import Leaves, Products, leaves_of
from counterflow.parallel.pipeline.ir.dependencies import (
    RULES,
    ScheduleError,
    Value,
    destination,
    each_leaf,
    gives,
    receive_of,
    send_of,
    weights_read,
)

_WEIGHT_GRADIENTS = frozenset(kind for kind, rule in RULES.items() if Value.WEIGHT_GRADIENT in rule.gives)


def lower(
    schedule: Schedule,
    *,
    zero_stage: int,
    reshard_after: str | Sequence[str] = "use",
    early_sends: bool = False,
    overlap: bool = False,
) -> Schedule:
    """From compute actions to what the runtime executes.

    zero_stage: 3 adds UNSHARD and RESHARD; gradients are reduced at every stage.
    reshard_after: see `add_unshard`. early_sends: see `send_early`.
    overlap: the runtime runs the halves of a pair together (parallel/pipeline/runtime/overlap.py), so pairs stay
        whole, and schedules that say `pairs_chunks` get some.

    Raises ValueError: an unknown `zero_stage` or `reshard_after`. ScheduleError: the schedule cannot run.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero.stage={zero_stage}: ZeRO has the stages 0 to 3; choose one of them")
    if overlap and schedule.pairs_chunks:
        schedule = pair_chunks(schedule)
    if early_sends:
        schedule = send_early(schedule, keep_pairs=overlap)
    schedule = merge_backward(add_communication(schedule))
    if zero_stage == 3:
        schedule = add_unshard(schedule, reshard_after=reshard_after)
    return add_reduce_grad(schedule)


def pair_chunks(schedule: Schedule) -> Schedule:
    """Make every backward and the forward right after it an overlapped pair, where a rank has several stages.

    Not the forward before it: in the steady state of interleaved 1F1B the last rank's backward needs that one. The
    pairs therefore leave each rank one more forward ahead, whose activations it holds.
    """
    if schedule.num_stages == schedule.num_ranks:
        # In 1F1B a forward comes from the turn before: a pair would wait for it every other turn.
        return schedule
    return schedule.with_actions(list(_paired(actions)) for actions in schedule.actions)


def _paired(actions: Sequence[Action]) -> Iterator[Action]:
    index = 0
    while index < len(actions):
        action = actions[index]
        follower = actions[index + 1] if index + 1 < len(actions) else action
        if action.kind is Kind.B and follower.kind is Kind.F:
            yield Action.pair(follower, action)
            index += 2
        else:
            yield action
            index += 1


def why_not_overlapped(schedule: Schedule) -> str | None:
    """Why `schedule` hides no token exchange, in words for a log; None where it has pairs."""
    if any(action.kind is Kind.OVERLAP_F_B for actions in schedule.actions for action in actions):
        return None
    return (
        f"schedule {schedule.name} has no pairs of a forward and a backward, so every exchange of tokens is waited for "
        "(expert_wait in the record); choose a schedule that has pairs, such as dualpipe"
    )


def send_early(schedule: Schedule, *, keep_pairs: bool = False) -> Schedule:
    """Let every result leave as soon as it is there: the order of the work stays, what waits for it starts earlier.

    A backward whose gradient goes to another rank becomes I, whose result is sent, and W right after it; a pair
    is taken apart, so that its activation leaves before its backward runs. The price is memory: between I and W a
    rank keeps what the weight gradients of one more micro-batch need.

    keep_pairs: leave pairs whole, for their halves truly run together.
    """
    return schedule.with_actions(
        [
            part
            for action in actions
            for leaf in ((action,) if keep_pairs else action.leaves)
            for part in (_split(leaf) if _leaves_rank(schedule, leaf) else (leaf,))
        ]
        for actions in schedule.actions
    )


def _leaves_rank(schedule: Schedule, leaf: Action) -> bool:
    return leaf.kind is Kind.B and any(destination(schedule, product) is not None for product in gives(leaf))


def _split(leaf: Action) -> tuple[Action, Action]:
    return Action(leaf.stage, Kind.I, leaf.microbatch), Action(leaf.stage, Kind.W, leaf.microbatch)


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
    leaves, products = leaves_of(schedule.actions), Products(schedule)
    assert leaves.where(*RULES).all(), "communication is added once"
    ends = simulate(schedule, Costs()).ends
    bounds: list[int] = leaves.offsets.tolist()
    sends: list[list[Action] | None] = [None] * leaves.num_actions
    receives: list[list[Action] | None] = [None] * leaves.num_actions
    behind = [[0, 0] for _ in schedule.actions]  # by rank and communicator: where its last message stands
    for message in _messages(schedule, leaves, products, ends):
        number, source, made, receiver, used, earliest, ready = message
        product, upward = products.product(number), source < receiver
        if used < 0:
            raise ScheduleError(
                f"no action on rank {receiver} uses what rank {source} sends it: {send_of(product)}"
            )
        at_ready = bisect_left(ends[receiver], ready)
        post = max(behind[receiver][upward], earliest, min(at_ready, used - receive_ahead))
        assert post <= at_ready
        _append(sends, bounds[source] + made, send_of(product))
        _append(receives, bounds[receiver] + post, receive_of(product))
        behind[source][upward] = made + 1
        behind[receiver][upward] = post

    result: list[list[Action]] = []
    for rank, actions in enumerate(schedule.actions):
        extended: list[Action] = []
        for number, action in enumerate(actions, start=bounds[rank]):
            extended += receives[number] or ()
            extended.append(action)
            extended += sends[number] or ()
        result.append(extended)
    return schedule.with_actions(result)


def _append(lists: list[list[Action] | None], index: int, action: Action) -> None:
    of_index = lists[index]
    if of_index is None:
        lists[index] = [action]
    else:
        of_index.append(action)


def _messages(
    schedule: Schedule, leaves: Leaves, products: Products, ends: Sequence[Sequence[float]]
) -> Iterator[tuple[int, int, int, int, int, int, float]]:
    """Every message, in the order of Note [Why no rank hangs].

    (product, source, index there of its maker, receiver, index there of its user or -1, index there from which a
    receive may stand, time at which it is ready).
    """
    leaf, product = products.given(leaves)
    is_sent = products.receiver[product] >= 0
    order = np.argsort(leaf[is_sent], kind="stable")
    action, product = leaves.action[leaf[is_sent]][order], product[is_sent][order]
    source, receiver = products.holder[product], products.receiver[product]

    users = np.full(products.count, -1, dtype=np.int64)
    leaf, needed = products.needed(leaves)
    crosses = products.receiver[needed] == leaves.rank[leaf]
    users[needed[crosses]] = leaves.action[leaf[crosses]] - leaves.offsets[leaves.rank[leaf[crosses]]]

    # The shape of a gradient is that of the activation which the receiver made before.
    earliest = np.zeros_like(product)
    gradients = product // (products.count // len(Value)) == Value.INPUT_GRADIENT
    boundary = products.boundary[product[gradients]]
    activation = products.number(Value.ACTIVATION, boundary, product[gradients] % products.num_microbatches)
    made = products.makers(leaves)[activation]
    earliest[gradients] = made + 1 - leaves.offsets[receiver[gradients]]

    ready = np.fromiter(chain.from_iterable(ends), np.float64, leaves.num_actions)[action]
    is_upward = source < receiver
    order = np.lexsort((np.where(is_upward, source, -source), ~is_upward, ready))
    columns = (product, source, action - leaves.offsets[source], receiver, users[product], earliest, ready)
    return zip(*(column[order].tolist() for column in columns), strict=True)


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


def add_unshard(
    schedule: Schedule, reshard_after: str | Sequence[str] = "use", *, prefetch: int = 1
) -> Schedule:
    """Add UNSHARD ahead of the first action that reads a stage's weights, RESHARD after the last.

    reshard_after: `use` reshards a stage after each use unless it is used again so soon that it would be
        gathered anew at once; `backward` does so while no forward waits for its backward; `step` keeps it from its
        first use in the step to its last. A sequence has one for each rank.
    prefetch: how many compute actions before its use a stage is unsharded.

    W reads no weights. At the end every stage is resharded.

    Raises ValueError: an unknown `reshard_after`.
    """
    of_ranks = [reshard_after] * schedule.num_ranks if isinstance(reshard_after, str) else reshard_after
    for each in of_ranks:
        if each not in ("use", "backward", "step"):
            raise ValueError(
                f"zero.reshard_after={each}: parameters are resharded after each `use`, after the last `backward` "
                "that waits, or after the `step`; choose one of them"
            )
    return schedule.with_actions(
        _unsharding(actions, None if each == "step" else prefetch + 1, prefetch, waits=each == "backward")
        for actions, each in zip(schedule.actions, of_ranks, strict=True)
    )


def _unsharding(
    actions: Sequence[Action], keep: int | None, prefetch: int, *, waits: bool = False
) -> list[Action]:
    """One rank's list; a stage stays unsharded over gaps of at most `keep` compute actions (None: over all).

    waits: and over those in which a forward of it waits for its backward.
    """
    unshard: dict[int, list[int]] = defaultdict(list)  # compute action -> stages to unshard before it
    reshard: dict[int, list[int]] = defaultdict(list)  # compute action -> stages to reshard after it
    last_use: dict[int, int] = {}
    waiting: dict[int, int] = defaultdict(int)  # stage -> forwards without a backward yet
    compute = [action for action in actions if action.kind in COMPUTE]
    for index, action in enumerate(compute):
        for stage in dict.fromkeys(weights_read(action)):
            last = last_use.get(stage)
            is_held = waits and waiting[stage] > 0
            if last is not None and keep is not None and index - last > keep and not is_held:
                reshard[last].append(stage)
                last = None
            if last is None:
                unshard[max(0, index - prefetch)].append(stage)
            last_use[stage] = index
        for leaf in action.leaves:
            waiting[leaf.stage] += (leaf.kind is Kind.F) - (leaf.kind in (Kind.B, Kind.I))
    for stage, last in last_use.items():
        reshard[last].append(stage)

    return around_compute(
        actions,
        {index: [Action(stage, Kind.UNSHARD) for stage in stages] for index, stages in unshard.items()},
        {index: [Action(stage, Kind.RESHARD) for stage in stages] for index, stages in reshard.items()},
    )


def passes_after(actions: Sequence[Action]) -> dict[int, tuple[Kind, ...]]:
    """By the index of each UNSHARD of a rank's list: the actions that read the weights until the RESHARD, by kind."""
    found: dict[int, list[Kind]] = {}
    since: dict[int, int] = {}
    for index, action in enumerate(actions):
        if action.kind is Kind.UNSHARD:
            since[action.stage] = index
            found[index] = []
        elif action.kind is Kind.RESHARD:
            since.pop(action.stage, None)
        for leaf in action.leaves:
            if leaf.kind in (Kind.F, Kind.B, Kind.I) and leaf.stage in since:
                found[since[leaf.stage]].append(leaf.kind)
    return {index: tuple(kinds) for index, kinds in found.items()}


def add_reduce_grad(schedule: Schedule) -> Schedule:
    """Add REDUCE_GRAD after each stage's last weight gradient on each rank, behind its sends and reshards."""
    return schedule.with_actions(_reducing(actions) for actions in schedule.actions)


def _reducing(actions: Sequence[Action]) -> list[Action]:
    compute = [action for action in actions if action.kind in COMPUTE]
    last = {leaf.stage: index for index, leaf in each_leaf(compute) if leaf.kind in _WEIGHT_GRADIENTS}
    after: dict[int, list[Action]] = defaultdict(list)
    for stage, index in last.items():
        after[index].append(Action(stage, Kind.REDUCE_GRAD))
    return around_compute(actions, {}, after)


def around_compute(
    actions: Sequence[Action], before: Mapping[int, Sequence[Action]], after: Mapping[int, Sequence[Action]]
) -> list[Action]:
    """Insert `before[i]` right before the i-th compute action, `after[i]` behind the sends that follow it."""
    result: list[Action] = []
    pending: Sequence[Action] = ()
    index = 0
    for action in actions:
        if pending and action.kind not in SENDS and action.kind is not Kind.RESHARD:
            result += pending
            pending = ()
        if action.kind in COMPUTE:
            result += before.get(index, ())
            pending = after.get(index, ())
            index += 1
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
