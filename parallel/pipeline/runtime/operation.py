"""What the runtime works on: an action bound to its handler, and what lives for one step only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from counterflow.parallel.pipeline.ir.action import RECEIVES, Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.trace import Activity
from counterflow.parallel.pipeline.runtime.overlap import Half
from counterflow.parallel.pipeline.runtime.p2p import Channel, Receipt
from counterflow.parallel.pipeline.runtime.stage import Stage

LossFunction = Callable[[Any, Any], Tensor]
Microbatches = Tensor | Sequence[Any] | None

# The stage on the other end of what an action sends, receives or hands on.
_STEP_TO_NEIGHBOUR = {
    Kind.F: 1,
    Kind.B: -1,
    Kind.I: -1,
    Kind.SEND_F: 1,
    Kind.RECV_F: -1,
    Kind.SEND_B: -1,
    Kind.RECV_B: 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An action of this rank, bound to its handler.

    peer: the rank of the neighbouring stage that the action's result goes to or comes from; itself where there is
    none. channel: of a send or a receive. halves: of a pair, the forward and the backward.
    passes: of an UNSHARD, see `passes_after`.
    """

    run: Callable[[Operation], None]
    action: Action
    stage: Stage
    microbatch: int
    direction: int
    is_last: bool
    peer: int
    is_peer_here: bool
    channel: Channel
    halves: tuple[Operation, ...]
    passes: tuple[Kind, ...] = ()


def bind(
    schedule: Schedule,
    action: Action,
    *,
    rank: int,
    stages: Mapping[int, Stage],
    handlers: Mapping[Kind, Callable[[Operation], None]],
    passes: tuple[Kind, ...] = (),
) -> Operation:
    """`action` of `rank`, with all that can be known before the step; passes: of an UNSHARD."""
    index, microbatch = action.stage, -1 if action.microbatch is None else action.microbatch
    neighbour = index + _STEP_TO_NEIGHBOUR.get(action.kind, 0)
    peer = rank
    if action.microbatch is not None and 0 <= neighbour < schedule.num_stages:
        peer = schedule.rank_of(neighbour, microbatch)
    receiver = index if action.kind in RECEIVES else neighbour
    is_activation = action.kind in (Kind.SEND_F, Kind.RECV_F)
    return Operation(
        run=handlers[action.kind],
        action=action,
        stage=stages[index],
        microbatch=microbatch,
        direction=0 if action.microbatch is None else schedule.direction_of(microbatch),
        is_last=index == schedule.num_stages - 1,
        peer=peer,
        is_peer_here=peer == rank,
        channel=Channel(receiver, Kind.SEND_F if is_activation else Kind.SEND_B),
        halves=tuple(
            bind(schedule, part, rank=rank, stages=stages, handlers=handlers) for part in action.parts
        ),
        passes=passes,
    )


def half_of(
    operation: Operation, run: Callable[[], None] | None = None, fill: Callable[[], None] | None = None
) -> Half:
    """`operation` as one half of a pair, or alone at its communication points."""
    given = {name: value for name, value in (("run", run), ("fill", fill)) if value is not None}
    return Half(
        stage=operation.stage.index,
        microbatch=operation.microbatch,
        activity=Activity(operation.action.kind.value),
        **given,
    )


class StepState:
    """What lives for one step only."""

    def __init__(
        self,
        *,
        schedule: Schedule | None = None,
        loss_fn: LossFunction | None = None,
        loss_scale: float = 1.0,
        inputs: tuple[Any, ...] = (),
        targets: tuple[Any, ...] = (),
        losses: Tensor | None = None,
        outputs: dict[int, Any] | None = None,
    ) -> None:
        if schedule is not None and loss_fn is not None and losses is not None:
            self.schedule, self.loss_fn, self.losses = schedule, loss_fn, losses
        self.loss_scale, self.inputs, self.targets, self.outputs = loss_scale, inputs, targets, outputs
        self.uniform: dict[tuple[int, int], bool] = {}
        self.restart()

    def restart(self) -> None:
        """As at the beginning; losses and outputs are written again."""
        self.receipts: dict[tuple[int, Kind, int], Receipt] = {}
        self.handed: dict[tuple[int, Kind, int], tuple[Tensor, ...]] = {}
        self.to_send: dict[tuple[int, Kind, int], tuple[Tensor, ...]] = {}
        self.answers: list[tuple[int, Channel, int]] = []
        self.num_live = 0


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Of the generators that a module draws from: the host's, and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", value) if isinstance(value, tuple) else (cast(Tensor, value),)


def split_microbatches(name: str, values: Microbatches, count: int) -> tuple[Any, ...]:
    """One entry a micro-batch.

    Raises ValueError: where there are not `count` of them.
    """
    if values is None:
        raise ValueError(f"{name} is None on a rank that needs them; pass {count} micro-batches")
    if isinstance(values, Tensor):
        if values.shape[0] % count:
            raise ValueError(
                f"{name} has {values.shape[0]} rows, which {count} micro-batches do not divide; pass a list with one "
                "entry a micro-batch"
            )
        return tuple(values.chunk(count))
    if len(values) != count:
        raise ValueError(
            f"{name} has {len(values)} entries and the schedule {count} micro-batches; pass one for each"
        )
    return tuple(values)
