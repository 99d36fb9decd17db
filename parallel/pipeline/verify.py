"""Prove that a schedule is complete, in order, free of deadlock and within a memory bound, before it runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NoReturn

from parallel.pipeline.action import COMPUTE, RECEIVES, SENDS, STAGE_WIDE, Action, Kind, Schedule
from parallel.pipeline.dependencies import (
    Mark,
    Product,
    ScheduleError,
    Value,
    carried,
    channel_of,
    destination,
    each_leaf,
    gives,
    microbatch_of,
    needs,
    receive_of,
    replay,
    send_of,
    weights_read,
)
from parallel.pipeline.simulate import peak_live
from parallel.pipeline.text import grid

__all__ = ["Report", "ScheduleError", "verify"]

# Actions in which every holder of a stage takes part, in one order; RESHARD frees memory without a message.
COLLECTIVES = frozenset({Kind.UNSHARD, Kind.REDUCE_GRAD})

_VALUE_NAMES = {
    Value.ACTIVATION: ("activation", (Kind.F,)),
    Value.INPUT_GRADIENT: ("input gradient", (Kind.B, Kind.I)),
    Value.WEIGHT_GRADIENT: ("weight gradient", (Kind.B, Kind.W)),
}

Place = tuple[int, int]
"""(rank, index in its list)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a verified schedule needs; tuples have one entry per rank.

    executable: whether it has the actions that `lower` adds; otherwise it has compute actions only.
    peak_activations, peak_held_weight_gradients: see `simulate.peak_live`.
    peak_unsharded_stages: most stages that are whole at once (stages that are never sharded do not count).
    num_messages: sends between ranks.
    """

    executable: bool
    peak_activations: tuple[int, ...]
    peak_held_weight_gradients: tuple[int, ...]
    peak_unsharded_stages: tuple[int, ...]
    num_messages: int


def verify(schedule: Schedule, *, max_live_activations: int | None = None) -> Report:
    """Check every rule; linear in the number of actions.

    Always: every stage and micro-batch has one F and either one B or one I and one W, on the rank that holds
    it; the ranks' lists, taken together with what each action needs, come to their end; no rank holds more
    than `max_live_activations`.

    With any action that passes add (an executable schedule), also: each value that another rank needs is sent
    and received once, in one order per channel; the lists come to their end with buffered sends (gloo), and with
    sends that wait for their receive on one in-order communicator per direction (NCCL); every use of a stage
    finds it unsharded, where the schedule unshards at all, and the end finds it resharded; each holder of a
    stage reduces its gradients once, after the last; the holders of a stage run their collectives in one order.

    Raises ScheduleError (a ValueError): the first broken rule, the action, and the grid around it.
    """
    executable = any(action.kind not in COMPUTE for actions in schedule.actions for action in actions)
    _check_actions(schedule)
    producers = _check_counts(schedule)
    places: dict[Action, Place] = {}
    if executable:
        places = _check_messages(schedule, producers)
        _check_collectives(schedule)
        _check_reductions(schedule)
    _check_order(schedule, producers, places)
    unsharded = _check_unsharded(schedule)
    peaks = [peak_live(actions) for actions in schedule.actions]
    for rank, (activations, _) in enumerate(peaks):
        if max_live_activations is not None and activations > max_live_activations:
            _fail(
                schedule,
                f"rank {rank} holds {activations} live activations at once, the bound is {max_live_activations}",
                (rank, _first_above(schedule.actions[rank], max_live_activations)),
            )
    return Report(
        executable=executable,
        peak_activations=tuple(activations for activations, _ in peaks),
        peak_held_weight_gradients=tuple(held for _, held in peaks),
        peak_unsharded_stages=unsharded,
        num_messages=sum(action.kind in SENDS for actions in schedule.actions for action in actions),
    )


def _fail(schedule: Schedule, rule: str, place: Place | None = None) -> NoReturn:
    at = ""
    if place is not None and place[1] < len(schedule.actions[place[0]]):
        at = f" (rank {place[0]}, step {place[1]}: {schedule.actions[place[0]][place[1]]})"
    raise ScheduleError(f"schedule {schedule.name}: {rule}{at}\n{grid(schedule, mark=place)}")


def _check_actions(schedule: Schedule) -> None:
    """Every action exists, and is on a rank that holds its stage for its micro-batch."""
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    if num_microbatches < 1 or num_microbatches % schedule.num_directions:
        _fail(
            schedule,
            f"{num_microbatches} micro-batches are no equal shares of {schedule.num_directions} directions",
        )
    for ranks in schedule.placement:
        if len(ranks) != num_stages or not all(0 <= rank < schedule.num_ranks for rank in ranks):
            _fail(
                schedule, f"placement {ranks} does not put {num_stages} stages on {schedule.num_ranks} ranks"
            )
    replicas = [schedule.replicas_of(stage) for stage in range(num_stages)]
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.kind is Kind.OVERLAP_F_B and [leaf.kind for leaf in action.parts] != [Kind.F, Kind.B]:
                _fail(schedule, "a pair is one F and one B, in this order", (rank, index))
            for leaf in action.leaves:
                place = (rank, index)
                if leaf.kind in (Kind.OFFLOAD, Kind.RELOAD):
                    _fail(schedule, f"there is no rule for {leaf.kind} yet", place)
                if not 0 <= leaf.stage < num_stages:
                    _fail(schedule, f"{leaf} is on a stage outside 0..{num_stages - 1}", place)
                if leaf.kind in STAGE_WIDE:
                    if leaf.microbatch is not None:
                        _fail(schedule, f"{leaf.kind} is on a whole stage and has no micro-batch", place)
                    if rank not in replicas[leaf.stage]:
                        _fail(schedule, f"{leaf} is on a rank that does not hold stage {leaf.stage}", place)
                    continue
                if leaf.microbatch is None or not 0 <= leaf.microbatch < num_microbatches:
                    _fail(schedule, f"{leaf} has a micro-batch outside 0..{num_microbatches - 1}", place)
                holder = schedule.rank_of(leaf.stage, microbatch_of(leaf))
                if holder != rank:
                    _fail(schedule, f"{leaf} is on rank {rank}, its stage is on rank {holder}", place)


def _check_counts(schedule: Schedule) -> dict[Product, Place]:
    """Every product of every stage and micro-batch is made once; where."""
    producers: dict[Product, Place] = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.kind not in COMPUTE:
                continue
            for product in gives(action):
                if product in producers:
                    _fail(schedule, f"the {_describe(product)} is computed twice", (rank, index))
                producers[product] = (rank, index)
    if len(producers) < len(Value) * schedule.num_stages * schedule.num_microbatches:
        missing = next(
            (value, stage, microbatch)
            for stage in range(schedule.num_stages)
            for microbatch in range(schedule.num_microbatches)
            for value in Value
            if (value, stage, microbatch) not in producers
        )
        rank = schedule.rank_of(missing[1], missing[2])
        _fail(schedule, f"the {_describe(missing)} is never computed on rank {rank}")
    return producers


def _describe(product: Product) -> str:
    value, stage, microbatch = product
    name, kinds = _VALUE_NAMES[value]
    makers = " or ".join(str(Action(stage, kind, microbatch)) for kind in kinds)
    return f"{name} of stage {stage} for micro-batch {microbatch} ({makers})"


def _check_messages(schedule: Schedule, producers: dict[Product, Place]) -> dict[Action, Place]:
    """Sends and receives pair off, in one order per channel; where each of them is."""
    places: dict[Action, Place] = {}
    sent: dict[tuple[int, int], list[Place]] = defaultdict(list)
    received: dict[tuple[int, int], list[Place]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.kind not in SENDS and action.kind not in RECEIVES:
                continue
            place = (rank, index)
            product = carried(action)
            if product not in producers or destination(schedule, product) is None:
                _fail(schedule, f"{action} carries nothing that another rank needs", place)
            if action in places:
                _fail(schedule, f"{action} stands twice", place)
            places[action] = place
            (sent if action.kind in SENDS else received)[channel_of(schedule, action)].append(place)
    for product, place in producers.items():
        if destination(schedule, product) is None:
            continue
        for action in (send_of(product), receive_of(product)):
            if action not in places:
                _fail(schedule, f"{action} is missing, so the {_describe(product)} never arrives", place)
    for channel in sent:
        for source, target in zip(sent[channel], received[channel], strict=True):
            send, receive = (schedule.actions[rank][index] for rank, index in (source, target))
            if carried(send) != carried(receive):
                _fail(
                    schedule,
                    f"rank {source[0]} sends {send} where rank {target[0]} receives {receive}: "
                    "one channel needs one order",
                    target,
                )
    return places


def _collectives(schedule: Schedule) -> dict[tuple[int, ...], dict[int, list[Place]]]:
    """For each set of ranks that hold a stage together: each rank's collectives over it, in order."""
    groups: dict[tuple[int, ...], dict[int, list[Place]]] = {}
    replicas = [schedule.replicas_of(stage) for stage in range(schedule.num_stages)]
    for group in replicas:
        groups[group] = {rank: [] for rank in group}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.kind in COLLECTIVES:
                groups[replicas[action.stage]][rank].append((rank, index))
    return groups


