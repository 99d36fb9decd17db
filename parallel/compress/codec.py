"""Codecs of gradients: fp32 rows to bytes and back, of a size that is known beforehand.

A row is cut into blocks; the last may be shorter. Its bytes are what the blocks share (fp32 scales), then the codes
of its elements, filled up to a multiple of four. All codecs keep what is not finite visible: a row with such a number
comes back with one.

Legend: R rows, M elements of a row, N blocks of a row, B elements of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from counterflow.parallel.compress.config import CompressionConfig

_SCALE_BYTES = 4
# Times this, eight bytes of 0 or 1 have their bits side by side in the highest byte: no two of the 64 partial
# products meet in one bit, so nothing carries.
_GATHER_BITS = 0x0102040810204080
_FP8 = torch.float8_e4m3fn


class Codec(Protocol):
    """Rows of numbers as bytes. It has no state."""

    @property
    def block_size(self) -> int:
        """Elements that are encoded together."""
        ...

    def encoded_bytes(self, num_elements: int) -> int:
        """Bytes of a row of `num_elements`."""
        ...

    def encode(self, x: Tensor) -> Tensor:
        """fp32 [R, M] as uint8 [R, encoded_bytes(M)]."""
        ...

    def decode(self, payload: Tensor, num_elements: int) -> Tensor:
        """uint8 [R, encoded_bytes(M)] as fp32 [R, M], no one else's; M is `num_elements`."""
        ...


