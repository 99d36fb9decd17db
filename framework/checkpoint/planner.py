"""Plans of torch.distributed.checkpoint over shards: who writes which chunk, and which chunks fill which shard.

DCP's own planners take one tensor of a name per rank; a ZeRO shard is several shards of one tensor.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from counterflow.framework.checkpoint.shard import TensorShard

# (name, offsets, sizes): equal keys are copies of one shard.
BoxKey = tuple[str, tuple[int, ...], tuple[int, ...]]


class ShardSavePlanner(SavePlanner):
    """Saves `shards`; a shard that several ranks hold is written by one of them, so that all write about as much."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._shards = {key_of(shard): shard for shard in shards if shard.tensor.numel()}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(shard) for shard in self._shards.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises ValueError: where ranks disagree on a tensor, shards overlap, or a tensor has gaps."""
        metadata = _global_metadata(all_plans)
        place = {
            (name, tuple(chunk.offsets), tuple(chunk.sizes)): number
            for name, entry in metadata.items()
            for number, chunk in enumerate(entry.chunks)
        }
        plans: list[SavePlan] = []
        for plan, keys in zip(all_plans, _balance(all_plans), strict=True):
            items = [
                dataclasses.replace(
                    item, index=MetadataIndex(item.index.fqn, item.index.offset, place[_item_key(item)])
                )
                for item in plan.items
                if _item_key(item) in keys
            ]
            plans.append(dataclasses.replace(plan, items=items))
        return plans, Metadata(dict(metadata))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._shards[_item_key(write_item)].tensor.detach()


class ShardLoadPlanner(LoadPlanner):
    """Fills `shards` in place from every chunk that overlaps them, whatever layout wrote the chunks.

    `partial`: tensors of the checkpoint that no rank asks for are left aside instead of refused; those whose names
    begin with one of `optional` always are.
    """

    def __init__(
        self, shards: Sequence[TensorShard], *, checkpoint: str, partial: bool, optional: tuple[str, ...] = ()
    ) -> None:
        self._shards: dict[str, list[TensorShard]] = defaultdict(list)
        for shard in shards:
            if shard.tensor.numel():
                self._shards[shard.name].append(shard)
        self._checkpoint = checkpoint
        self._partial, self._optional = partial, optional
        self._stored: dict[str, TensorStorageMetadata] = {}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            self._stored[name] = entry

    def create_local_plan(self) -> LoadPlan:
        """Raises ValueError: where a tensor is missing, or has another shape or kind of dtype."""
        missing = [name for name in self._shards if name not in self._stored]
        if missing:
            raise ValueError(self._missing(missing))
        items: list[ReadItem] = []
        for name, shards in self._shards.items():
            stored = self._stored[name]
            for shard in shards:
                self._check(shard, stored)
            found = create_read_items_for_chunk_list(name, stored, [_chunk_of(shard) for shard in shards])
            filled = sum(math.prod(item.lengths) for item in found)
            wanted = sum(shard.tensor.numel() for shard in shards)
            # Saving refuses gaps and overlaps, so anything else means an index this program did not write.
            assert filled == wanted, (name, filled, wanted)
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raises ValueError: where no rank asks for some tensor of the checkpoint, unless `partial`."""
        unused = {name for name in self._stored if not name.startswith(self._optional)}
        unused -= {item.dest_index.fqn for plan in global_plan for item in plan.items}
        if unused and not self._partial:
            raise ValueError(
                f"'{self._checkpoint}' holds {len(unused)} tensors that no rank has a place for, such as "
                f"{_examples(sorted(unused))}: the model or optimizer is not the one that was saved; resume with "
                "the configuration in the run's folder, or load with partial=True to leave them aside"
            )
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a checkpoint holds tensors and JSON only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.index is not None
        tensor = self._shards[index.fqn][index.index].tensor.detach()
        return narrow(tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def _missing(self, names: list[str]) -> str:
        near = difflib.get_close_matches(names[0], self._stored, n=2)
        hint = f" (it has {_examples(near)})" if near else ""
        return (
            f"'{self._checkpoint}' has no tensor {_examples(names)}{hint}: the model or optimizer is not the one "
            f"that was saved ({len(names)} of {len(self._shards)} tensors of this rank are missing); resume with the "
            "configuration in the run's folder"
        )

    def _check(self, shard: TensorShard, stored: TensorStorageMetadata) -> None:
        if tuple(stored.size) != tuple(shard.global_shape):
            raise ValueError(
                f"tensor '{shard.name}' has shape {tuple(stored.size)} in '{self._checkpoint}' and shape "
                f"{tuple(shard.global_shape)} here: the model is not the one that was saved; resume with the "
                "configuration in the run's folder"
            )
        dtype = stored.properties.dtype
        if dtype != shard.tensor.dtype and not (
            dtype.is_floating_point and shard.tensor.dtype.is_floating_point
        ):
            raise ValueError(
                f"tensor '{shard.name}' has dtype {dtype} in '{self._checkpoint}' and {shard.tensor.dtype} here: only "
                "floating-point dtypes are converted; load it into a tensor of its own dtype"
            )


def key_of(shard: TensorShard) -> BoxKey:
    """What makes two shards copies of each other."""
    return shard.name, tuple(shard.offsets), shard.sizes


def narrow(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The part of `tensor` at `offsets` of `sizes`: a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _chunk_of(shard: TensorShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(shard.offsets), sizes=torch.Size(shard.sizes))


def _write_item(shard: TensorShard) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(shard.name, shard.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk_of(shard),
            properties=TensorProperties(dtype=shard.tensor.dtype),
            size=torch.Size(shard.global_shape),
        ),
    )


def tensor_data_of(item: WriteItem) -> TensorWriteData:
    """What `item` says about its tensor: every item here is one."""
    assert item.tensor_data is not None
    return item.tensor_data


def num_bytes_of(item: WriteItem) -> int:
    """Bytes of the chunk (DCP's own figure is that of the whole tensor)."""
    data = tensor_data_of(item)
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _item_key(item: WriteItem) -> BoxKey:
    chunk = tensor_data_of(item).chunk
    return item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes)


