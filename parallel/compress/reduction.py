"""Sums of gradients over an axis, compressed on the wire, with the asynchronous shape of a collective.

Note [Two steps]
A compressed message cannot be added to on its way, so a sum takes an all-to-all: each rank sends every other the
part of its gradient that is the other's to sum, and adds up what it gets, in fp32 and in rank order. That is a
reduce-scatter. Where every rank needs the sum, it is compressed again and gathered; what comes out is the same on
all ranks to the bit, for all decode the same bytes. A rank's own part does not travel and is not compressed.
Method: ZeRO++ (Wang et al., arXiv 2306.10209, section 3.3) and 1-bit Adam (Tang et al., arXiv 2102.02888, section 5).

Note [Error feedback]
What a message leaves out is kept and added to the next one, so that in the long run everything arrives (Seide et al.,
Interspeech 2014; Karimireddy et al., arXiv 1901.09847). The first step keeps, on each rank, its errors in the parts
of all others; the second, those of its own part of the sum. Both belong to this rank in this layout: of another
layout they mean nothing. A message with a number that is not finite leaves no error behind.

Note [Between the steps]
The second step is begun where the first is waited for, never in a thread: collectives on one group must begin in one
order on all ranks.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import Axis, all_gather_into, all_reduce, all_to_all_into, reduce_scatter_into
from parallel.compress.codec import Codec

# A reduction as it goes: yields what is to be waited for (None: nothing) before it goes on; returns its report.
Steps = Generator["dist.Work | None", None, "ReductionReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionReport:
    """What one reduction sent from this rank, and what its compression left out.

    sent_bytes, fp32_bytes: on the wire, and what the same reduction sends uncompressed, both as ByteMeter counts.
    error_squares, squares: sums, fp32 scalars, over every message of this rank: of what it left out, and of what it
    was to say. Those of several ranks and units add up.
    """

    sent_bytes: int
    fp32_bytes: int
    error_squares: Tensor
    squares: Tensor

    @property
    def ratio(self) -> float:
        """How many times fewer bytes."""
        return self.fp32_bytes / self.sent_bytes if self.sent_bytes else 1.0

    @property
    def relative_error(self) -> float:
        """The norm of what was left out over that of what was to be said."""
        return float((self.error_squares / self.squares).sqrt()) if float(self.squares) else 0.0


class PendingReduction:
    """A reduction that has been started. The buffer and `out` are its own until `wait` returns."""

    def __init__(self, steps: Steps) -> None:
        self._steps: Steps | None = steps
        self._report: ReductionReport | None = None
        self._work: dist.Work | None = None
        self._go_on()

    def _go_on(self) -> None:
        assert self._steps is not None
        try:
            self._work = next(self._steps)
        except StopIteration as end:
            self._steps, self._work, self._report = None, None, end.value

    def advance(self) -> None:
        """Wait for the step under way and begin the next, if there is one."""
        if self._steps is not None:
            if self._work is not None:
                self._work.wait()
            self._go_on()

    def wait(self) -> ReductionReport:
        """Return once the sum is where it belongs."""
        while self._steps is not None:
            self.advance()
        assert self._report is not None
        return self._report


class Reduction(Protocol):
    """A way to sum one fp32 buffer over an axis.

    start: begins the sum of `buffer` [n * M] of all n ranks: in place where `out` is None, else this rank's range of it
    into `out` [M]. The network is not waited for. state: the tensors it keeps between sums, by name.
    """

    def start(self, buffer: Tensor, out: Tensor | None) -> PendingReduction: ...

    def state(self) -> dict[str, Tensor]: ...

    def reset(self) -> None:
        """As if nothing had been summed yet."""
        ...


class PlainReduction:
    """fp32 on the wire: an all-reduce or a reduce-scatter."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def start(self, buffer: Tensor, out: Tensor | None) -> PendingReduction:
        return PendingReduction(self._steps(buffer, out))

    def _steps(self, buffer: Tensor, out: Tensor | None) -> Steps:
        if out is None:
            yield all_reduce(buffer, self._axis, async_op=True)
        else:
            yield reduce_scatter_into(out, buffer, self._axis, async_op=True)
        sent = fp32_bytes(buffer.numel(), self._axis.size, is_everywhere=out is None)
        zero = buffer.new_zeros(())
        return ReductionReport(sent_bytes=sent, fp32_bytes=sent, error_squares=zero, squares=zero)

    def state(self) -> dict[str, Tensor]:
        return {}

    def reset(self) -> None:
        pass


