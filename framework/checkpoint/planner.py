"""Plans of torch.distributed.checkpoint over boxes: who writes which chunk, and which chunks fill which box.

DCP's own planners take one tensor of a name per rank; a ZeRO shard is several boxes of one tensor.
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

from counterflow.framework.checkpoint.box import TensorBox

# (name, offsets, sizes): equal keys are copies of one box.
BoxKey = tuple[str, tuple[int, ...], tuple[int, ...]]


class BoxSavePlanner(SavePlanner):
    """Saves `boxes`; a box that several ranks hold is written by one of them, so that all write about as much."""

    def __init__(self, boxes: Sequence[TensorBox]) -> None:
        self._boxes = {key_of(box): box for box in boxes if box.tensor.numel()}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(box) for box in self._boxes.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises ValueError: where ranks disagree on a tensor, boxes overlap, or a tensor has gaps."""
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
        return self._boxes[_item_key(write_item)].tensor.detach()


class BoxLoadPlanner(LoadPlanner):
    """Fills `boxes` in place from every chunk that overlaps them, whatever layout wrote the chunks.

    `partial`: tensors of the checkpoint that no rank asks for are left aside instead of refused; those whose names
    begin with one of `optional` always are.
    """

    def __init__(
        self, boxes: Sequence[TensorBox], *, checkpoint: str, partial: bool, optional: tuple[str, ...] = ()
    ) -> None:
        self._boxes: dict[str, list[TensorBox]] = defaultdict(list)
        for box in boxes:
            if box.tensor.numel():
                self._boxes[box.name].append(box)
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
        missing = [name for name in self._boxes if name not in self._stored]
        if missing:
            raise ValueError(self._missing(missing))
        items: list[ReadItem] = []
        for name, boxes in self._boxes.items():
            stored = self._stored[name]
            for box in boxes:
                self._check(box, stored)
            found = create_read_items_for_chunk_list(name, stored, [_chunk_of(box) for box in boxes])
            filled = sum(math.prod(item.lengths) for item in found)
            wanted = sum(box.tensor.numel() for box in boxes)
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
        tensor = self._boxes[index.fqn][index.index].tensor.detach()
        return narrow(tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def _missing(self, names: list[str]) -> str:
        near = difflib.get_close_matches(names[0], self._stored, n=2)
        hint = f" (it has {_examples(near)})" if near else ""
        return (
            f"'{self._checkpoint}' has no tensor {_examples(names)}{hint}: the model or optimizer is not the one "
            f"that was saved ({len(names)} of {len(self._boxes)} tensors of this rank are missing); resume with the "
            "configuration in the run's folder"
        )

    def _check(self, box: TensorBox, stored: TensorStorageMetadata) -> None:
        if tuple(stored.size) != tuple(box.global_shape):
            raise ValueError(
                f"tensor '{box.name}' has shape {tuple(stored.size)} in '{self._checkpoint}' and shape "
                f"{tuple(box.global_shape)} here: the model is not the one that was saved; resume with the "
                "configuration in the run's folder"
            )
        dtype = stored.properties.dtype
        if dtype != box.tensor.dtype and not (dtype.is_floating_point and box.tensor.dtype.is_floating_point):
            raise ValueError(
                f"tensor '{box.name}' has dtype {dtype} in '{self._checkpoint}' and {box.tensor.dtype} here: only "
                "floating-point dtypes are converted; load it into a tensor of its own dtype"
            )


def key_of(box: TensorBox) -> BoxKey:
    """What makes two boxes copies of each other."""
    return box.name, tuple(box.offsets), box.sizes


def narrow(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The part of `tensor` at `offsets` of `sizes`: a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _chunk_of(box: TensorBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _write_item(box: TensorBox) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(box.name, box.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk_of(box),
            properties=TensorProperties(dtype=box.tensor.dtype),
            size=torch.Size(box.global_shape),
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
    """The boxes each rank writes: its own, and of the copies the next largest to the rank with least to write."""
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
        # Matched against themselves, disjoint chunks give one overlap each.
        if len(create_read_items_for_chunk_list(name, tensor, tensor.chunks)) != len(tensor.chunks):
            raise ValueError(
                f"tensor '{name}': boxes overlap without being equal, so it is not known which value counts; save "
                "copies as equal boxes, or from one rank only"
            )
        held, whole = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
        if held != whole:
            raise ValueError(
                f"tensor '{name}' of shape {tuple(tensor.size)}: the ranks hold {held} of its {whole} elements; "
                "each element must be in a box of some rank"
            )
    return dict(sorted(tensors.items()))


def _examples(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
