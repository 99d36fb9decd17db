"""Long rows encoded piece by piece.

Everything that a codec does to a piece happens while it is in the processor's cache, and no temporary is so large that
the allocator takes it from the system anew each time, whose page faults cost a CPU more than the arithmetic. A row's
bytes are those of its pieces in order, so both ends must cut alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from counterflow.parallel.compress.codec import Codec

PIECE_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """elements: its range of the row. payload: its range of the row's bytes."""

    elements: slice
    payload: slice

    @property
    def size(self) -> int:
        return self.elements.stop - self.elements.start


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseCodec:
    """`codec` applied to the `pieces` of a row."""

    codec: Codec
    pieces: tuple[Piece, ...]

    @property
    def encoded_bytes(self) -> int:
        """Bytes of the row."""
        return self.pieces[-1].payload.stop if self.pieces else 0

    def encode(self, values: Tensor) -> Tensor:
        """A piece, fp32 [M], as bytes."""
        return self.codec.encode(values[None])[0]

    def decode(self, payload: Tensor, piece: Piece) -> Tensor:
        """That piece of a row of bytes as fp32 [M], the caller's to write to."""
        return self.codec.decode(payload[None, piece.payload], piece.size)[0]


def in_pieces(
    codec: Codec, num_elements: int, device: torch.device | None, piece_elements: int = PIECE_ELEMENTS
) -> PiecewiseCodec:
    """`codec` for rows of `num_elements`: cut where a CPU computes, whole elsewhere.

    A piece has about piece_elements, in whole blocks, so the blocks are those of the whole row.
    """
    on_cpu = device is None or device.type == "cpu"
    length = max(1, piece_elements // codec.block_size) * codec.block_size if on_cpu else num_elements
    pieces: list[Piece] = []
    position = 0
    for start in range(0, num_elements, max(1, length)):
        stop = min(num_elements, start + length)
        end = position + codec.encoded_bytes(stop - start)
        pieces.append(Piece(elements=slice(start, stop), payload=slice(position, end)))
        position = end
    return PiecewiseCodec(codec=codec, pieces=tuple(pieces))
