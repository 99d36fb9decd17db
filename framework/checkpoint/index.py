"""The index of a checkpoint, held against its manifest and the headers of its shards before a tensor is touched.

A checksum tells rot, not whether what was sealed makes sense: a file beside the folder, a dtype or shape that the
shard does not have, and chunks that leave gaps are found here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from counterflow.framework.checkpoint.manifest import INDEX, CheckpointError, Manifest, check_file, read_json
from counterflow.framework.checkpoint.planner import tiling_problem

# Names of dtypes in the safetensors format (https://huggingface.co/docs/safetensors).
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Every tensor of a checkpoint; files: of each tensor the file of each chunk."""

    tensors: Mapping[str, TensorStorageMetadata]
    files: Mapping[str, Sequence[str]]

    def chunks_of(self, files: Collection[str]) -> dict[str, dict[str, tuple[str, list[int]]]]:
        """Of each of `files`, dtype's name and shape of each chunk by its key there."""
        chunks: dict[str, dict[str, tuple[str, list[int]]]] = {file: {} for file in files}
        for name, tensor in self.tensors.items():
            dtype = DTYPE_NAMES[tensor.properties.dtype]
            for file, chunk in zip(self.files[name], tensor.chunks, strict=True):
                if file in chunks:
                    chunks[file][chunk_key(name, chunk)] = dtype, list(chunk.sizes)
        return chunks


def chunk_key(name: str, chunk: ChunkStorageMetadata) -> str:
    """The key of a chunk in its file, such as `model.norm.weight[0:64]`; unique, as chunks do not overlap."""
    ranges = (f"{start}:{start + size}" for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{name}[{','.join(ranges)}]"


def read_index(folder: Path, manifest: Manifest) -> Index:
    """The index in `folder`.

    Raises CheckpointError: where it is damaged, names a file that the manifest does not, or its chunks do not make
    up their tensors.
    """
    records = {file.name: file for file in manifest.files}
    path = folder / INDEX
    if INDEX not in records:
        raise CheckpointError(f"'{folder}' is damaged: its manifest does not list {INDEX}")
    check_file(folder, records[INDEX], checksum=True)
    try:
        entries = {name: _entry(entry) for name, entry in read_json(path)["tensors"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"'{path}' is damaged: it is no index of tensors ({error!r})") from None
    for name, (tensor, files) in entries.items():
        for file in files:
            if file not in records or file == INDEX:
                raise CheckpointError(
                    f"'{path}' is damaged: tensor '{name}' is said to be in '{file}', which is no file of this "
                    "checkpoint"
                )
        if (problem := _out_of_bounds(tensor) or tiling_problem(tensor)) is not None:
            raise CheckpointError(f"'{path}' is damaged: tensor '{name}'{problem}")
    return Index(
        tensors={name: tensor for name, (tensor, _) in entries.items()},
        files={name: files for name, (_, files) in entries.items()},
    )


def check_files(folder: Path, manifest: Manifest, index: Index, *, part: slice, checksum: bool) -> None:
    """Hold the files `part` of the manifest against their records, and the chunks in them against the index.

    Raises CheckpointError: naming the file and what is wrong with it.
    """
    files = manifest.files[part]
    chunks = index.chunks_of({file.name for file in files})
    for file in files:
        check_file(folder, file, checksum=checksum)
        if file.name != INDEX:
            _check_shard(folder / file.name, chunks[file.name])


def _check_shard(path: Path, expected: Mapping[str, tuple[str, list[int]]]) -> None:
    try:
        with safe_open(path, framework="pt") as shard:
            held = set(shard.keys())
            for key, (dtype, shape) in expected.items():
                if key not in held:
                    raise CheckpointError(f"'{path}' does not hold '{key}', which {INDEX} says is there")
                part = shard.get_slice(key)
                if (part.get_dtype(), part.get_shape()) != (dtype, shape):
                    raise CheckpointError(
                        f"'{path}' holds '{key}' as {part.get_dtype()} of shape {part.get_shape()}, and {INDEX} says "
                        f"{dtype} of shape {shape}"
                    )
    except SafetensorError as error:
        raise CheckpointError(f"'{path}' is damaged: it is no safetensors file ({error})") from None


def _entry(entry: Any) -> tuple[TensorStorageMetadata, list[str]]:
    chunks = entry["chunks"]
    tensor = TensorStorageMetadata(
        properties=TensorProperties(dtype=_DTYPES[entry["dtype"]]),
        size=_size(entry["shape"]),
        chunks=[
            ChunkStorageMetadata(offsets=_size(offsets), sizes=_size(sizes)) for _, offsets, sizes in chunks
        ],
    )
    files = [file for file, _, _ in chunks]
    if not all(isinstance(file, str) for file in files):
        raise TypeError("a file's name is text")
    return tensor, files


def _size(values: Any) -> torch.Size:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} is no shape")
    return torch.Size(values)


def _out_of_bounds(tensor: TensorStorageMetadata) -> str | None:
    for chunk in tensor.chunks:
        is_inside = len(chunk.offsets) == len(chunk.sizes) == len(tensor.size) and all(
            offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        )
        if not is_inside or math.prod(chunk.sizes) == 0:
            return (
                f": a chunk of shape {tuple(chunk.sizes)} at {tuple(chunk.offsets)} is not inside its shape "
                f"{tuple(tensor.size)}"
            )
    return None