def _check_collectives(schedule: Schedule) -> None:
    """The holders of a stage run the collectives over it in the same order."""
    for group, of_rank in _collectives(schedule).items():
        first, *others = group
        for other in others:
            mine, theirs = of_rank[first], of_rank[other]
            for position in range(max(len(mine), len(theirs))):
                ends = [places[position] if position < len(places) else None for places in (mine, theirs)]
                actions = [schedule.actions[end[0]][end[1]] if end is not None else None for end in ends]
                if actions[0] != actions[1]:
                    _fail(
                        schedule,
                        f"ranks {first} and {other} hold copies of the same stages, but collective {position} of "
                        f"rank {first} is {actions[0]} where rank {other} has {actions[1]}",
                        ends[1] or ends[0],
                    )


def _check_reductions(schedule: Schedule) -> None:
    """Each holder of a stage reduces its gradients once, after its last weight gradient."""
    for rank, actions in enumerate(schedule.actions):
        reduced: dict[int, int] = {}
        for index, leaf in each_leaf(actions):
            if leaf.kind is Kind.REDUCE_GRAD:
                if leaf.stage in reduced:
                    _fail(schedule, f"stage {leaf.stage} is reduced twice", (rank, index))
                reduced[leaf.stage] = index
            elif leaf.kind in (Kind.B, Kind.W) and leaf.stage in reduced:
                _fail(schedule, f"{leaf} comes after the reduction of stage {leaf.stage}", (rank, index))
        for stage in schedule.stages_of(rank):
            if stage not in reduced:
                _fail(
                    schedule, f"rank {rank} never reduces the gradients of stage {stage} ({stage}REDUCE_GRAD)"
                )


