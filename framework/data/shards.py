"""Tokens on disk: shard files of little-endian integers and a JSON index beside them.

A split is a folder with `index.json` and `00000.bin`, `00001.bin`, ...: the tokens in order, uint16 where the
vocabulary allows it, else uint32. Documents end with the end-of-text token. The index knows each shard's length
and hash and its own, so a short or damaged file is found and named.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from counterflow.framework.data import sealed

FORMAT_VERSION = 2
SHARD_TOKENS = 1 << 28
_HASH_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of tokens."""

    file: str
    num_tokens: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitIndex:
    """The index of a split. `dtype` is `uint16` or `uint32`, stored little-endian.

    tokenizer_sha256: of the file of the tokenizer that made the tokens. num_unknown_tokens: how many of them stand for
    text that it cannot express; num_dropped_characters: how many characters it left out.
    """

    version: int
    dtype: str
    vocab_size: int
    end_of_text_id: int
    num_tokens: int
    num_documents: int
    shards: tuple[Shard, ...]
    tokenizer_sha256: str = ""
    num_unknown_tokens: int = 0
    num_dropped_characters: int = 0

    @property
    def storage_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.storage_dtype.itemsize

    @property
    def content_hash(self) -> str:
        """A hash of the tokens: equal on two machines when they train on the same data."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()


def dtype_for(vocab_size: int) -> str:
    """The narrowest stored dtype for token ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class SplitWriter:
    """Writes one split into `folder`: `append` documents, then `finish`.

    A document that `continues` the one before it is joined to it without a separator. Nothing counts as
    written until `finish`; the caller builds in a folder of its own and renames that.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        end_of_text_id: int,
        shard_tokens: int = SHARD_TOKENS,
        tokenizer_sha256: str = "",
    ) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_of_text_id = end_of_text_id
        self._shard_tokens = shard_tokens
        self._tokenizer_sha256 = tokenizer_sha256
        self._dtype = np.dtype(dtype_for(vocab_size)).newbyteorder("<")
        self._separator = np.array([end_of_text_id], dtype=self._dtype)
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._in_shard = 0
        self._num_documents = 0
        self._num_unknown_tokens = 0
        self._num_dropped_characters = 0

    @property
    def num_documents(self) -> int:
        return self._num_documents

    def append(
        self,
        tokens: NDArray[np.integer],
        *,
        continues: bool = False,
        num_unknown_tokens: int = 0,
        num_dropped_characters: int = 0,
    ) -> None:
        if not continues:
            if self._num_documents:
                self._write(self._separator)
            self._num_documents += 1
        self._num_unknown_tokens += num_unknown_tokens
        self._num_dropped_characters += num_dropped_characters
        self._write(tokens.astype(self._dtype, copy=False))

    def finish(self) -> SplitIndex:
        """Close the last document and shard, and write the index."""
        if self._num_documents:
            self._write(self._separator)
        self._close_shard()
        index = SplitIndex(
            version=FORMAT_VERSION,
            dtype=dtype_for(self._vocab_size),
            vocab_size=self._vocab_size,
            end_of_text_id=self._end_of_text_id,
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            num_documents=self._num_documents,
            shards=tuple(self._shards),
            tokenizer_sha256=self._tokenizer_sha256,
            num_unknown_tokens=self._num_unknown_tokens,
            num_dropped_characters=self._num_dropped_characters,
        )
        sealed.write_whole(self._folder / "index.json", sealed.seal(dataclasses.asdict(index)))
        return index

    def _write(self, tokens: NDArray[np.integer]) -> None:
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / f"{len(self._shards):05d}.bin").open("wb")
            part = tokens[: self._shard_tokens - self._in_shard]
            data = part.tobytes()
            self._file.write(data)
            self._hash.update(data)
            self._in_shard += len(part)
            tokens = tokens[len(part) :]
            if self._in_shard == self._shard_tokens:
                self._close_shard()

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = f"{len(self._shards):05d}.bin"
        self._shards.append(Shard(file=name, num_tokens=self._in_shard, sha256=self._hash.hexdigest()))
        self._file, self._hash, self._in_shard = None, hashlib.sha256(), 0


def read_index(folder: Path) -> SplitIndex:
    """Read and check the index of the split in `folder`, and the length of its shards.

    Raises ValueError: where the folder holds no split, the index is damaged or of another version, or a shard
    is missing, short or long.
    """
    path = folder / "index.json"
    remedy = f"remove {folder.parent} to have it prepared again"
    index: SplitIndex | None = None
    try:
        data = path.read_bytes()
        version = json.loads(data)["version"]
        if version == FORMAT_VERSION:
            record = sealed.opened(data)
            shards = tuple(Shard(**shard) for shard in record.pop("shards"))
            index = SplitIndex(shards=shards, **record)
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no tokens: there is no index.json; {remedy}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}") from None
    if index is None:
        raise ValueError(f"{path} is of version {version}, this program reads {FORMAT_VERSION}; {remedy}")
    for shard in index.shards:
        expected = shard.num_tokens * index.storage_dtype.itemsize
        file = folder / shard.file
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"{file} {found}, the index says {expected} bytes; {remedy}")
    return index


def check_hashes(folder: Path, index: SplitIndex) -> None:
    """Read every shard and compare its hash with the index.

    Raises ValueError: naming the first damaged shard.
    """
    for shard in index.shards:
        digest = hashlib.sha256()
        try:
            with (folder / shard.file).open("rb") as stream:
                while chunk := stream.read(_HASH_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise ValueError(f"{folder / shard.file} cannot be read ({error.strerror})") from None
        if digest.hexdigest() != shard.sha256:
            raise ValueError(
                f"{folder / shard.file} is damaged: its SHA-256 is not the one in the index; remove "
                f"{folder.parent} to have it prepared again"
            )
