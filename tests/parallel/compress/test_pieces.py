"""Rows in pieces: the same numbers as the whole row at once, in as many bytes as were said."""

from __future__ import annotations

import pytest
import torch

from counterflow.parallel.compress.codec import codec_of
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.compress.pieces import in_pieces

CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ["onebit", "int8", "int4", "fp8", "topk"])
@pytest.mark.parametrize("size", [1, 96, 1000, 1001])
def test_pieces_decode_to_what_the_whole_row_does(method: str, size: int) -> None:
    codec = codec_of(CompressionConfig(method=method, block_size=24, density=0.2))  # type: ignore[arg-type]
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    row = in_pieces(codec, size, CPU, piece_elements=100)
    assert [piece.elements.start for piece in row.pieces] == list(range(0, size, 96))
    payload = torch.empty(row.encoded_bytes, dtype=torch.uint8)
    decoded = torch.full((size,), torch.nan)
    for piece in row.pieces:
        payload[piece.payload] = row.encode(values[piece.elements])
    for piece in row.pieces:
        decoded[piece.elements] = row.decode(payload, piece)
    assert torch.equal(decoded, codec.decode(codec.encode(values[None]), size)[0])


def test_a_row_is_whole_where_no_cpu_computes() -> None:
    codec = codec_of(CompressionConfig(method="int8"))
    row = in_pieces(codec, 10_000_000, torch.device("meta"))
    assert len(row.pieces) == 1
    assert row.encoded_bytes == codec.encoded_bytes(10_000_000)
    # Cut or not, a number takes as many bytes.
    assert in_pieces(codec, 10_000_000, CPU).encoded_bytes == row.encoded_bytes
