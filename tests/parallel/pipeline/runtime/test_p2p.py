"""The transport: what arrives is bitwise what was sent, in chunks or whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.framework.config.tree import CommConfig
from counterflow.parallel.collectives import ByteMeter
from counterflow.parallel.pipeline.api import build_pipeline
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.runtime.p2p import Channel, Transport, pieces_of, specs_of
from counterflow.parallel.pipeline.runtime.payload import payload_of
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
FORWARD, BACKWARD = Channel(1, Kind.SEND_F), Channel(1, Kind.SEND_B)


@pytest.mark.parametrize(
    "shape", [(), (0,), (7,), (100,), (3, 5), (2, 1, 40), (5, 3, 4, 2), (4, 0, 3), (1, 1, 1)], ids=str
)
@pytest.mark.parametrize("chunk_bytes", [1, 4, 12, 16, 64, 10**6, None])
def test_pieces_tile_the_tensor_in_order(shape: tuple[int, ...], chunk_bytes: int | None) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    pieces = pieces_of(tensor, chunk_bytes)
    torch.testing.assert_close(torch.cat([piece.reshape(-1) for piece in pieces]), tensor.view(-1))
    assert all(piece.is_contiguous() and piece._is_view() for piece in pieces if len(pieces) > 1)
    if chunk_bytes is not None:
        assert all(piece.nbytes <= max(chunk_bytes, 4) for piece in pieces)
        # Two neighbours of one row, or two rows, would not have fitted together.
        assert len(pieces) <= max(1, 2 * tensor.nbytes // max(chunk_bytes, 4) + sum(shape[:-1]))
    else:
        assert len(pieces) == 1


def payload(microbatch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(microbatch)
    value = torch.randn(2, 9 + microbatch, 33, generator=generator)
    return (
        value,
        value.transpose(0, 2),  # not contiguous
        value.to(torch.bfloat16),
        (value * 100).to(torch.int64),
        torch.tensor(float(microbatch)),
        value[:0],
    )


def exchange(
    chunk_bytes: int | None, num_microbatches: int, precision: Any = "compute"
) -> tuple[int, list[tuple[Tensor, ...]]]:
    """Rank 0 sends activations of differing shapes, rank 1 sends each back as a gradient; what came, bytes sent."""
    meter, group = ByteMeter(), dist.group.WORLD
    transport = Transport(
        group, device=CPU, meter=meter, chunk_bytes=chunk_bytes, payload=payload_of(precision)
    )
    order = list(range(num_microbatches))
    received: dict[int, tuple[Tensor, ...]] = {}
    if transport.rank == 0:
        for microbatch in order:
            transport.send(1, FORWARD, microbatch, payload(microbatch), uniform=False)
        specs = {microbatch: specs_of(payload(microbatch)) for microbatch in order}
        receipts = {
            microbatch: transport.receive(1, BACKWARD, microbatch, specs[microbatch]) for microbatch in order
        }
        for microbatch in order:
            received[microbatch] = transport.wait(receipts[microbatch])
            transport.answered(1, FORWARD, microbatch)
        assert transport.num_unretired == 0
    else:
        receipts = {microbatch: transport.receive(0, FORWARD, microbatch, None) for microbatch in order}
        # Used in another order than they travel in.
        for microbatch in reversed(order):
            received[microbatch] = transport.wait(receipts[microbatch])
        for microbatch in order:
            transport.send(0, BACKWARD, microbatch, received[microbatch], uniform=True)
    transport.finish_step()
    return meter.sent_bytes()["pipeline"], [received[microbatch] for microbatch in order]


@pytest.mark.parametrize("chunk_bytes", [None, 40, 256, 1 << 20])
def test_what_arrives_is_bitwise_what_was_sent(ranks: RankPool, chunk_bytes: int | None) -> None:
    for rank, (sent_bytes, received) in enumerate(ranks.run(exchange, 2, chunk_bytes, 3)):
        for microbatch, tensors in enumerate(received):
            expected = payload(microbatch)
            assert [tensor.dtype for tensor in tensors] == [tensor.dtype for tensor in expected]
            assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
        header_bytes = 64 * 8 if rank == 0 else 0
        payload_bytes = sum(tensor.nbytes for microbatch in range(3) for tensor in payload(microbatch))
        assert sent_bytes == payload_bytes + 3 * header_bytes, "chunks cost no bytes"


def fp8(tensor: Tensor) -> Tensor:
    """To the nearest e4m3 number, a row of at most 128 scaled so that its largest becomes 448."""
    rows = tensor.float()
    scale = rows.abs().amax(-1, keepdim=True) / 448
    return ((rows / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)


@pytest.mark.parametrize("chunk_bytes", [None, 40])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_numbers_are_rounded_on_their_way(ranks: RankPool, precision: str, chunk_bytes: int | None) -> None:
    """There and, of the gradient, back; whole numbers, single ones and the header are left alone."""
    (sent_there, came_back), (sent_back, came) = ranks.run(exchange, 2, chunk_bytes, 3, precision)
    for microbatch in range(3):
        expected: list[Tensor] = []
        for tensor in payload(microbatch):
            # A row of two would be no smaller in fp8, with its scale.
            is_wide = precision == "bf16" or tensor.shape[-1:] > (2,)
            is_rounded = tensor.is_floating_point() and tensor.numel() > 1 and is_wide
            rounded = tensor.to(torch.bfloat16).to(tensor.dtype) if precision == "bf16" else fp8(tensor)
            expected.append(rounded if is_rounded else tensor)
        rtol, atol = (2**-7, 1e-6) if precision == "fp8" else (0.0, 0.0)
        for tensor, wanted in zip(came[microbatch], expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=rtol, atol=atol)
        # Rounding what is rounded already changes nothing but, in fp8, the last bit of a scale.
        for tensor, wanted in zip(came_back[microbatch], came[microbatch], strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=rtol, atol=atol)
    # A row of 33 takes a scale of four bytes and 33 of numbers, filled up to a multiple of four.
    rows = sum(2 * (9 + microbatch) for microbatch in range(3))
    bytes_of_a_row = 3 * 2 * 33 if precision == "bf16" else 40 + 4 * 33 + 40
    assert sent_back == rows * (bytes_of_a_row + 8 * 33) + 3 * 4
    assert sent_there == sent_back + 3 * 64 * 8


def test_a_number_that_is_not_finite_stays_so_on_the_wire() -> None:
    for precision in ("bf16", "fp8"):
        codec = payload_of(precision)  # type: ignore[arg-type]
        assert codec is not None
        tensor = torch.randn(3, 200)
        tensor[1, 150] = torch.inf
        shape, dtype = codec.on_wire((3, 200), torch.float32)
        wire = codec.encode(tensor)
        assert (tuple(wire.shape), wire.dtype) == (shape, dtype)
        arrived = codec.decode(wire, (3, 200), torch.float32)
        assert arrived[[0, 2]].isfinite().all()
        assert not arrived[1].isfinite().all()


class CountingGroup:
    """Stands for a process group of two: keeps the messages it is given."""

    class Done:
        def wait(self) -> bool:
            return True

    def __init__(self) -> None:
        self.sent: list[tuple[Tensor, int]] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Done:
        self.sent.append((tensors[0], tag))
        return self.Done()


def messages(chunk_bytes: int | None, *, uniform: bool) -> list[tuple[int, ...]]:
    group: Any = CountingGroup()
    transport = Transport(group, device=CPU, chunk_bytes=chunk_bytes)
    for microbatch in range(2):
        transport.send(1, FORWARD, microbatch, (torch.zeros(8, 16), torch.zeros(3)), uniform=uniform)
    transport.finish_step()
    assert {tag for _, tag in group.sent} == {FORWARD.tag}
    return [tuple(tensor.shape) for tensor, _ in group.sent]


def test_without_chunks_the_messages_are_header_and_tensors() -> None:
    whole = [(8, 16), (3,)]
    assert messages(None, uniform=True) == [(64,), *whole, *whole]
    assert messages(None, uniform=False) == [(64,), *whole, (64,), *whole]


def test_headers_are_never_cut() -> None:
    chunks = [(3, 16), (3, 16), (2, 16), (3,)]
    assert messages(200, uniform=True) == [(64,), *chunks, *chunks]
    assert messages(200, uniform=False) == [(64,), *chunks, (64,), *chunks]


WIDTH = 24


def make_stage(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))


def pipeline_step(name: str, num_microbatches: int, chunk_bytes: int | None) -> list[Tensor]:
    """Losses and gradients of two steps, whose micro-batches differ in length."""
    pipeline = build_pipeline(
        make_stage, name, num_microbatches=num_microbatches, p2p_chunk_bytes=chunk_bytes
    )
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor] = []
    for lengths in ((5,), (3, 8)):
        inputs = [
            torch.randn(2, lengths[index % len(lengths)], WIDTH, generator=generator)
            for index in range(num_microbatches)
        ]
        found.append(pipeline.step(inputs, inputs, nn.functional.mse_loss).losses)
        found += [parameter.grad.clone() for parameter in pipeline.parameters() if parameter.grad is not None]
    assert pipeline.runtime.transport.num_unretired == 0
    return found


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches"), [("1f1b", 4, 6), ("zbv", 2, 4), ("dualpipe", 4, 8)]
)
def test_a_step_in_chunks_is_bitwise_the_step_without(
    ranks: RankPool, name: str, num_ranks: int, num_microbatches: int
) -> None:
    whole = ranks.run(pipeline_step, num_ranks, name, num_microbatches, None)
    chunked = ranks.run(pipeline_step, num_ranks, name, num_microbatches, 100)
    for ours, theirs in zip(chunked, whole, strict=True):
        assert len(ours) > 2
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("value", [0, 4095, (1 << 30) + 1])
def test_a_senseless_chunk_size_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="null sends every tensor whole"):
        CommConfig(p2p_chunk_bytes=value)