def _check_unsharded(schedule: Schedule) -> tuple[int, ...]:
    """Stages are whole when they are used and sharded in the end; most that are whole at once, per rank."""
    sharded = any(
        action.kind in (Kind.UNSHARD, Kind.RESHARD) for actions in schedule.actions for action in actions
    )
    peaks: list[int] = []
    for rank, actions in enumerate(schedule.actions):
        whole: set[int] = set()
        peak = 0
        for index, action in enumerate(actions):
            place = (rank, index)
            if action.kind is Kind.UNSHARD:
                if action.stage in whole:
                    _fail(schedule, f"stage {action.stage} is unsharded already", place)
                whole.add(action.stage)
                peak = max(peak, len(whole))
            elif action.kind is Kind.RESHARD:
                if action.stage not in whole:
                    _fail(schedule, f"stage {action.stage} is sharded already", place)
                whole.remove(action.stage)
            elif sharded and action.kind in COMPUTE:
                for stage in weights_read(action):
                    if stage not in whole:
                        _fail(schedule, f"{action} uses stage {stage} while it is sharded", place)
        if whole:
            _fail(schedule, f"rank {rank} ends with stage {min(whole)} unsharded")
        peaks.append(peak)
    return tuple(peaks)


def _check_order(schedule: Schedule, producers: dict[Product, Place], places: dict[Action, Place]) -> None:
    """The lists come to their end under each transport.

    What ends on the ordered transport ends with buffered sends too, which wait for less: a sound schedule is
    replayed once, and a stuck one a second time, to say where it hangs.
    """
    buffered = _marks(schedule, producers, places)
    waits = _with_ordered_transport(schedule, buffered, places)
    done = replay(schedule.actions, waits)
    if _finished(schedule, done):
        return
    rule = (
        "the ranks hang on one in-order communicator per direction where sends wait for their receives (NCCL), "
        "though not with buffered sends (gloo)"
    )
    done_buffered = replay(schedule.actions, buffered)
    if not _finished(schedule, done_buffered):
        rule = "the ranks wait for each other, or an action comes before what it needs"
        waits, done = buffered, done_buffered
    stuck = [rank for rank in range(schedule.num_ranks) if done[rank] < len(schedule.actions[rank])]
    _fail(
        schedule,
        f"{rule}: "
        + "; ".join(_waiting(schedule, rank, done, waits[rank][done[rank]]) for rank in stuck[:8]),
        (stuck[0], done[stuck[0]]),
    )


