"""Rows of hidden states, weights and slots packed into bytes.

So a dispatch to experts is one message whatever the types of its parts, and a payload in fp8 needs no backend that
knows fp8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAYLOAD_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
# Every part of a packed row starts at a multiple of so many bytes, and so can be read as numbers of its type.
_ALIGNMENT_BYTES = 16
# fp8 has a scale for each so many elements of a row (DeepSeek-V3, section 3.3.2).
_FP8_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPacking:
    """How a row lies in bytes: hidden state, its fp8 scales, weights, slots.

    The parts of a buffer are read as strided views, without a copy.
    """

    width: int
    dtype: torch.dtype
    num_choices: int
    weights_dtype: torch.dtype
    has_slots: bool

    @property
    def num_scales(self) -> int:
        return -(-self.width // _FP8_BLOCK) if self.dtype == torch.float8_e4m3fn else 0

    @property
    def parts(self) -> tuple[tuple[torch.dtype, int], ...]:
        return (
            (self.dtype, self.width),
            (torch.float32, self.num_scales),
            (self.weights_dtype, self.num_choices),
            (torch.int32, self.num_choices if self.has_slots else 0),
        )

    @property
    def row_bytes(self) -> int:
        return sum(_aligned(dtype.itemsize * count) for dtype, count in self.parts)

    def empty(self, num_rows: int, device: torch.device) -> Tensor:
        return torch.empty(num_rows, self.row_bytes, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parts of the rows of `buffer`, each [rows, count] of its type."""
        found: list[Tensor] = []
        start = 0
        for dtype, count in self.parts:
            stop = start + dtype.itemsize * count
            found.append(buffer[:, start:stop].view(dtype))
            start = _aligned(stop)
        return found

    def write(
        self,
        buffer: Tensor,
        x: Tensor,
        weights: Tensor,
        slots: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """Fill the rows of `buffer` with x [T, H] and weights [T, k] of `tokens` (None: of all), and slots."""
        hidden, scales, to_weights, to_slots = self.views(buffer)
        if tokens is not None:
            x, weights = x.index_select(0, tokens), weights.index_select(0, tokens)
        if self.num_scales:
            x = _scaled(x, scales)
        hidden.copy_(x)
        to_weights.copy_(weights)
        if slots is not None:
            to_slots.copy_(slots)

    def read(self, buffer: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden states in `dtype`, weights and slots of the rows of `buffer`."""
        hidden, scales, weights, slots = self.views(buffer)
        hidden = hidden.to(dtype)
        if self.num_scales:
            hidden = hidden * _spread(scales, self.width).to(dtype)
        return hidden, weights, slots


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _scaled(x: Tensor, scales: Tensor) -> Tensor:
    """x [R, H] brought into the range of fp8 block by block; fills `scales` [R, blocks] with what it divides by."""
    x = x.float()
    for block, part in enumerate(x.split(_FP8_BLOCK, dim=1)):
        limit = torch.finfo(torch.float8_e4m3fn).max
        scales[:, block] = part.abs().amax(1).clamp(min=1e-12) / limit
    return x / _spread(scales, x.shape[1])


def _spread(scales: Tensor, width: int) -> Tensor:
    return scales.repeat_interleave(_FP8_BLOCK, dim=1)[:, :width]