def codec_of(config: CompressionConfig) -> Codec:
    """The codec of a `config` whose method works element by element."""
    if config.method == "onebit":
        return OneBit(block_size=config.block_size)
    if config.method in ("int8", "int4"):
        return Integers(block_size=config.block_size, num_bits=8 if config.method == "int8" else 4)
    if config.method == "fp8":
        return Float8(block_size=config.block_size)
    assert config.method == "topk", config.method
    return TopK(block_size=config.block_size, density=config.density)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBit:
    """Signs, eight to a byte, and the mean magnitude of each block.

    For given signs that mean is the scale with the least squared error (Seide et al., Interspeech 2014; Tang et al.,
    arXiv 2102.02888, compress with one scale a tensor). Zero counts as positive.
    """

    block_size: int

    def encoded_bytes(self, num_elements: int) -> int:
        return _row_bytes(num_elements, self.block_size, -(-num_elements // 8))

    def encode(self, x: Tensor) -> Tensor:
        blocks = _blocks(x, self.block_size)
        counts = torch.full((blocks.shape[1],), self.block_size, device=x.device)
        counts[-1] = x.shape[1] - (blocks.shape[1] - 1) * self.block_size
        scales = blocks.abs().sum(-1) / counts
        return _assemble(scales, pack_bits((blocks >= 0).flatten(1)), self, x.shape[1])

    def decode(self, payload: Tensor, num_elements: int) -> Tensor:
        scales, codes = _take_apart(payload, num_elements, self.block_size)
        signs = unpack_signs(codes[:, : -(-num_elements // 8)])
        return _scaled(signs, scales, self.block_size, num_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """Whole numbers, symmetric about zero, of the largest magnitude of each block over 127 or 7.

    The error of an element is at most half of that step. Method: ZeRO++ (Wang et al., arXiv 2306.10209, section 3).
    """

    block_size: int
    num_bits: Literal[4, 8]

    @property
    def limit(self) -> int:
        """The largest number."""
        return (1 << (self.num_bits - 1)) - 1

    def encoded_bytes(self, num_elements: int) -> int:
        return _row_bytes(num_elements, self.block_size, -(-num_elements * self.num_bits // 8))

    def encode(self, x: Tensor) -> Tensor:
        blocks = _blocks(x, self.block_size)
        scales = _steps(blocks, self.limit)
        numbers = blocks.div(scales[..., None]).round_().to(torch.int8)
        codes = numbers.flatten(1)
        if self.num_bits == 4:
            pairs = codes.view(torch.int16)
            codes = ((pairs & 15) | ((pairs >> 4) & 240)).to(torch.uint8)
        return _assemble(scales, codes.view(torch.uint8), self, x.shape[1])

    def decode(self, payload: Tensor, num_elements: int) -> Tensor:
        scales, codes = _take_apart(payload, num_elements, self.block_size)
        codes = codes[:, : -(-num_elements * self.num_bits // 8)]
        if self.num_bits == 4:
            both = torch.arange(256, device=payload.device)[:, None] >> torch.tensor(
                [0, 4], device=payload.device
            )
            pairs = (((both & 15) ^ 8) - 8).to(torch.int8).view(torch.int16)[:, 0]
            codes = _looked_up(pairs, codes).view(torch.int8)
        return _scaled(codes.view(torch.int8).float(), scales, self.block_size, num_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8:
    """e4m3 numbers, of the largest magnitude of each block over theirs.

    The error of an element is at most 1/16 of it or, of a small one, 2^-10 of the block's scale.
    """

    block_size: int

    def encoded_bytes(self, num_elements: int) -> int:
        return _row_bytes(num_elements, self.block_size, num_elements)

    def encode(self, x: Tensor) -> Tensor:
        blocks = _blocks(x, self.block_size)
        scales = _steps(blocks, torch.finfo(_FP8).max)
        codes = blocks.div(scales[..., None]).to(_FP8).flatten(1)
        return _assemble(scales, codes.view(torch.uint8), self, x.shape[1])

    def decode(self, payload: Tensor, num_elements: int) -> Tensor:
        scales, codes = _take_apart(payload, num_elements, self.block_size)
        numbers = torch.arange(256, dtype=torch.uint8, device=payload.device).view(_FP8).float()
        codes = _looked_up(numbers, codes[:, :num_elements])
        return _scaled(codes, scales, self.block_size, num_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The largest magnitudes of each block, fp32, with their indices in it: a byte each, two in larger blocks.

    What is picked comes back exactly, the rest as zero (Stich et al., arXiv 1809.07599, choose from the whole vector;
    blocks make it quick, and the size of the message known).
    """

    block_size: int
    density: float

    @property
    def num_kept(self) -> int:
        """Elements sent of each block."""
        return math.ceil(self.density * self.block_size)

    @property
    def _index_dtype(self) -> torch.dtype:
        return torch.uint8 if self.block_size <= 256 else torch.int16

    def encoded_bytes(self, num_elements: int) -> int:
        num_kept = self.num_kept * _num_blocks(num_elements, self.block_size)
        return _round_up(num_kept * (4 + self._index_dtype.itemsize), 4)

    def encode(self, x: Tensor) -> Tensor:
        blocks = _blocks(x, self.block_size)
        indices = blocks.abs().topk(self.num_kept, dim=-1).indices
        values = blocks.gather(-1, indices)
        indices = indices.to(self._index_dtype).flatten(1)
        return _assemble(values.flatten(1), indices.view(torch.uint8), self, x.shape[1])

    def decode(self, payload: Tensor, num_elements: int) -> Tensor:
        num_blocks = _num_blocks(num_elements, self.block_size)
        num_kept = num_blocks * self.num_kept
        values, rest = payload[:, : 4 * num_kept], payload[:, 4 * num_kept :]
        indices = rest[:, : num_kept * self._index_dtype.itemsize].view(self._index_dtype)
        blocks = payload.new_zeros(payload.shape[0], num_blocks, self.block_size, dtype=torch.float32)
        picked = (payload.shape[0], num_blocks, self.num_kept)
        blocks.scatter_(-1, indices.long().view(picked), values.view(torch.float32).reshape(picked))
        return blocks.flatten(1)[:, :num_elements]


def pack_bits(bits: Tensor) -> Tensor:
    """bool [R, M], M a multiple of 8, as uint8 [R, M / 8]: element 8 i + j is bit j of byte i (little-endian hosts)."""
    eights = bits.contiguous().view(torch.int64)
    return (eights * _GATHER_BITS >> 56).to(torch.uint8)


def unpack_signs(packed: Tensor) -> Tensor:
    """uint8 [R, M / 8] as fp32 [R, M]: 1 where the bit is set, -1 elsewhere."""
    patterns = torch.arange(256, device=packed.device)[:, None] >> torch.arange(8, device=packed.device)
    # Eight signs of a byte each are looked up as one number.
    signs = (2 * (patterns & 1) - 1).to(torch.int8).view(torch.int64)[:, 0]
    return _looked_up(signs, packed).view(torch.int8).float()


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """Rows of `table` [256, ..] by uint8 [R, C]: [R, C, ..]. Indexing does the same, on a CPU ten times slower."""
    return table.index_select(0, codes.reshape(-1).int()).view(*codes.shape, *table.shape[1:])


def _num_blocks(num_elements: int, block_size: int) -> int:
    return -(-num_elements // block_size)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _row_bytes(num_elements: int, block_size: int, num_code_bytes: int) -> int:
    # A multiple of four, so that the scales of every row can be read where they lie.
    return _round_up(_SCALE_BYTES * _num_blocks(num_elements, block_size) + num_code_bytes, 4)


def _blocks(x: Tensor, block_size: int) -> Tensor:
    """[R, N, B], the last block filled up with zeros; a view where it is full."""
    padding = -x.shape[1] % block_size
    return F.pad(x, (0, padding)).unflatten(1, (-1, block_size))


def _steps(blocks: Tensor, limit: float) -> Tensor:
    """[R, N]: the largest magnitude of each block over `limit`; not zero, so that it can be divided by."""
    largest = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())
    return largest.div_(limit).clamp_min_(torch.finfo(torch.float32).tiny)


def _scaled(numbers: Tensor, scales: Tensor, block_size: int, num_elements: int) -> Tensor:
    """`numbers`, which may be written to, times the scales of their blocks."""
    blocks = _blocks(numbers, block_size)
    return blocks.mul_(scales[..., None]).flatten(1)[:, :num_elements]


def _assemble(shared: Tensor, codes: Tensor, codec: Codec, num_elements: int) -> Tensor:
    """fp32 and uint8 rows side by side in the bytes that `codec` says; codes of padding are cut off."""
    num_bytes = codec.encoded_bytes(num_elements)
    payload = codes.new_zeros(shared.shape[0], num_bytes)
    head = _SCALE_BYTES * shared.shape[1]
    payload[:, :head] = shared.contiguous().view(torch.uint8)
    num_codes = min(codes.shape[1], num_bytes - head)
    payload[:, head : head + num_codes] = codes[:, :num_codes]
    return payload


def _take_apart(payload: Tensor, num_elements: int, block_size: int) -> tuple[Tensor, Tensor]:
    head = _SCALE_BYTES * _num_blocks(num_elements, block_size)
    return payload[:, :head].view(torch.float32), payload[:, head:]
