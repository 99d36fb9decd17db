"""What the first use of channels and kernels makes a rank wait for, and the schedules that would hang in it.

Note [First uses]
The verifier takes for granted that a rank hands a receive over and goes on. On a GPU two first uses do not let it:

- NCCL connects two ranks at their first message, within the call: the host rests there until the other end has come.
- A kernel that is run for the first time may be loaded then, and an allocation may be retried after a `cudaFree`: both
  wait for all that the device has been given, and a message is a kernel that spins until its other end has come.

Neither is in a schedule's control, so both are over before the first step: each channel is used once, in one order on
all ranks (`opening`), and then every stage runs one micro-batch, in a schedule that never posts a receive ahead of a
computation that does not need it (`serial`). `stuck` is the model in which that is shown to be enough, and needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from counterflow.parallel.pipeline.analysis.passes import add_reduce_grad, add_unshard
from counterflow.parallel.pipeline.ir.action import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Schedule,
)
from counterflow.parallel.pipeline.ir.dependencies import (
    ROUTES,
    Value,
    channel_of,
    needs,
    receive_of,
    send_of,
)

Flow = tuple[int, int, int, bool]
"""(source rank, destination rank, receiving stage, whether activations flow)."""

_Message = tuple[Flow, int | None]


class Waits(Enum):
    """Which computations wait for all messages of their rank: none, those of a kind new to the rank, or all."""

    NEVER = "never"
    FIRST = "first"
    ALWAYS = "always"


def opening(schedule: Schedule, flows: Sequence[Flow]) -> Schedule:
    """One message over each of the channels `flows` of `schedule`, on every rank in this order.

    Of the channels that are not through, the first has both its ranks at it: so all come to their end.
    """
    actions: list[list[Action]] = [[] for _ in schedule.actions]
    for source, destination, stage, forward in flows:
        step, kinds = (1, (Kind.SEND_F, Kind.RECV_F)) if forward else (-1, (Kind.SEND_B, Kind.RECV_B))
        microbatch = next(
            number
            for number in range(schedule.num_microbatches)
            if (schedule.rank_of(stage - step, number), schedule.rank_of(stage, number))
            == (source, destination)
        )
        actions[source].append(Action(stage - step, kinds[0], microbatch))
        actions[destination].append(Action(stage, kinds[1], microbatch))
    return schedule.with_actions(actions)


def serial(schedule: Schedule) -> Schedule:
    """One micro-batch in each direction of a lowered `schedule`, through all stages and back; executable.

    Each message stands between the computation that makes it and the one that needs it on both of its ranks, and all
    messages have one order: no computation has a receive before it that it does not need. All directions take each
    step together, so that both ranks of a mirror pair come to their stages in one order. The stages are sharded
    between uses where those of `schedule` are.
    """
    last = schedule.num_stages - 1
    actions: list[list[Action]] = [[] for _ in schedule.actions]

    def compute(stage: int, kind: Kind) -> None:
        for direction, ranks in enumerate(schedule.placement):
            actions[ranks[stage]].append(Action(stage, kind, direction))

    def pass_on(stage: int, value: Value) -> None:
        for direction, ranks in enumerate(schedule.placement):
            product = (value, stage, direction)
            source, destination = ranks[stage], ranks[stage + ROUTES[value].step]
            if source != destination:
                actions[source].append(send_of(product))
                actions[destination].append(receive_of(product))

    for stage in range(schedule.num_stages):
        compute(stage, Kind.F)
        if stage < last:
            pass_on(stage, Value.ACTIVATION)
    for stage in reversed(range(schedule.num_stages)):
        compute(stage, Kind.I)
        if stage > 0:
            pass_on(stage, Value.INPUT_GRADIENT)
        compute(stage, Kind.W)
    found = Schedule(
        name=f"{schedule.name}, one by one",
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_directions,
        placement=schedule.placement,
        actions=tuple(map(tuple, actions)),
    )
    if any(action.kind is Kind.UNSHARD for actions in schedule.actions for action in actions):
        found = add_unshard(found, prefetch=0)
    return add_reduce_grad(found)


def stuck(
    schedule: Schedule, *, opens: bool = False, waits: Waits = Waits.NEVER
) -> tuple[tuple[int, Action], ...]:
    """The rank and action where each rank that does not come to its end rests for good; empty: all do.

    opens: a channel's first message keeps its ranks until both have come to it. waits: see `Waits`.
    """
    ranks = range(schedule.num_ranks)
    position = [0 for _ in ranks]
    issued = {kinds: set[_Message]() for kinds in (SENDS, RECEIVES)}
    opened = set[Flow]()
    seen = [set[Kind]() for _ in ranks]
    under_way = [dict[Action, _Message]() for _ in ranks]

    def other_end(action: Action) -> set[_Message]:
        return issued[RECEIVES if action.kind in SENDS else SENDS]

    def communicates(rank: int, action: Action) -> bool:
        flow = _flow(schedule, action)
        message = (flow, action.microbatch)
        issued[SENDS if action.kind in SENDS else RECEIVES].add(message)
        under_way[rank][action] = message
        if opens and flow not in opened and message not in other_end(action):
            return False
        opened.add(flow)
        return True

    def computes(rank: int, action: Action) -> bool:
        running = {each for each, message in under_way[rank].items() if message not in other_end(each)}
        under_way[rank] = {each: under_way[rank][each] for each in running}
        is_new = any(leaf.kind not in seen[rank] for leaf in action.leaves)
        awaited = running
        if waits is Waits.NEVER or (waits is Waits.FIRST and not is_new):
            products = needs(action, schedule.num_stages)
            awaited = running & {receive_of(product) for product in products if product[0] in ROUTES}
        if awaited:
            return False
        seen[rank].update(leaf.kind for leaf in action.leaves)
        return True

    def goes_on(rank: int, action: Action) -> bool:
        if action.kind in SENDS or action.kind in RECEIVES:
            return communicates(rank, action)
        return action.kind not in COMPUTE or computes(rank, action)

    moved = True
    while moved:
        moved = False
        for rank in ranks:
            actions = schedule.actions[rank]
            while position[rank] < len(actions) and goes_on(rank, actions[position[rank]]):
                position[rank] += 1
                moved = True
    return tuple(
        (rank, schedule.actions[rank][position[rank]])
        for rank in ranks
        if position[rank] < len(schedule.actions[rank])
    )


def _flow(schedule: Schedule, action: Action) -> Flow:
    source, destination = channel_of(schedule, action)
    step = {Kind.SEND_F: 1, Kind.SEND_B: -1}.get(action.kind, 0)
    return source, destination, action.stage + step, action.kind in (Kind.SEND_F, Kind.RECV_F)
