"""Shards: which part of which global tensor a rank holds.

A checkpoint names tensors by their place in the whole model and stores axis-aligned shards of them, so nothing
in it depends on the layout that wrote it. A ZeRO shard is a flat range of a parameter, which is at most
2n - 1 shards of an n-d tensor; a tensor-parallel shard is one shard, of which padding is cut off. Experts are at
their global index, a shard for each run of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from counterflow.parallel.parameters import ParameterPlacement, expert_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """An axis-aligned part of a tensor that is also contiguous in its row-major flat form.

    offsets, sizes: per dim. flat_start, flat_stop: the same elements as a range of the flat tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat_start: int
    flat_stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalShard:
    """A shard of the whole, unpadded tensor, and `kept`: the part of the local shard that it is, one slice a dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    kept: tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorShard:
    """A local tensor (any strides, any device) and its place in a global tensor.

    name: global and free of the layout, such as `model.layers.3.attention.q_proj.weight`.
    global_shape: shape of the whole tensor, without padding. offsets: first index per dim.
    tensor: shape is that of the shard; `load` fills it in place.

    Raises ValueError: where the shard does not lie inside `global_shape`.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    def __post_init__(self) -> None:
        sizes = self.sizes
        inside = len(self.offsets) == len(sizes) == len(self.global_shape) and all(
            offset >= 0 and offset + size <= whole
            for offset, size, whole in zip(self.offsets, sizes, self.global_shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"tensor '{self.name}': a shard of shape {sizes} at {tuple(self.offsets)} is not inside the global "
                f"shape {tuple(self.global_shape)}; cut padding off (`globalize`) and give one offset per dim"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


def shards_of_range(shape: Sequence[int], start: int, stop: int) -> tuple[Shard, ...]:
    """Cut the flat row-major range [start, stop) of a tensor of `shape` into shards, in flat order.

    At most max(1, 2n - 1) shards for n dims; none for an empty range.
    """
    assert 0 <= start <= stop <= math.prod(shape), (tuple(shape), start, stop)
    return tuple(_cut(tuple(shape), start, stop, (), 0))


def _cut(shape: tuple[int, ...], start: int, stop: int, prefix: tuple[int, ...], base: int) -> list[Shard]:
    """Shards of [start, stop) of the sub-tensor `shape` at index `prefix`, whose first element is flat `base`."""
    if start >= stop:
        return []

    def shard(offsets: tuple[int, ...], sizes: tuple[int, ...], first: int, last: int) -> Shard:
        return Shard(
            offsets=prefix + offsets,
            sizes=(1,) * len(prefix) + sizes,
            flat_start=base + first,
            flat_stop=base + last,
        )

    if len(shape) <= 1:
        return [shard((start,) if shape else (), (stop - start,) if shape else (), start, stop)]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _cut(shape[1:], head, tail, (*prefix, first), base + first * row)
    shards: list[Shard] = []
    if head:
        shards += _cut(shape[1:], head, row, (*prefix, first), base + first * row)
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        shards.append(shard((first, *zeros), (last - first, *shape[1:]), first * row, last * row))
    return shards + _cut(shape[1:], 0, tail, (*prefix, last), base + last * row)


def globalize(
    shard: Shard, tensor_dim: int | None, tensor_start: int, global_shape: Sequence[int]
) -> GlobalShard | None:
    """Shift a shard of a tensor-parallel local tensor into the whole tensor, without padding.

    The local tensor begins at index `tensor_start` of `tensor_dim` (None: it is not cut). Padding lies behind
    the end of the whole tensor, so what is kept of a partly padded shard is its front. None: padding only.
    """
    offsets, sizes = list(shard.offsets), list(shard.sizes)
    if tensor_dim is not None:
        offsets[tensor_dim] += tensor_start
        sizes[tensor_dim] = min(sizes[tensor_dim], global_shape[tensor_dim] - offsets[tensor_dim])
        if sizes[tensor_dim] <= 0:
            return None
    return GlobalShard(
        offsets=tuple(offsets), sizes=tuple(sizes), kept=tuple(slice(0, size) for size in sizes)
    )


def tensor_shards(
    name: str,
    flat: Tensor,
    start: int,
    local_shape: Sequence[int],
    placement: ParameterPlacement,
    *,
    every_copy: bool = True,
) -> tuple[TensorShard, ...]:
    """The shards held by a flat shard of a (tensor-parallel) local parameter; their tensors are views of `flat`.

    flat: 1-d, elements [start, start + flat.numel()) of the local parameter in row-major order; elements
    behind its end are the shard's own padding. local_shape: shape of the unsharded local parameter.
    A whole parameter is `tensor_shards(name, parameter.view(-1), 0, parameter.shape, placement)`.
    every_copy: of an expert, as all of them are to be filled; else the one that counts, which is what is saved.
    """
    assert flat.dim() == 1, flat.shape
    numel = math.prod(local_shape)
    shards: list[TensorShard] = []
    for shard in shards_of_range(local_shape, min(start, numel), min(start + flat.numel(), numel)):
        local = flat[shard.flat_start - start : shard.flat_stop - start].view(shard.sizes)
        for found in _places(shard, placement, every_copy=every_copy):
            shards.append(
                TensorShard(
                    name=name,
                    global_shape=tuple(placement.global_shape),
                    offsets=found.offsets,
                    tensor=local[found.kept] if found.kept else local,
                )
            )
    return tuple(shards)


def _places(shard: Shard, placement: ParameterPlacement, *, every_copy: bool) -> list[GlobalShard]:
    """The parts of the whole tensor that a shard of the local one is: none, one, or one for each run of experts."""
    if placement.experts is None:
        found = globalize(shard, placement.tensor_dim, placement.tensor_start, placement.global_shape)
        return [] if found is None else [found]
    slots = slice(shard.offsets[0], shard.offsets[0] + shard.sizes[0])
    held, counted = placement.experts[slots], placement.counted_experts[slots]
    return [
        GlobalShard(
            offsets=(held[begin], *shard.offsets[1:]),
            sizes=(end - begin, *shard.sizes[1:]),
            kept=(slice(begin, end), *(slice(0, size) for size in shard.sizes[1:])),
        )
        for begin, end in expert_runs(held, None if every_copy else counted)
    ]
