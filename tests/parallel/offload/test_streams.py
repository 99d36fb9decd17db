"""The streams of copies, on streams that do nothing, under the rules of torch's sanitizer of CUDA.

Streams, events and kernels are told to torch.cuda._sanitizer's `EventHandler`, which says where two of them use the
same memory and nothing orders them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.cuda._sanitizer import EventHandler

from counterflow.parallel.offload.offloader import Offloader, _State
from counterflow.parallel.offload.tier import HostTier
from counterflow.parallel.offload.unit import SavedUnit

COMPUTE, OUT, BACK = 0, 1, 2


class Device:
    """Stands for a GPU: streams by number, and what the sanitizer found."""

    def __init__(self) -> None:
        self.handler = EventHandler()
        self.errors: list[Any] = []
        self.recorded: list[int] = []  # streams that the allocator was told of
        self._current = threading.local()
        self._lock = threading.Lock()
        self._events = count()

    @property
    def current(self) -> int:
        return getattr(self._current, "stream", COMPUTE)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current, stream.number
        yield
        self._current.stream = before

    def event(self, stream: int) -> int:
        with self._lock:
            event = next(self._events)
            self.handler._handle_event_creation(event)
            self.handler._handle_event_record(event, stream)
            return event

    def launch(self, what: str, *, reads: set[int] = frozenset(), writes: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """A kernel on the current stream."""
        with self._lock:
            names: dict[int, list[str]] = {pointer: [] for pointer in (*reads, *writes)}
            self.errors += self.handler._handle_kernel_launch(
                self.current, set(reads), set(writes), set(), what, names
            )


class Stream:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number
        device.handler._handle_stream_creation(number)

    def record_event(self) -> int:
        return self.device.event(self.number)

    def wait_event(self, event: int) -> None:
        self.device.handler._handle_event_wait(event, self.number)

    def synchronize(self) -> None:
        self.device.handler._handle_stream_synchronization(self.number)


def pointers(unit: SavedUnit) -> set[int]:
    return {tensor.data_ptr() for tensor in unit.memories()}


def step(device: Device, *, hit: bool) -> Offloader:
    """A unit leaves, comes back, before it is asked for (`hit`) or then, and is read by its backward."""
    streams = {number: Stream(device, number) for number in (COMPUTE, OUT, BACK)}
    moves = Offloader(
        HostTier(pinned=False),
        device=torch.device("cpu"),
        budget_bytes=1 << 30,
        min_bytes=1,
        unit_bytes={0: 0},
        stay=[],
    )
    moves._out_stream, moves._back_stream = streams[OUT], streams[BACK]  # type: ignore[assignment]
    copy_out, copy_in = SavedUnit.copy_out, SavedUnit.copy_in

    def out(unit: SavedUnit, memory: Tensor) -> int:
        device.launch("copy out", reads=pointers(unit))
        return copy_out(unit, memory)

    def back(unit: SavedUnit, memory: Tensor, on: torch.device) -> int:
        num_bytes = copy_in(unit, memory, on)
        device.launch("copy in", writes=pointers(unit))
        return num_bytes

    def current(_: torch.device) -> Stream:
        return streams[device.current]

    with (
        mock.patch.object(SavedUnit, "copy_out", out),
        mock.patch.object(SavedUnit, "copy_in", back),
        mock.patch("torch.cuda.stream", device.use),
        mock.patch("torch.cuda.current_stream", current),
        mock.patch.object(Tensor, "record_stream", lambda _, stream: device.recorded.append(stream.number)),
        moves.step(),
    ):
        weight = torch.randn(64, 64, requires_grad=True)
        moves.reserve(0)
        with moves.catching(0, 0):
            loss = torch.exp(weight * 2).sum()
        entry = moves._entries[0, 0]
        device.launch("forward", writes=pointers(entry.unit))
        moves.offload(0, 0)
        wait_for(lambda: entry.is_out)
        if hit:
            moves.reload(0, 0)
            wait_for(lambda: entry.state is _State.HERE)
        assert moves.fetch(0, 0) is not hit
        device.launch("backward", reads=pointers(entry.unit))
        loss.backward()
        moves.release(0, 0)
    torch.testing.assert_close(weight.grad, 2 * torch.exp(weight * 2))
    return moves


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("hit", [True, False])
def test_copies_and_computation_are_in_order(hit: bool) -> None:
    device = Device()
    moves = step(device, hit=hit)
    assert not device.errors
    assert moves.report.num_hits == hit
    assert device.recorded == [COMPUTE], "the allocator is told that the backward uses what came back"


@pytest.mark.parametrize(("forgotten", "what"), [("wait_event", "copy out"), ("synchronize", "backward")])
def test_a_forgotten_wait_is_found(forgotten: str, what: str) -> None:
    device = Device()
    with mock.patch.object(Stream, forgotten):
        step(device, hit=True)
    assert [error.current_access.operator for error in device.errors] == [what]


def test_what_never_left_is_not_told_to_the_allocator() -> None:
    device = Device()
    stream = Stream(device, BACK)
    moves = Offloader(
        HostTier(pinned=False),
        device=torch.device("cpu"),
        budget_bytes=1 << 30,
        min_bytes=1,
        unit_bytes={0: 0},
        stay=[],
    )
    moves._back_stream = stream  # type: ignore[assignment]
    with moves.step():
        moves.reserve(0)
        with moves.catching(0, 0):
            torch.exp(torch.ones(8, requires_grad=True) * 2).sum()
        assert not moves.fetch(0, 0)
        moves.release(0, 0)
    assert not device.recorded
