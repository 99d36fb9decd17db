"""Shard files: their layout by hand, and damage that is found."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from counterflow.framework.data.shards import SplitIndex, SplitWriter, check_hashes, dtype_for, read_index

DOCUMENTS = ([5, 6, 7], [8], [9, 10, 11, 12])


def write(folder: Path, *, vocab_size: int = 300, shard_tokens: int = 4) -> SplitIndex:
    writer = SplitWriter(folder, vocab_size=vocab_size, end_of_text_id=0, shard_tokens=shard_tokens)
    for tokens in DOCUMENTS:
        writer.append(np.array(tokens))
    return writer.finish()


def test_layout_on_disk(tmp_path: Path) -> None:
    index = write(tmp_path / "split")
    assert index == read_index(tmp_path / "split")
    files = sorted(path.name for path in (tmp_path / "split").glob("*.bin"))
    assert files == ["00000.bin", "00001.bin", "00002.bin"]
    data = b"".join((tmp_path / "split" / name).read_bytes() for name in files)
    expected = [5, 6, 7, 0, 8, 0, 9, 10, 11, 12, 0]
    assert data == b"".join(token.to_bytes(2, "little") for token in expected)
    assert [shard.num_tokens for shard in index.shards] == [4, 4, 3]
    assert index.shards[0].sha256 == hashlib.sha256(data[:8]).hexdigest()
    assert (index.num_tokens, index.num_documents, index.dtype) == (11, 3, "uint16")


def test_a_continued_document_has_no_separator_inside(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path / "s", vocab_size=300, end_of_text_id=0)
    writer.append(np.array([1, 2]))
    writer.append(np.array([3]), continues=True)
    writer.append(np.array([4]))
    writer.finish()
    assert np.fromfile(tmp_path / "s" / "00000.bin", "<u2").tolist() == [1, 2, 3, 0, 4, 0]


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    assert dtype_for(65536) == "uint16"
    assert dtype_for(65537) == "uint32"
    writer = SplitWriter(tmp_path / "s", vocab_size=129280, end_of_text_id=1)
    writer.append(np.array([129279]))
    writer.finish()
    assert np.fromfile(tmp_path / "s" / "00000.bin", "<u4").tolist() == [129279, 1]


def test_an_empty_split_is_an_index_without_shards(tmp_path: Path) -> None:
    index = SplitWriter(tmp_path / "s", vocab_size=300, end_of_text_id=0).finish()
    assert (index.num_tokens, index.shards) == (0, ())
    assert read_index(tmp_path / "s") == index


def test_the_content_hash_follows_the_tokens(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert first.content_hash == second.content_hash
    writer = SplitWriter(tmp_path / "c", vocab_size=300, end_of_text_id=0)
    writer.append(np.array([5, 6]))
    assert writer.finish().content_hash != first.content_hash


def test_short_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "train"
    index = write(folder)
    shard = folder / "00001.bin"
    data = shard.read_bytes()

    shard.write_bytes(data[:-2])
    with pytest.raises(ValueError, match=r"00001\.bin has 6 bytes, the index says 8 bytes; remove .*store"):
        read_index(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"00001\.bin is missing"):
        read_index(folder)
    shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ValueError, match=r"00001\.bin is damaged: its SHA-256"):
        check_hashes(folder, read_index(folder))
    shard.write_bytes(data)
    check_hashes(folder, index)


def test_a_bad_index_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "train"
    write(folder)
    path = folder / "index.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "version": 99}))
    with pytest.raises(ValueError, match=r"of version 99, this program reads 2; remove"):
        read_index(folder)
    path.write_text(json.dumps(record)[:40])
    with pytest.raises(ValueError, match=r"index\.json is damaged \(JSONDecodeError"):
        read_index(folder)
    del record["dtype"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"index\.json is damaged \(ValueError: its SHA-256"):
        read_index(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"train holds no tokens: there is no index\.json"):
        read_index(folder)


@pytest.mark.parametrize("name", ["vocab_size", "end_of_text_id", "num_tokens", "num_documents"])
def test_a_changed_digit_in_the_index_is_found(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "store" / "train"
    write(folder)
    path = folder / "index.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, name: record[name] + 1}))
    with pytest.raises(
        ValueError, match=r"index\.json is damaged \(ValueError: its SHA-256 is another\); remove"
    ):
        read_index(folder)
