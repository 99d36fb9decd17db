"""Codecs: packing against NumPy, sizes by hand, errors against the bounds of each method."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from counterflow.parallel.compress.codec import (
    Codec,
    Float8,
    Integers,
    OneBit,
    TopK,
    codec_of,
    pack_bits,
    unpack_signs,
)
from counterflow.parallel.compress.config import CompressionConfig

CODECS: list[Codec] = [
    OneBit(block_size=16),
    Integers(block_size=16, num_bits=8),
    Integers(block_size=16, num_bits=4),
    Float8(block_size=16),
    TopK(block_size=16, density=0.2),
    TopK(block_size=512, density=0.01),
]

# Magnitudes from denormal to large, within a row and between rows.
rows = st.integers(0, 2**32 - 1).map(lambda seed: torch.Generator().manual_seed(seed))
sizes = st.integers(1, 70)


def draw(generator: torch.Generator, num_rows: int, num_elements: int) -> Tensor:
    magnitude = torch.randint(-30, 10, (num_rows, num_elements), generator=generator).double()
    values = torch.randn(num_rows, num_elements, generator=generator)
    return (values * 10**magnitude).float()


def blockwise(x: Tensor, block_size: int) -> list[Tensor]:
    return list(x.split(block_size, dim=1))


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(1, 9))
def test_bits_are_packed_as_numpy_does(generator: torch.Generator, eights: int) -> None:
    bits = torch.rand(3, 8 * eights, generator=generator) < 0.5
    packed = pack_bits(bits)
    assert packed.numpy().tolist() == np.packbits(bits.numpy(), axis=1, bitorder="little").tolist()
    assert torch.equal(unpack_signs(packed), torch.where(bits, 1.0, -1.0))


@settings(max_examples=40, deadline=None)
@given(rows, sizes)
def test_one_bit_is_sign_times_mean_magnitude(generator: torch.Generator, size: int) -> None:
    x, codec = draw(generator, 2, size), OneBit(block_size=16)
    decoded = codec.decode(codec.encode(x), size)
    for block, got in zip(blockwise(x, 16), blockwise(decoded, 16), strict=True):
        scale = block.double().abs().mean(1, keepdim=True)
        expected = torch.where(block >= 0, scale, -scale)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-40)
        # The best scale for these signs, so no more is left out than there was.
        assert (got - block).double().norm() <= block.double().norm() * (1 + 1e-6)


@pytest.mark.parametrize(("num_bits", "limit"), [(8, 127), (4, 7)])
@settings(max_examples=40, deadline=None)
@given(generator=rows, size=sizes)
def test_integers_are_off_by_half_a_step_at_most(
    num_bits: int, limit: int, generator: torch.Generator, size: int
) -> None:
    x, codec = draw(generator, 2, size), Integers(block_size=16, num_bits=num_bits)  # type: ignore[arg-type]
    decoded = codec.decode(codec.encode(x), size)
    for block, got in zip(blockwise(x, 16), blockwise(decoded, 16), strict=True):
        largest = block.abs().amax(1, keepdim=True)
        assert bool(((got - block).abs() <= largest / limit * 0.5 * (1 + 1e-4) + 1e-38).all())
        # The largest comes back.
        torch.testing.assert_close(got.abs().amax(1, keepdim=True), largest, rtol=1e-5, atol=1e-36)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_every_integer_survives(num_bits: int) -> None:
    limit = (1 << (num_bits - 1)) - 1
    x = torch.arange(-limit, limit + 1, dtype=torch.float32)[None]
    codec = Integers(block_size=256, num_bits=num_bits)  # type: ignore[arg-type]
    assert torch.equal(codec.decode(codec.encode(x), x.shape[1]), x)


@settings(max_examples=40, deadline=None)
@given(rows, sizes)
def test_fp8_is_off_by_a_sixteenth_at_most(generator: torch.Generator, size: int) -> None:
    x, codec = draw(generator, 2, size), Float8(block_size=16)
    decoded = codec.decode(codec.encode(x), size)
    for block, got in zip(blockwise(x, 16), blockwise(decoded, 16), strict=True):
        scale = block.abs().amax(1, keepdim=True) / 448
        bound = torch.maximum(block.abs() / 16, scale * 2**-10) * (1 + 1e-4) + 1e-38
        assert bool(((got - block).abs() <= bound).all())


@settings(max_examples=40, deadline=None)
@given(rows, sizes, st.sampled_from([(16, 0.2), (512, 0.01)]))
def test_topk_keeps_the_largest_exactly(
    generator: torch.Generator, size: int, shape: tuple[int, float]
) -> None:
    block_size, density = shape
    x, codec = draw(generator, 2, size), TopK(block_size=block_size, density=density)
    decoded = codec.decode(codec.encode(x), size)
    for row, got in zip(x, decoded, strict=True):
        for start in range(0, size, block_size):
            block, back = row[start : start + block_size], got[start : start + block_size]
            kept = back != 0
            assert torch.equal(back[kept], block[kept])
            expected = min(math.ceil(density * block_size), int((block != 0).sum()))
            assert int(kept.sum()) == expected
            if expected < block.numel():
                assert block[~kept].abs().max() <= block[kept].abs().min()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@settings(max_examples=40, deadline=None)
@given(generator=rows, size=sizes)
def test_rows_have_the_size_said_and_do_not_mix(codec: Codec, generator: torch.Generator, size: int) -> None:
    x = draw(generator, 3, size)
    payload = codec.encode(x)
    assert payload.dtype == torch.uint8
    assert payload.shape == (3, codec.encoded_bytes(size))
    decoded = codec.decode(payload, size)
    assert decoded.shape == x.shape
    for index in range(3):
        assert torch.equal(codec.encode(x[index : index + 1]), payload[index : index + 1])
        assert torch.equal(codec.decode(payload[index : index + 1].clone(), size)[0], decoded[index])


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(codec: Codec, value: float) -> None:
    x = torch.randn(1, 40)
    x[0, 21] = value
    assert not codec.decode(codec.encode(x), 40).isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_zero_stays_zero(codec: Codec) -> None:
    decoded = codec.decode(codec.encode(torch.zeros(2, 21)), 21)
    assert torch.equal(decoded, torch.zeros(2, 21))


@pytest.mark.parametrize(
    ("method", "least"), [("onebit", 25.0), ("int8", 3.7), ("int4", 7.0), ("fp8", 3.7), ("topk", 50.0)]
)
def test_bytes_against_fp32(method: str, least: float) -> None:
    codec = codec_of(CompressionConfig(method=method))  # type: ignore[arg-type]
    size = 1_000_003
    ratio = 4 * size / codec.encoded_bytes(size)
    assert least <= ratio < 2 * least
    # By hand: a scale for 256 elements, or three values and byte indices.
    per_block = {"onebit": 36, "int8": 260, "int4": 132, "fp8": 260, "topk": 15}[method]
    assert ratio == pytest.approx(1024 / per_block, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"block_size": 12}, "block_size=12"),
        ({"block_size": 1 << 16}, "block_size=65536"),
        ({"density": 0.0}, "density=0.0"),
        ({"rank": 0}, "rank=0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
    ],
)
def test_a_bad_value_is_refused_by_name(values: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"compression.{name}: "):
        CompressionConfig(**values)  # type: ignore[arg-type]
