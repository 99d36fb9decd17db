"""How the parameters of a unit are laid flat and cut over its replicas: pure arithmetic.

Note [Alignment]
Every parameter starts at a multiple of `ALIGNMENT` elements, and so does every replica's shard, however many replicas
there are: matrix kernels on a device want 16 bytes, and the vector kernels of an update compute the elements behind
the last whole vector otherwise, which must not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from counterflow.parallel.parameters import ParameterPlacement, placement_of

ALIGNMENT = 64
"""In elements: 256 bytes of fp32, 128 of bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A parameter's place in its unit: elements `start` to `stop` of the flat buffer; `shape` is local."""

    name: str
    shape: tuple[int, ...]
    placement: ParameterPlacement
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """The part of a parameter that this rank's optimizer updates.

    start, stop: its range within the flattened local parameter, of copies of experts with the padding behind. master,
    grad: fp32 [stop - start], views of the unit's buffers.
    """

    slot: Slot
    start: int
    stop: int
    master: Tensor
    grad: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentBytes:
    """Memory that stays between steps on this rank.

    host, disk: what of it is in memory of the host, beside a GPU, and in a file: bytes that the others do not count.
    """

    parameters: int
    gradients: int
    optimizer: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """On the rank's own device."""
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: PersistentBytes) -> PersistentBytes:
        return PersistentBytes(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            host=self.host + other.host,
            disk=self.disk + other.disk,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """Parameters laid end to end.

    num_partial: the elements ahead, whose gradients are partial over the tensor axis. shard_size: of each replica.
    """

    slots: tuple[Slot, ...]
    num_partial: int
    shard_size: int

    def padded_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of what lies end to end in the buffer: the parameters and the padding between them."""
        shapes: list[tuple[int, ...]] = []
        position = 0
        for slot in self.slots:
            shapes += [(slot.start - position,)] if slot.start > position else []
            shapes.append(slot.shape)
            position = slot.stop
        return shapes


def lay_out(named: Sequence[tuple[str, nn.Parameter]], num_replicas: int) -> FlatLayout:
    """The layout of `named`, in this order, over so many replicas (Note [Alignment]).

    Those whose gradients are partial over the tensor axis come first: see `ordered`.
    """
    slots: list[Slot] = []
    position = num_partial = 0
    for name, parameter in named:
        placement = placement_of(parameter)
        stop = position + parameter.numel()
        slots.append(
            Slot(name=name, shape=tuple(parameter.shape), placement=placement, start=position, stop=stop)
        )
        position = rounded_up(stop)
        if placement.partial_over_tensor:
            num_partial = stop
    shard_size = rounded_up(-(-position // num_replicas))
    return FlatLayout(slots=tuple(slots), num_partial=num_partial, shard_size=shard_size)


def ordered(named: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Parameters whose gradients are partial over the tensor axis first: one contiguous range to reduce there."""
    return sorted(named, key=lambda item: not placement_of(item[1]).partial_over_tensor)


def rounded_up(value: int, multiple: int = ALIGNMENT) -> int:
    """The next multiple, or the value itself."""
    return -(-value // multiple) * multiple
