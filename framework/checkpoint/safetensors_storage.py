"""Storage of torch.distributed.checkpoint as safetensors and JSON: several shards of a tensor per rank, no pickle.

DCP's HuggingFaceStorageWriter keys the tensors of a file by name alone, so of several shards of one tensor on a
rank it keeps the last; and DCP's default storage keeps its metadata as a pickle, which runs code when it is
read. The writer and reader here implement DCP's public storage interfaces instead. (Between ranks of one job,
DCP still sends its plans as pickled objects; none of it reaches a file.)
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from counterflow.framework.checkpoint.index import DTYPE_NAMES, Index, check_files, chunk_key, read_index
from counterflow.framework.checkpoint.manifest import (
    INDEX,
    CheckpointError,
    FileRecord,
    Manifest,
    publish,
    read_manifest,
    remove_leftovers,
    step_of,
    temporary_of,
    write_json,
    write_manifest,
)
from counterflow.framework.checkpoint.planner import narrow, num_bytes_of, tensor_data_of

RANK_STATE = "rank_state"
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """Where a rank writes; rank 0 hands it to all with the plan."""

    folder: Path
    rank: int
    num_ranks: int


class SafetensorsWriter(StorageWriter):
    """DCP storage: one safetensors file a rank, in a temporary folder that rank 0 renames when all is written."""

    def __init__(
        self, folder: Path, metadata: Mapping[str, Any], rank_state: Mapping[str, Any] | None
    ) -> None:
        self._folder = folder
        self._metadata = dict(metadata)
        self._rank_state = rank_state
        self._step = step_of(folder)
        self._temporary = temporary_of(folder)
        self._is_coordinator = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator
        if not is_coordinator:
            return
        with _writing(self._temporary):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._folder.parent)
            self._temporary.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            _dtype_name(item)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            dataclasses.replace(
                plan, storage_data=_Target(folder=self._temporary, rank=rank, num_ranks=len(plans))
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        target: _Target = plan.storage_data
        path = target.folder / file_name(target.rank)
        # Widest dtype first keeps every tensor aligned in the file.
        items = sorted(plan.items, key=lambda item: -tensor_data_of(item).properties.dtype.itemsize)
        with _writing(path):
            file = _write_safetensors(path, _header(items, self._rank_state), items, planner)
        results = [WriteResult(item.index, num_bytes_of(item), file) for item in items]
        future: Future[list[WriteResult]] = Future()
        # First the file itself, because a rank may have nothing to write but its state.
        future.set_result([WriteResult(MetadataIndex(file.name), file.num_bytes, file), *results])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = [rank_results[0].storage_data for rank_results in results]
        file_of = {
            (result.index.fqn, result.index.index): result.storage_data.name
            for rank_results in results
            for result in rank_results[1:]
        }
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = {
                "dtype": DTYPE_NAMES[entry.properties.dtype],
                "shape": list(entry.size),
                "chunks": [
                    [file_of[name, number], list(chunk.offsets), list(chunk.sizes)]
                    for number, chunk in enumerate(entry.chunks)
                ],
            }
        with _writing(self._temporary):
            index = write_json(self._temporary / INDEX, {"tensors": tensors})
            manifest = Manifest(
                step=self._step, num_ranks=len(results), files=(index, *files), metadata=self._metadata
            )
            write_manifest(self._temporary, manifest)
            publish(self._temporary, self._folder)

    def discard(self) -> None:
        """Delete what was written, where this rank made the folder."""
        if self._is_coordinator:
            shutil.rmtree(self._temporary, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SafetensorsReader(StorageReader):
    """DCP storage: checks the files of a checkpoint, then reads the chunks a plan asks for."""

    manifest: Manifest
    _index: Index

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup | None,
        *,
        verify_checksums: bool,
        digest: str | None = None,
    ) -> None:
        self._folder = folder
        self._rank = 0 if group is None else dist.get_rank(group)
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._verify_checksums = verify_checksums
        self._digest = digest
        self._error: Exception | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # DCP logs what is raised here and carries on with something else, so it is raised one call later.
        try:
            self.manifest = read_manifest(self._folder)
            if self._digest not in (None, self.manifest.digest):
                raise CheckpointError(f"'{self._folder}' was replaced by another checkpoint of its step")
            self._index = read_index(self._folder, self.manifest)
        except Exception as error:
            self._error = error
            return Metadata({})
        return Metadata(dict(self._index.tensors))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._error is not None:
            raise self._error
        part = slice(self._rank, None, self._num_ranks)
        check_files(self._folder, self.manifest, self._index, part=part, checksum=self._verify_checksums)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            index = item.storage_index
            assert index.index is not None
            per_file.setdefault(self._index.files[index.fqn][index.index], []).append(item)
        for name, items in per_file.items():
            with safe_open(self._folder / name, framework="pt") as file:
                for item in items:
                    # The file is mapped: only the pages of the narrowed part are read.
                    chunk: Tensor = file.get_tensor(self._key(item.storage_index))
                    target = planner.resolve_tensor(item)
                    target.copy_(narrow(chunk, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _key(self, index: MetadataIndex) -> str:
        assert index.index is not None
        return chunk_key(index.fqn, self._index.tensors[index.fqn].chunks[index.index])


def file_name(rank: int) -> str:
    """Name of the file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


def _dtype_name(item: WriteItem) -> str:
    dtype = tensor_data_of(item).properties.dtype
    if dtype not in DTYPE_NAMES:
        raise ValueError(
            f"tensor '{item.index.fqn}' has dtype {dtype}, which a checkpoint does not hold; convert it to one of "
            f"{', '.join(str(known).removeprefix('torch.') for known in DTYPE_NAMES)}"
        )
    return DTYPE_NAMES[dtype]


def _header(items: Sequence[WriteItem], rank_state: Mapping[str, Any] | None) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then JSON padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {}
    if rank_state is not None:
        entries["__metadata__"] = {RANK_STATE: json.dumps(rank_state)}
    end = 0
    for item in items:
        begin, end = end, end + num_bytes_of(item)
        chunk = tensor_data_of(item).chunk
        entries[chunk_key(item.index.fqn, chunk)] = {
            "dtype": _dtype_name(item),
            "shape": list(chunk.sizes),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_safetensors(
    path: Path, header: bytes, items: Sequence[WriteItem], planner: SavePlanner
) -> FileRecord:
    """Stream the items to `path` and to the disk, one tensor on the host at a time."""
    with path.open("wb") as file:
        file.write(header)
        crc32 = zlib.crc32(header)
        for item in items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            crc32 = zlib.crc32(data, crc32)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return FileRecord(name=path.name, num_bytes=file.tell(), crc32=crc32)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say what an operating system's error means for a checkpoint."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"the folder '{path.parent}', made by rank 0, is not seen here; write checkpoints to storage that all "
            "ranks share, in a folder that no other run writes to"
        ) from error
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise CheckpointError(
                f"no room to write there ({error.strerror}); free some, or keep fewer checkpoints (checkpoint.keep)"
            ) from error
        raise CheckpointError(
            f"cannot write '{path}' ({error.strerror}); check that the folder's storage is in order and may be "
            "written"
        ) from error
