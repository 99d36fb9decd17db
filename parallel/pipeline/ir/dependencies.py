"""The one rule table of pipeline schedules: what each action needs, gives, and sends.

Passes, verifier and simulator all read this table, so a rule stands once. An action's results are named by
what they are, not by what made them: I and B both give an INPUT_GRADIENT, W and B both a WEIGHT_GRADIENT, and
whoever needs one need not ask which it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule


class ScheduleError(ValueError):
    """A schedule breaks a rule: it is incomplete, out of order, or would hang.

    rule: which, without the grid that the message shows. place: (rank, index in its list), where there is one.
    """

    def __init__(self, message: str, *, rule: str = "", place: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.rule = rule or message
        self.place = place


class Value(IntEnum):
    """What a compute action leaves behind for one stage and micro-batch."""

    ACTIVATION = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2


Product = tuple[Value, int, int]
"""A value, its stage, its micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a compute action reads and leaves.

    needs: values with the distance of their stage from the action's own; a stage that does not exist (before
        the first, after the last) needs nothing: the input and the loss are there.
    gives: values of the action's own stage.
    reads_weights: whether the stage must be unsharded. W multiplies activations by gradients only.
    """

    needs: tuple[tuple[Value, int], ...]
    gives: tuple[Value, ...]
    reads_weights: bool


_BACKWARD_NEEDS = ((Value.ACTIVATION, 0), (Value.INPUT_GRADIENT, 1))

RULES = {
    Kind.F: Rule(needs=((Value.ACTIVATION, -1),), gives=(Value.ACTIVATION,), reads_weights=True),
    Kind.I: Rule(needs=_BACKWARD_NEEDS, gives=(Value.INPUT_GRADIENT,), reads_weights=True),
    Kind.B: Rule(
        needs=_BACKWARD_NEEDS, gives=(Value.INPUT_GRADIENT, Value.WEIGHT_GRADIENT), reads_weights=True
    ),
    Kind.W: Rule(needs=((Value.INPUT_GRADIENT, 0),), gives=(Value.WEIGHT_GRADIENT,), reads_weights=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a value travels: the kinds that carry it, and the receiving stage less the sending one."""

    send: Kind
    receive: Kind
    step: int


ROUTES = {
    Value.ACTIVATION: Route(send=Kind.SEND_F, receive=Kind.RECV_F, step=1),
    Value.INPUT_GRADIENT: Route(send=Kind.SEND_B, receive=Kind.RECV_B, step=-1),
}

_SENT = {route.send: value for value, route in ROUTES.items()}
_RECEIVED = {route.receive: value for value, route in ROUTES.items()}


def microbatch_of(action: Action) -> int:
    """The micro-batch of an action that must have one."""
    assert action.microbatch is not None, f"{action} has no micro-batch"
    return action.microbatch


def needs(action: Action, num_stages: int) -> list[Product]:
    """Products that a compute action (or both halves of a pair) reads."""
    return [
        (value, leaf.stage + offset, microbatch_of(leaf))
        for leaf in action.leaves
        for value, offset in RULES[leaf.kind].needs
        if 0 <= leaf.stage + offset < num_stages
    ]


def gives(action: Action) -> list[Product]:
    """Products that a compute action (or both halves of a pair) leaves."""
    return [
        (value, leaf.stage, microbatch_of(leaf)) for leaf in action.leaves for value in RULES[leaf.kind].gives
    ]


def weights_read(action: Action) -> tuple[int, ...]:
    """Stages whose parameters a compute action reads."""
    return tuple(leaf.stage for leaf in action.leaves if RULES[leaf.kind].reads_weights)


def destination(schedule: Schedule, product: Product) -> int | None:
    """The rank to which `product` must be sent, or None where it is used on its own rank only."""
    value, stage, microbatch = product
    route = ROUTES.get(value)
    if route is None or not 0 <= stage + route.step < schedule.num_stages:
        return None
    receiver = schedule.rank_of(stage + route.step, microbatch)
    return None if receiver == schedule.rank_of(stage, microbatch) else receiver


def send_of(product: Product) -> Action:
    """The action that sends `product`."""
    value, stage, microbatch = product
    return Action(stage, ROUTES[value].send, microbatch)


def receive_of(product: Product) -> Action:
    """The action that receives `product`; its stage is the receiver's."""
    value, stage, microbatch = product
    route = ROUTES[value]
    return Action(stage + route.step, route.receive, microbatch)


def carried(action: Action) -> Product:
    """The product that a send or a receive carries."""
    if action.kind in _SENT:
        return _SENT[action.kind], action.stage, microbatch_of(action)
    value = _RECEIVED[action.kind]
    return value, action.stage - ROUTES[value].step, microbatch_of(action)


def channel_of(schedule: Schedule, action: Action) -> tuple[int, int]:
    """(source rank, destination rank) of a send or a receive.

    The messages of a channel match in the order in which they are issued on either side, activations and
    gradients alike. Transports that order what they are given, as NCCL does, need two communicators: one for
    messages to higher ranks, one for messages to lower ranks.
    """
    value, stage, microbatch = carried(action)
    return schedule.rank_of(stage, microbatch), schedule.rank_of(stage + ROUTES[value].step, microbatch)


def replay(bounds: Sequence[int], first: Sequence[int], awaited: Sequence[int]) -> list[int]:
    """Let every rank go through its list as far as it can; the action before which each comes to rest.

    Actions are numbered over all ranks: rank r has those from bounds[r] to bounds[r + 1]. Action a completes once
    awaited[first[a]:first[a + 1]] have. The lists are free of deadlock exactly where every rank comes to its end.
    Linear in actions and waits.
    """
    at = list(bounds[:-1])
    done = bytearray(bounds[-1])
    sleepers: dict[int, list[int]] = {}
    awake = deque(range(len(at)))
    while awake:
        rank = awake.popleft()
        action, last = at[rank], bounds[rank + 1]
        while action < last:
            for index in range(first[action], first[action + 1]):
                if not done[awaited[index]]:
                    sleepers.setdefault(awaited[index], []).append(rank)
                    break
            else:
                done[action] = 1
                if action in sleepers:
                    awake.extend(sleepers.pop(action))
                action += 1
                continue
            break
        at[rank] = action
    return at


def each_leaf(actions: Sequence[Action]) -> Iterator[tuple[int, Action]]:
    """(index in the list, leaf) for every action, pairs taken apart."""
    for index, action in enumerate(actions):
        for leaf in action.leaves:
            yield index, leaf