class CodedReduction:
    """Two steps of `codec` (Note [Two steps]).

    num_elements: of the buffer, a multiple of the axis. is_everywhere: whether every rank gets the whole sum.
    """

    def __init__(
        self,
        codec: Codec,
        axis: Axis,
        *,
        num_elements: int,
        is_everywhere: bool,
        error_feedback: bool = True,
        device: torch.device | None = None,
    ) -> None:
        assert num_elements % axis.size == 0
        self._codec, self._axis, self._is_everywhere = codec, axis, is_everywhere
        self._part = num_elements // axis.size
        self._errors: dict[str, Tensor] = {}
        if error_feedback and axis.size > 1:
            self._errors["error"] = torch.zeros(axis.size - 1, self._part, device=device)
            if is_everywhere:
                self._errors["sum_error"] = torch.zeros(1, self._part, device=device)

    def start(self, buffer: Tensor, out: Tensor | None) -> PendingReduction:
        assert (out is None) == self._is_everywhere
        return PendingReduction(self._steps(buffer, out))

    def _steps(self, buffer: Tensor, out: Tensor | None) -> Steps:
        axis, size, rank = self._axis, self._axis.size, self._axis.rank
        parts = buffer.view(size, self._part)
        if size == 1:
            if out is not None:
                out.copy_(parts[0])
            zero = buffer.new_zeros(())
            return ReductionReport(sent_bytes=0, fp32_bytes=0, error_squares=zero, squares=zero)

        others = [index for index in range(size) if index != rank]
        messages = torch.cat((parts[:rank], parts[rank + 1 :]))
        payload, error_squares, squares = self._encode("error", messages)
        del messages
        received = torch.empty_like(payload)
        splits = [int(index != rank) for index in range(size)]
        yield all_to_all_into(
            received, payload, axis, output_splits=splits, input_splits=splits, async_op=True
        )
        total = torch.zeros_like(parts[rank]) if out is None else out.zero_()
        for index in range(size):
            if index == rank:
                total += parts[rank]
            else:
                position = others.index(index)
                total += self._codec.decode(received[position : position + 1], self._part)[0]
        sent_bytes = payload.nbytes

        if out is None:
            payload, more_error, more = self._encode("sum_error", total[None])
            error_squares, squares = error_squares + more_error, squares + more
            received = payload.new_empty(size, payload.shape[1])
            yield all_gather_into(received, payload, axis, async_op=True)
            for index in range(size):
                parts[index] = self._codec.decode(received[index : index + 1], self._part)[0]
            sent_bytes += (size - 1) * payload.nbytes
        return ReductionReport(
            sent_bytes=sent_bytes,
            fp32_bytes=fp32_bytes(buffer.numel(), size, is_everywhere=out is None),
            error_squares=error_squares,
            squares=squares,
        )

    def _encode(self, name: str, messages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bytes of `messages` with the error kept as `name`, and the squares of what is left out and of all."""
        error = self._errors.get(name)
        wanted = messages if error is None else error.add_(messages)
        squares = _squares(wanted)
        payload = self._codec.encode(wanted)
        decoded = self._codec.decode(payload, self._part)
        left_out = wanted - decoded if error is None else error.sub_(decoded)
        error_squares = _squares(left_out)
        if error is not None:
            error.nan_to_num_(0.0, 0.0, 0.0)
        return payload, error_squares, squares

    def state(self) -> dict[str, Tensor]:
        return dict(self._errors)

    def reset(self) -> None:
        for error in self._errors.values():
            error.zero_()


def fp32_bytes(num_elements: int, size: int, *, is_everywhere: bool) -> int:
    """What a rank sends, by the convention of ByteMeter, to sum so many fp32 numbers over `size` ranks."""
    return (1 + is_everywhere) * (size - 1) * 4 * num_elements // size


def _squares(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return torch.dot(flat, flat)
