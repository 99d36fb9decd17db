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

from counterflow.parallel.collectives import Axis, all_reduce, reduce_scatter_into
from counterflow.parallel.compress.codec import Codec
from counterflow.parallel.compress.messages import Messages, exchange, suits
from counterflow.parallel.compress.pieces import in_pieces
from counterflow.parallel.memory_parts import memory_of

# A reduction as it goes: yields what is to be waited for (None: nothing) before it goes on; returns its report.
Steps = Generator["dist.Work | Messages | PendingReduction | None", None, "ReductionReport"]


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

    def __add__(self, other: ReductionReport) -> ReductionReport:
        """Of both together."""
        return ReductionReport(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            fp32_bytes=self.fp32_bytes + other.fp32_bytes,
            error_squares=self.error_squares + other.error_squares,
            squares=self.squares + other.squares,
        )

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
        self._work: dist.Work | Messages | PendingReduction | None = None
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
    """An all-reduce or a reduce-scatter, in fp32 or, rounded in each addition, in another dtype."""

    def __init__(self, axis: Axis, dtype: torch.dtype = torch.float32) -> None:
        self._axis, self._dtype = axis, dtype

    def start(self, buffer: Tensor, out: Tensor | None) -> PendingReduction:
        return PendingReduction(self.steps(buffer, out))

    def steps(self, buffer: Tensor, out: Tensor | None) -> Steps:
        """What `start` starts, as a part of another reduction."""
        wire, result = buffer, out
        if self._dtype != buffer.dtype and self._axis.size > 1:
            wire = buffer.to(self._dtype)
            result = None if out is None else out.new_empty(out.shape, dtype=self._dtype)
        if result is None:
            yield all_reduce(wire, self._axis, async_op=True)
        elif wire is buffer and suits(wire, self._axis):
            yield from self._by_messages(buffer, result)
        else:
            yield reduce_scatter_into(result, wire, self._axis, async_op=True)
        if wire is not buffer:
            (buffer if out is None else out).copy_(wire if result is None else result)
        fp32 = fp32_bytes(buffer.numel(), self._axis.size, is_everywhere=out is None)
        zero = buffer.new_zeros(())
        return ReductionReport(
            sent_bytes=fp32 * wire.element_size() // 4, fp32_bytes=fp32, error_squares=zero, squares=zero
        )

    def _by_messages(self, buffer: Tensor, out: Tensor) -> Generator[Messages]:
        """The sum in rank order, whose own part may be `out`."""
        rank = self._axis.rank
        parts = list(buffer.view(self._axis.size, -1))
        with memory_of("gradients"):
            received = list(out.new_empty(self._axis.size - 1, out.numel()))
        yield exchange(received, [*parts[:rank], *parts[rank + 1 :]], self._axis)
        terms = [*received[:rank], parts[rank], *received[rank:]]
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)

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
        self._axis, self._is_everywhere = axis, is_everywhere
        self._part = num_elements // axis.size
        self._codec = in_pieces(codec, self._part, device)
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
        squares, error_squares = buffer.new_zeros(()), buffer.new_zeros(())
        payload = buffer.new_empty(size - 1, self._codec.encoded_bytes, dtype=torch.uint8)
        for row, index in enumerate(others):
            self._encode(parts[index], "error", row, payload[row], squares, error_squares)
        received = torch.empty_like(payload)
        yield exchange(list(received), list(payload), axis)
        sum_of_all = parts[rank] if out is None else out
        for piece in self._codec.pieces:
            total = buffer.new_zeros(piece.size)
            for index in range(size):
                if index == rank:
                    total += parts[rank][piece.elements]
                else:
                    total += self._codec.decode(received[others.index(index)], piece)
            sum_of_all[piece.elements] = total
        sent_bytes = payload.nbytes

        if out is None:
            payload = payload[0]
            self._encode(sum_of_all, "sum_error", 0, payload, squares, error_squares, decoded_into=sum_of_all)
            yield exchange(list(received), [payload] * len(others), axis)
            for row, index in enumerate(others):
                for piece in self._codec.pieces:
                    parts[index][piece.elements] = self._codec.decode(received[row], piece)
            sent_bytes += (size - 1) * payload.nbytes
        return ReductionReport(
            sent_bytes=sent_bytes,
            fp32_bytes=fp32_bytes(buffer.numel(), size, is_everywhere=out is None),
            error_squares=error_squares,
            squares=squares,
        )

    def _encode(
        self,
        message: Tensor,
        name: str,
        row: int,
        payload: Tensor,
        squares: Tensor,
        error_squares: Tensor,
        *,
        decoded_into: Tensor | None = None,
    ) -> None:
        """Fill `payload` with `message` and what is kept in that row of `name`, and keep there what it leaves out.

        The squares of all and of what is left out are added up. decoded_into: gets what others will read; may be
        `message`.
        """
        error = self._errors[name][row] if name in self._errors else None
        for piece in self._codec.pieces:
            wanted = message[piece.elements]
            if error is not None:
                wanted = error[piece.elements].add_(wanted)
            squares += torch.dot(wanted, wanted)
            payload[piece.payload] = self._codec.encode(wanted)
            decoded = self._codec.decode(payload, piece)
            left_out = torch.sub(wanted, decoded, out=None if error is None else wanted)
            error_squares += torch.dot(left_out, left_out)
            if error is not None:
                left_out.nan_to_num_(0.0, 0.0, 0.0)
            if decoded_into is not None:
                decoded_into[piece.elements] = decoded

    def state(self) -> dict[str, Tensor]:
        return dict(self._errors)

    def reset(self) -> None:
        for error in self._errors.values():
            error.zero_()


def fp32_bytes(num_elements: int, size: int, *, is_everywhere: bool) -> int:
    """What a rank sends, by the convention of ByteMeter, to sum so many fp32 numbers over `size` ranks."""
    return (1 + is_everywhere) * (size - 1) * 4 * num_elements // size