def _balance(plans: Sequence[SavePlan]) -> list[set[BoxKey]]:
    """The shards each rank writes: its own, and of the copies the next largest to the rank with least to write."""
    holders: dict[BoxKey, list[int]] = defaultdict(list)
    num_bytes: dict[BoxKey, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = _item_key(item)
            holders[key].append(rank)
            num_bytes[key] = num_bytes_of(item)
    load = [0] * len(plans)
    chosen: list[set[BoxKey]] = [set() for _ in plans]
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -num_bytes[key], key)):
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        load[rank] += num_bytes[key]
        chosen[rank].add(key)
    return chosen


def _global_metadata(plans: Sequence[SavePlan]) -> dict[str, TensorStorageMetadata]:
    """Every tensor with its distinct chunks, sorted by name and offsets, checked to tile the tensor."""
    tensors: dict[str, TensorStorageMetadata] = {}
    keys: set[BoxKey] = set()
    for item in (item for plan in plans for item in plan.items):
        name, data = item.index.fqn, tensor_data_of(item)
        known = tensors.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
        if known.size != data.size or known.properties.dtype != data.properties.dtype:
            raise ValueError(
                f"tensor '{name}' is {known.properties.dtype} of shape {tuple(known.size)} on one rank and "
                f"{data.properties.dtype} of shape {tuple(data.size)} on another; a name stands for one tensor"
            )
        if (key := _item_key(item)) not in keys:
            keys.add(key)
            known.chunks.append(data.chunk)
    for name, tensor in tensors.items():
        tensor.chunks.sort(key=lambda chunk: (tuple(chunk.offsets), tuple(chunk.sizes)))
        if (problem := tiling_problem(tensor)) is not None:
            raise ValueError(f"tensor '{name}'{problem}")
    return dict(sorted(tensors.items()))


def tiling_problem(tensor: TensorStorageMetadata) -> str | None:
    """Why the chunks of `tensor`, which lie inside it, do not make it up; None where they do."""
    # Matched against themselves, disjoint chunks give one overlap each.
    if len(create_read_items_for_chunk_list("", tensor, tensor.chunks)) != len(tensor.chunks):
        return (
            ": shards overlap without being equal, so it is not known which value counts; save copies as equal shards, "
            "or from one rank only"
        )
    held, whole = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
    if held != whole:
        return (
            f" of shape {tuple(tensor.size)}: the ranks hold {held} of its {whole} elements; each element must be in a "
            "shard of some rank"
        )
    return None


def _examples(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