def _finished(schedule: Schedule, done: list[int]) -> bool:
    return all(count == len(actions) for count, actions in zip(done, schedule.actions, strict=True))


def _waiting(schedule: Schedule, rank: int, done: list[int], marks: list[Mark]) -> str:
    peer, count = next(mark for mark in marks if done[mark[0]] < mark[1])
    awaited = schedule.actions[peer][count - 1]
    return f"rank {rank} at {schedule.actions[rank][done[rank]]} waits for {awaited} of rank {peer}"


def _marks(
    schedule: Schedule, producers: dict[Product, Place], places: dict[Action, Place]
) -> list[list[list[Mark]]]:
    """What each action waits for, with buffered sends."""
    waits: list[list[list[Mark]]] = []
    for rank, actions in enumerate(schedule.actions):
        of_rank: list[list[Mark]] = []
        for action in actions:
            marks: list[Mark] = []
            if action.kind in COMPUTE:
                for product in needs(action, schedule.num_stages):
                    source, index = producers[product]
                    if source != rank and places:
                        # The receive must be posted here, and the send issued there.
                        for message in (receive_of(product), send_of(product)):
                            peer, position = places[message]
                            marks.append((peer, position + 1))
                    else:
                        marks.append((source, index + 1))
            elif action.kind in SENDS:
                source, index = producers[carried(action)]
                marks.append((source, index + 1))
            of_rank.append(marks)
        waits.append(of_rank)
    for of_group in _collectives(schedule).values():
        for together in zip(*of_group.values(), strict=True):
            for rank, index in together:
                waits[rank][index] += [(peer, position) for peer, position in together if peer != rank]
    return waits


def _with_ordered_transport(
    schedule: Schedule, waits: list[list[list[Mark]]], places: dict[Action, Place]
) -> list[list[list[Mark]]]:
    """`waits`, and what a send waits for where messages go one at a time.

    A rank has two communicators, to and from higher and lower ranks by the direction of travel. Each takes its
    sends and receives in the order of the rank's list, the next once the last is through; a message goes
    through when it is the turn of both its send and its receive, and the rank rests in the send until then.
    """
    sent_at: dict[Place, Mark] = {}  # a receive -> when its message is through
    turn: dict[Place, Mark | None] = {}  # a message's action -> when the one before it is through
    for action, place in places.items():
        if action.kind in RECEIVES:
            rank, index = places[send_of(carried(action))]
            sent_at[place] = (rank, index + 1)
    for rank, actions in enumerate(schedule.actions):
        last: dict[bool, Place | None] = {True: None, False: None}
        for index, action in enumerate(actions):
            if action.kind in SENDS or action.kind in RECEIVES:
                source, target = channel_of(schedule, action)
                before = last[source < target]
                # A send before it needs no mark: the rank itself rested there.
                turn[rank, index] = sent_at.get(before) if before is not None else None
                last[source < target] = (rank, index)
    ordered = [list(of_rank) for of_rank in waits]
    for action, (rank, index) in places.items():
        if action.kind in SENDS:
            receiver, position = places[receive_of(carried(action))]
            turns = [turn[rank, index], turn[receiver, position]]
            ordered[rank][index] = [
                *waits[rank][index],
                (receiver, position + 1),
                *(mark for mark in turns if mark is not None),
            ]
    return ordered


def _first_above(actions: tuple[Action, ...], bound: int) -> int:
    """The index at which a rank first holds more than `bound` live activations."""
    live = 0
    for index, leaf in each_leaf(actions):
        if leaf.kind is Kind.F:
            live += 1
            if live > bound:
                return index
        elif leaf.kind in (Kind.B, Kind.I):
            live -= 1
    raise AssertionError("no rank above the bound")
