from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterflow.framework.checkpoint.box import (
    Box,
    GlobalBox,
    TensorBox,
    boxes_of_range,
    globalize,
    shard_boxes,
)
from counterflow.parallel.parameters import ParameterPlacement


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_boxes_of_a_range_are_that_range_in_numpy(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    boxes = boxes_of_range(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found: list[int] = []
    for box in boxes:
        part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        assert part.shape == box.sizes
        assert part.size
        assert part.reshape(-1).tolist() == list(range(box.flat_start, box.flat_stop))
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))


def test_boxes_of_a_range_by_hand() -> None:
    # In a 3 x 4 matrix, elements 2..9: the end of row 0, row 1, the front of row 2.
    assert boxes_of_range((3, 4), 2, 10) == (
        Box(offsets=(0, 2), sizes=(1, 2), flat_start=2, flat_stop=4),
        Box(offsets=(1, 0), sizes=(1, 4), flat_start=4, flat_stop=8),
        Box(offsets=(2, 0), sizes=(1, 2), flat_start=8, flat_stop=10),
    )
    # The bound 2n - 1 is reached.
    assert len(boxes_of_range((3, 3, 3), 1, 26)) == 5
    assert boxes_of_range((), 0, 1) == (Box(offsets=(), sizes=(), flat_start=0, flat_stop=1),)


def test_globalize_shifts_and_cuts_padding() -> None:
    # 10 rows over four ranks of three: the last holds row 9 and two rows of padding.
    box = Box(offsets=(0, 0), sizes=(3, 4), flat_start=0, flat_stop=12)
    assert globalize(box, 0, 3, (10, 4)) == GlobalBox(
        offsets=(3, 0), sizes=(3, 4), kept=(slice(0, 3), slice(0, 4))
    )
    assert globalize(box, 0, 9, (10, 4)) == GlobalBox(
        offsets=(9, 0), sizes=(1, 4), kept=(slice(0, 1), slice(0, 4))
    )
    padding = Box(offsets=(1, 0), sizes=(2, 4), flat_start=4, flat_stop=12)
    assert globalize(padding, 0, 9, (10, 4)) is None
    assert globalize(box, 1, 6, (3, 8)) == GlobalBox(
        offsets=(0, 6), sizes=(3, 2), kept=(slice(0, 3), slice(0, 2))
    )
    assert globalize(box, None, 0, (3, 4)) == GlobalBox(
        offsets=(0, 0), sizes=(3, 4), kept=(slice(0, 3), slice(0, 4))
    )


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_shards_tile_the_whole_tensor(shape, dim, tensor_ranks, replica_ranks, random) -> None:  # type: ignore[no-untyped-def]
    """tensor x flat sharding, padded on both: each element lies in one box and is the right one."""
    dim %= len(shape)
    whole = torch.arange(math.prod(shape)).view(shape)
    width = -(-shape[dim] // tensor_ranks)
    seen = torch.zeros(shape, dtype=torch.int64)
    for tensor_rank in range(tensor_ranks):
        start = tensor_rank * width
        local_shape = [*shape[:dim], width, *shape[dim + 1 :]]
        local = torch.full(local_shape, -1)
        real = max(0, min(width, shape[dim] - start))
        if real:
            local.narrow(dim, 0, real).copy_(whole.narrow(dim, start, real))
        placement = ParameterPlacement(global_shape=tuple(shape), tensor_dim=dim, tensor_start=start)
        flat = torch.cat([local.reshape(-1), torch.full((replica_ranks,), -2)])
        cuts = sorted(random.randint(0, flat.numel()) for _ in range(replica_ranks - 1))
        for first, last in zip([0, *cuts], [*cuts, flat.numel()], strict=True):
            for box in shard_boxes("w", flat[first:last], first, local_shape, placement):
                part = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(box.tensor, whole[part])
                seen[part] += 1
    assert torch.equal(seen, torch.ones_like(seen))


@given(
    st.permutations(range(5)),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 3),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_shards_of_experts_tile_the_stack(experts, rest, expert_ranks, replica_ranks, random) -> None:  # type: ignore[no-untyped-def]
    """Experts shared out in any order, each share cut flat: every element at the global index of its expert, once."""
    shape = (5, *rest)
    whole = torch.arange(math.prod(shape)).view(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for held in (tuple(experts[rank::expert_ranks]) for rank in range(expert_ranks)):
        local = whole[list(held)]
        placement = ParameterPlacement(global_shape=shape, experts=held)
        flat = torch.cat([local.reshape(-1), torch.full((replica_ranks,), -2)])
        cuts = sorted(random.randint(0, flat.numel()) for _ in range(replica_ranks - 1))
        for first, last in zip([0, *cuts], [*cuts, flat.numel()], strict=True):
            for box in shard_boxes("w", flat[first:last], first, local.shape, placement):
                part = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(box.tensor, whole[part])
                seen[part] += 1
    assert torch.equal(seen, torch.ones_like(seen))


def test_neighbouring_experts_are_one_box() -> None:
    placement = ParameterPlacement(global_shape=(8, 2, 3), experts=(4, 5, 6, 1))
    boxes = shard_boxes("w", torch.zeros(24), 0, (4, 2, 3), placement)
    assert [(box.offsets, box.sizes) for box in boxes] == [((4, 0, 0), (3, 2, 3)), ((1, 0, 0), (1, 2, 3))]


def test_shard_boxes_alias_the_shard() -> None:
    flat = torch.zeros(7)
    for box in shard_boxes("w", flat, 2, (3, 4), ParameterPlacement(global_shape=(3, 4))):
        box.tensor.fill_(1)
    assert torch.equal(flat, torch.ones(7))


def test_a_box_outside_its_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 'w': a box of shape \(2, 4\) at \(9, 0\).*\(10, 4\)"):
        TensorBox(name="w", global_shape=(10, 4), offsets=(9, 0), tensor=torch.zeros(2, 4))
