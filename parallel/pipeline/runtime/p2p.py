"""Point-to-point transport of activations and gradients between stages.

Note [Shapes travel with the data]
A channel is (receiving stage, activation or gradient) between two ranks. The first activation of a step on a
channel is preceded by a header: shapes and dtypes, and whether every other micro-batch of the step has the
same. If so the others travel bare, with no extra message; if not each has its own header. A gradient never
needs one: it has the shape of the activation that this rank sent. So the length of a sequence may change
from one micro-batch to the next, and a step pays one small message per channel.

Note [Sends retire when they are known to have arrived]
A gloo send reports completion only to `wait`, so polling it would keep every buffer of the step alive. The
gradient of micro-batch k coming back proves that its activation arrived: that send is then waited for, at
once. Gradient sends have no answer, nor have activations in evaluation; per channel the oldest is waited for
when more than `_MAX_UNANSWERED` a rank are out, more than a verified schedule lets a peer fall behind.

Note [Chunks]
With `chunk_bytes` a larger tensor travels as several messages, cut along its leading dims, so that both ends
know the cuts from shape and dtype and headers stay as they are. Every chunk is received into its place in the
whole tensor and all are posted at once: a window of two chunks would need this process to wake for each one,
and would leave the rest of the tensor on the other side of the compute that is to hide it. What chunks buy is
at the sender: a tensor that is not contiguous is copied chunk by chunk, the next one while the last is on its
way. Those copies are kept rather than reused, for a gloo send ends only once its receive has been posted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.parallel.collectives import Axis, ByteMeter, all_reduce
from counterflow.parallel.groups import MakeGroup, among, destroy_group
from counterflow.parallel.memory_parts import memory_of
from counterflow.parallel.pipeline.ir.action import SENDS, Kind, Schedule
from counterflow.parallel.pipeline.ir.dependencies import channel_of
from counterflow.parallel.pipeline.runtime.payload import Payload

_HEADER_ELEMENTS = 64
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


class PipelineError(RuntimeError):
    """A transfer failed: the message names this rank, the action it was in and the peer."""


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor on the wire."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_differentiable(self) -> bool:
        """Whether a gradient of the same shape travels back."""
        return self.dtype.is_floating_point


def pieces_of(tensor: Tensor, chunk_bytes: int | None) -> list[Tensor]:
    """`tensor` cut along its leading dims into views of at most `chunk_bytes`, in memory order; None: whole.

    Rows stay whole where they fit, so a piece may be smaller. Views of a contiguous tensor are contiguous.
    """
    if chunk_bytes is None or tensor.nbytes <= chunk_bytes or tensor.dim() == 0:
        return [tensor]
    rows = tensor.shape[0]
    at_once = chunk_bytes * rows // tensor.nbytes
    if at_once > 0:
        return [tensor[first : first + at_once] for first in range(0, rows, at_once)]
    return [piece for row in range(rows) for piece in pieces_of(tensor[row], chunk_bytes)]


def specs_of(tensors: tuple[Tensor, ...]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def encode_header(specs: tuple[TensorSpec, ...], *, uniform: bool) -> Tensor:
    """`specs` as one int64 tensor of fixed size.

    Raises ValueError: where they do not fit, or a dtype cannot be sent.
    """
    numbers = [int(uniform), len(specs)]
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ValueError(f"a stage returned a tensor of {spec.dtype}, which pipelines do not send")
        numbers += [_DTYPES.index(spec.dtype), len(spec.shape), *spec.shape]
    if len(numbers) > _HEADER_ELEMENTS:
        raise ValueError(
            f"a stage returned {len(specs)} tensors whose shapes take {len(numbers)} numbers; "
            f"{_HEADER_ELEMENTS} fit: return fewer tensors"
        )
    header = torch.zeros(_HEADER_ELEMENTS, dtype=torch.int64)
    header[: len(numbers)] = torch.tensor(numbers)
    return header


def decode_header(header: Tensor) -> tuple[tuple[TensorSpec, ...], bool]:
    """The inverse of `encode_header`: (specs, uniform)."""
    numbers = cast("list[int]", header.tolist())  # pyright: ignore[reportUnknownMemberType]
    uniform, count = bool(numbers[0]), numbers[1]
    specs: list[TensorSpec] = []
    position = 2
    for _ in range(count):
        dtype, dims = _DTYPES[numbers[position]], numbers[position + 1]
        position += 2
        specs.append(TensorSpec(tuple(numbers[position : position + dims]), dtype))
        position += dims
    return tuple(specs), uniform


class Channel(NamedTuple):
    """What flows between two ranks: activations into `stage`, or gradients into it."""

    stage: int
    kind: Kind  # SEND_F for activations, SEND_B for gradients

    @property
    def tag(self) -> int:
        return 2 * self.stage + (self.kind is Kind.SEND_B)

    @property
    def text(self) -> str:
        return f"{'activations' if self.kind is Kind.SEND_F else 'gradients'} into stage {self.stage}"


# Per pipeline rank: a peer that lags more would exceed the live activations that schedules are verified for.
_MAX_UNANSWERED = 4


def channels_need_groups(device: torch.device) -> bool:
    """Whether each channel needs a communicator of its own.

    gloo tells channels apart by tags; NCCL knows no tags and matches messages in the order of one communicator.
    """
    return device.type == "cuda"


def channels_of(schedule: Schedule) -> list[tuple[int, int, Channel]]:
    """(source rank, destination rank, channel) of every flow of a lowered schedule, in one order on all ranks."""
    found: set[tuple[int, int, Channel]] = set()
    for actions in schedule.actions:
        for action in actions:
            if action.kind in SENDS:
                source, destination = channel_of(schedule, action)
                stage = action.stage + (1 if action.kind is Kind.SEND_F else -1)
                found.add((source, destination, Channel(stage, action.kind)))
    return sorted(found)


@dataclass(slots=True, eq=False)
class Receipt:
    """A receive under way, to be handed to `Transport.wait`.

    It is begun once the channel's earlier messages are known to be covered by posted receives: `header_work`
    is set while its header is out, `tensors` once its payload is posted, in the precision in which it travels.
    """

    peer: int
    channel: Channel
    microbatch: int
    header: Tensor | None = None
    header_work: dist.Work | None = None
    specs: tuple[TensorSpec, ...] = ()
    tensors: tuple[Tensor, ...] | None = None
    works: list[dist.Work] = field(default_factory=lambda: list[dist.Work]())


@dataclass(slots=True)
class _Incoming:
    """A receiving channel within a step: what its header said, and receipts not yet waited for."""

    specs: tuple[TensorSpec, ...] | None = None
    uniform: bool = False
    posted: deque[Receipt] = field(default_factory=lambda: deque[Receipt]())


@dataclass(slots=True)
class _Sent:
    microbatch: int
    works: list[dist.Work]
    tensors: tuple[Tensor, ...]  # kept alive until the transfer is known to be over


@dataclass(slots=True)
class _Outgoing:
    """A sending channel within a step: the shapes it announced, and sends not yet retired."""

    specs: tuple[TensorSpec, ...] | None = None
    uniform: bool = False
    sent: deque[_Sent] = field(default_factory=lambda: deque[_Sent]())


class Transport:
    """Sends and receives of one rank along the pipeline axis.

    Peers are ranks within `group`. Bytes are counted under the axis name `pipeline`. chunk_bytes: larger tensors travel
    as several messages (see Note [Chunks]), the same on every rank; None: each as one. payload: in what precision
    tensors travel, the same on every rank; None: in their own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        device: torch.device,
        meter: ByteMeter | None = None,
        chunk_bytes: int | None = None,
        payload: Payload | None = None,
    ) -> None:
        self._chunk_bytes, self._payload = chunk_bytes, payload
        self._group, self._meter = group, meter
        self.device = device
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self._own: dict[tuple[int, int, Channel], dist.ProcessGroup] = {}
        self._incoming: dict[tuple[int, Channel], _Incoming] = {}
        self._outgoing: dict[tuple[int, Channel], _Outgoing] = {}

    def connect(self, schedule: Schedule, make_group: MakeGroup | None = None) -> None:
        """Set up the communicators of `schedule` now, so that the first step does not pay for it.

        Every rank of the pipeline calls this, and each of its channels has been used once at the end: in one order on
        all ranks, since a rank may wait in a channel's first use for the other end to come to it. make_group: makes
        groups within the pipeline; None: where ranks outside it do not follow.
        """
        if self._group is None or self.size == 1:
            return
        all_reduce(torch.zeros((), device=self.device), Axis(group=self._group, name="pipeline"))
        channels = channels_of(schedule)
        if channels_need_groups(self.device):
            make_group = make_group or among(self._group)
            for source, destination, channel in channels:
                # On every rank, whether the channel is its or not.
                own = make_group(
                    sorted((source, destination)),
                    f"pipeline {source} to {destination}: {channel.text}",
                    device_type=self.device.type,
                )
                if own is not None:
                    self._own[source, destination, channel] = own
        for source, destination, channel in channels:
            self._open(source, destination, channel)

    def _open(self, source: int, destination: int, channel: Channel) -> None:
        """Use a channel of this rank once. NCCL connects two ranks at their first message, which blocks the host."""
        message = torch.zeros(1, device=self.device)
        if self.rank == source:
            group, peer = self._link(destination, channel)
            group.send([message], peer, channel.tag).wait()
        elif self.rank == destination:
            group, peer = self._link(source, channel, receiving=True)
            group.recv([message], peer, channel.tag).wait()

    def close(self) -> None:
        """Destroy the communicators that `connect` made, and let go of the others."""
        self._group = None
        while self._own:
            destroy_group(self._own.popitem()[1])

    def _link(self, peer: int, channel: Channel, *, receiving: bool = False) -> tuple[dist.ProcessGroup, int]:
        """The communicator of a channel to (from, where `receiving`) `peer`, and the peer's rank in it."""
        own = self._own.get((peer, self.rank, channel) if receiving else (self.rank, peer, channel))
        if own is not None:
            return own, int(peer > self.rank)
        assert self._group is not None, "a schedule over several ranks needs a process group"
        assert not self._own, "a channel that the schedule did not have when it was connected"
        return self._group, peer

    def incoming(self, peer: int, channel: Channel) -> _Incoming:
        return self._incoming.setdefault((peer, channel), _Incoming())

    def is_uniform(self, peer: int, channel: Channel) -> bool:
        """Whether the header received on `channel` said that all micro-batches of the step are alike."""
        return self.incoming(peer, channel).uniform

    def send(
        self, peer: int, channel: Channel, microbatch: int, tensors: tuple[Tensor, ...], *, uniform: bool
    ) -> None:
        """Start sending `tensors`; they are kept alive until they have arrived.

        uniform: every micro-batch of this step has these shapes (read for activations only).

        Raises PipelineError: where the peer is gone. ValueError: where shapes that were said to be the same
        are not.
        """
        flow = self._outgoing.setdefault((peer, channel), _Outgoing())
        works: list[dist.Work] = []
        header: list[Tensor] = []
        if channel.kind is Kind.SEND_F:
            specs = specs_of(tensors)
            if not (flow.uniform and flow.specs is not None):
                flow.specs, flow.uniform = specs, uniform
                header = [encode_header(specs, uniform=uniform).to(self.device)]
            elif specs != flow.specs:
                raise ValueError(
                    f"stage {channel.stage - 1} returned {specs} for micro-batch {microbatch} and {flow.specs} "
                    "for the one before, though their inputs had the same shapes; a stage whose output shape "
                    "depends on values needs uniform_shapes=False"
                )
        if self._payload is not None:
            tensors = tuple(self._payload.encode(tensor.detach()) for tensor in tensors)
        group, group_peer = self._link(peer, channel)
        messages: list[Tensor] = []
        try:
            for piece in chain(
                header, *(pieces_of(tensor.detach(), self._chunk_bytes) for tensor in tensors)
            ):
                # A copy where it is not contiguous: of this piece, while those before it are on their way.
                message = piece.contiguous()
                messages.append(message)
                # The group's own call: dist.isend checks again, on every message, what holds for the channel.
                works.append(group.send([message], group_peer, channel.tag))
        except RuntimeError as error:
            raise self._failure("sent to", peer, channel, microbatch, error) from error
        if self._meter is not None:
            self._meter.add("pipeline", sum(message.nbytes for message in messages))
        flow.sent.append(_Sent(microbatch, works, tuple(messages)))
        is_unanswered = channel.kind is Kind.SEND_B or not torch.is_grad_enabled()
        while is_unanswered and len(flow.sent) > _MAX_UNANSWERED * self.size:
            self._retire(peer, channel, flow.sent.popleft())

    def receive(
        self, peer: int, channel: Channel, microbatch: int, specs: tuple[TensorSpec, ...] | None
    ) -> Receipt:
        """Post a receive. `specs` are known for gradients, None for activations."""
        receipt = Receipt(peer, channel, microbatch)
        if specs is not None:
            self._post_payload(receipt, specs)
            return receipt
        posted = self.incoming(peer, channel).posted
        posted.append(receipt)
        if len(posted) == 1 or posted[-2].tensors is not None:
            self._begin(receipt)
        return receipt

    def wait(self, receipt: Receipt) -> tuple[Tensor, ...]:
        """The tensors of `receipt`, once they are here.

        Raises PipelineError: where the peer is gone or the group's timeout passed.
        """
        flow = self.incoming(receipt.peer, receipt.channel)
        try:
            if receipt.channel.kind is Kind.SEND_F:
                # Those before it on the channel too: a schedule may use activations in another order.
                for posted in flow.posted:
                    if posted.tensors is None and posted.header_work is None:
                        self._begin(posted)
                    if posted.header_work is not None and receipt.tensors is None:
                        assert posted.header is not None
                        posted.header_work.wait()
                        posted.header_work = None
                        flow.specs, flow.uniform = decode_header(posted.header)
                        self._post_payload(posted, flow.specs)
                    if posted.tensors is None:
                        break
                flow.posted.remove(receipt)
            for work in receipt.works:
                work.wait()
        except RuntimeError as error:
            raise self._failure(
                "received from", receipt.peer, receipt.channel, receipt.microbatch, error
            ) from error
        assert receipt.tensors is not None
        if self._payload is not None:
            pairs = zip(receipt.tensors, receipt.specs, strict=True)
            return tuple(self._payload.decode(tensor, *spec) for tensor, spec in pairs)
        return receipt.tensors

    def _begin(self, receipt: Receipt) -> None:
        flow = self.incoming(receipt.peer, receipt.channel)
        if flow.uniform and flow.specs is not None:
            self._post_payload(receipt, flow.specs)
        else:
            receipt.header = torch.empty(_HEADER_ELEMENTS, dtype=torch.int64, device=self.device)
            receipt.header_work = self._irecv(receipt.header, receipt)

    def _post_payload(self, receipt: Receipt, specs: tuple[TensorSpec, ...]) -> None:
        if self._payload is not None:
            receipt.specs = specs
            specs = tuple(TensorSpec(*self._payload.on_wire(*spec)) for spec in specs)
        with memory_of("messages"):
            receipt.tensors = tuple(
                torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs
            )
        receipt.works = [
            self._irecv(piece, receipt)
            for tensor in receipt.tensors
            for piece in pieces_of(tensor, self._chunk_bytes)
        ]

    def _irecv(self, tensor: Tensor, receipt: Receipt) -> dist.Work:
        group, group_peer = self._link(receipt.peer, receipt.channel, receiving=True)
        return group.recv([tensor], group_peer, receipt.channel.tag)

    def answered(self, peer: int, channel: Channel, microbatch: int) -> None:
        """The gradient of `microbatch` came back from `peer`: its activation on `channel` has arrived."""
        flow = self._outgoing[peer, channel]
        for position, sent in enumerate(flow.sent):
            if sent.microbatch == microbatch:
                del flow.sent[position]
                self._retire(peer, channel, sent)
                return

    @property
    def num_unretired(self) -> int:
        """Sends whose buffers are still held."""
        return sum(len(flow.sent) for flow in self._outgoing.values())

    def finish_step(self) -> None:
        """Wait for every send of the step and forget its shapes.

        Raises PipelineError: where a peer never took what was sent.
        """
        for (peer, channel), flow in self._outgoing.items():
            while flow.sent:
                self._retire(peer, channel, flow.sent.popleft())
        assert not any(flow.posted for flow in self._incoming.values()), "a posted receive was not waited for"
        self._outgoing.clear()
        self._incoming.clear()

    def _retire(self, peer: int, channel: Channel, sent: _Sent) -> None:
        try:
            for work in sent.works:
                work.wait()
        except RuntimeError as error:
            raise self._failure("sent to", peer, channel, sent.microbatch, error) from error

    def _failure(
        self, what_failed: str, peer: int, channel: Channel, microbatch: int, error: RuntimeError
    ) -> PipelineError:
        what = "activation" if channel.kind is Kind.SEND_F else "gradient"
        return PipelineError(
            f"pipeline rank {self.rank}: the {what} of micro-batch {microbatch} for stage {channel.stage} "
            f"could not be {what_failed} pipeline rank {peer}: {str(error).splitlines()[0]}"
        )
