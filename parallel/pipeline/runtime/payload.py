"""In what precision activations and their gradients travel between stages.

The header of a channel names the tensors that the stages exchange; what of them is on the wire follows from that, on
both ends alike. Tensors that are not floating-point, single numbers, and those that would not be smaller go as they
are. Only what travels is rounded: neighbouring stages on one rank hand tensors over as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from counterflow.parallel.compress.codec import Float8

# fp8 has a scale for each so many elements of a row (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
_FP8 = Float8(block_size=128)


class Payload(Protocol):
    """How tensors are brought onto the wire and back."""

    def on_wire(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what travels of such a tensor."""
        ...

    def encode(self, tensor: Tensor) -> Tensor:
        """What travels of `tensor`."""
        ...

    def decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of that shape and dtype, from what has travelled of it."""
        ...


def payload_of(name: Literal["compute", "bf16", "fp8"]) -> Payload | None:
    """The payload that a config names; None: tensors travel as they are."""
    return {"compute": None, "bf16": BF16Payload(), "fp8": FP8Payload()}[name]


@dataclass(frozen=True, slots=True)
class BF16Payload:
    """Wider floating-point numbers rounded to bf16."""

    def on_wire(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        is_rounded = dtype.is_floating_point and dtype.itemsize > 2 and math.prod(shape) > 1
        return shape, torch.bfloat16 if is_rounded else dtype

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.on_wire(tuple(tensor.shape), tensor.dtype)[1])

    def decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return wire.to(dtype)


@dataclass(frozen=True, slots=True)
class FP8Payload:
    """e4m3 numbers and, for each 128 of the last dim, a scale: bytes, for no backend has to know fp8."""

    def on_wire(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        if not _is_smaller_in_fp8(shape, dtype):
            return shape, dtype
        return (math.prod(shape[:-1]), fp8_row_bytes(shape[-1])), torch.uint8

    def encode(self, tensor: Tensor) -> Tensor:
        if not _is_smaller_in_fp8(tuple(tensor.shape), tensor.dtype):
            return tensor
        return _FP8.encode(tensor.reshape(-1, tensor.shape[-1]).float())

    def decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not _is_smaller_in_fp8(shape, dtype):
            return wire
        return _FP8.decode(wire, shape[-1]).view(shape).to(dtype)


def fp8_row_bytes(width: int) -> int:
    """Of a row of `width` elements."""
    return _FP8.encoded_bytes(width)


def _is_smaller_in_fp8(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point or math.prod(shape) <= 1:
        return False
    return fp8_row_bytes(shape[-1]) < shape[-1] * dtype.itemsize
