"""A checkpoint that was sealed again after a change is looked at, not believed: nothing is loaded from it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from counterflow.framework.checkpoint.manifest import CheckpointError, newest, step_folder
from counterflow.framework.checkpoint.shard import TensorShard
from counterflow.framework.checkpoint.storage import load, save

SHARD = "rank-00000.safetensors"
Change = Callable[[dict[str, Any]], None]


def _shard(value: float = 0.0) -> TensorShard:
    return TensorShard(name="w", global_shape=(4, 3), offsets=(0, 0), tensor=torch.full((4, 3), value))


def _saved(root: Path, step: int = 8) -> Path:
    folder = step_folder(root, step)
    save(folder, [_shard(1.0)], {}, group=None)
    return folder


def _seal(folder: Path, change_manifest: Change = lambda _: None) -> None:
    """Write sizes and checksums as they are now into the manifest, as who changed a file on purpose would."""
    content = json.loads((folder / "metadata.json").read_text())
    for name in list(content["files"]):
        data = (folder / name).read_bytes()
        content["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    change_manifest(content)
    content.pop("crc32")
    content["crc32"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (folder / "metadata.json").write_text(json.dumps(content))


def _refused(folder: Path, match: str) -> None:
    shard = _shard(7.0)
    with pytest.raises(CheckpointError, match=match):
        load(folder, [shard], group=None)
    assert bool((shard.tensor == 7).all())


def _entry(**changes: Any) -> Change:
    return lambda index: index["tensors"]["w"].update(changes)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_entry(chunks=[["../other/x.safetensors", [0, 0], [4, 3]]]), r"which is no file of this checkpoint"),
        (_entry(chunks=[["/etc/passwd", [0, 0], [4, 3]]]), r"which is no file of this checkpoint"),
        (_entry(dtype="BF16"), r"holds 'w\[0:4,0:3\]' as F32 of shape \[4, 3\], and index.json says BF16"),
        (_entry(dtype="PICKLE"), r"is no index of tensors"),
        (_entry(shape=[4, 4]), r"the ranks hold 12 of its 16 elements"),
        (_entry(shape=[4, 2]), r"a chunk of shape \(4, 3\) at \(0, 0\) is not inside its shape \(4, 2\)"),
        (
            _entry(shape=[3, 4], chunks=[[SHARD, [0, 0], [3, 4]]]),
            r"does not hold 'w\[0:3,0:4\]', which index.json",
        ),
        (_entry(chunks=[[SHARD, [0, 0], [4, 3]], [SHARD, [0, 0], [4, 3]]]), r"shards overlap"),
        (_entry(chunks=[[SHARD, [-1, 0], [4, 3]]]), r"is no index of tensors"),
        (_entry(chunks=[[SHARD, [0.5, 0], [4, 3]]]), r"is no index of tensors"),
        (_entry(chunks=[[7, [0, 0], [4, 3]]]), r"is no index of tensors"),
        (_entry(chunks=[["index.json", [0, 0], [4, 3]]]), r"which is no file of this checkpoint"),
        (lambda index: index.pop("tensors"), r"is no index of tensors"),
        (lambda index: index.update(tensors=[1]), r"is no index of tensors"),
    ],
)
def test_an_index_that_does_not_fit_its_shards(tmp_path: Path, change: Change, match: str) -> None:
    folder = _saved(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    _seal(folder)
    _refused(folder, match)


def test_a_shard_of_another_shape_or_none_at_all(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    (key,) = load_file(folder / SHARD)
    save_file({key: torch.zeros(3, 4)}, folder / SHARD)
    _seal(folder)
    _refused(folder, r"as F32 of shape \[3, 4\], and index.json says F32 of shape \[4, 3\]")
    (folder / SHARD).write_bytes(b"\x80\x04no tensors")
    _seal(folder)
    _refused(folder, r"is damaged: it is no safetensors file")


def _rename(old: str, new: str) -> Change:
    return lambda content: content["files"].update({new: content["files"].pop(old)})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_rename(SHARD, f"../step-00000004/{SHARD}"), r"is no file of the folder"),
        (_rename(SHARD, f"/tmp/{SHARD}"), r"is no file of the folder"),
        (_rename(SHARD, ".."), r"is no file of the folder"),
        (_rename("index.json", "other.json"), r"does not list index.json|is missing"),
        (
            lambda content: content.update(step=4),
            r"holds step 4 and was renamed; call it 'step-00000004' again",
        ),
        (lambda content: content.update(step="8"), r"'8' is no count"),
        (lambda content: content.update(num_ranks=-1), r"-1 is no count"),
        (lambda content: content.update(files=[]), r"is no manifest"),
        (lambda content: content.update(metadata=3), r"is no manifest"),
        (lambda content: content.pop("step"), r"is no manifest"),
    ],
)
def test_a_manifest_that_makes_no_sense(tmp_path: Path, change: Change, match: str) -> None:
    folder = _saved(tmp_path)
    _seal(folder, change)
    _refused(folder, match)
    assert newest(tmp_path)[0] is None


def test_a_folder_that_was_renamed_to_another_step(tmp_path: Path) -> None:
    _saved(tmp_path, 4)
    _saved(tmp_path, 6).rename(step_folder(tmp_path, 9))
    found, passed_over = newest(tmp_path)
    assert found == step_folder(tmp_path, 4)
    assert passed_over == [
        f"'{step_folder(tmp_path, 9)}' holds step 6 and was renamed; call it 'step-00000006' again"
    ]
    _refused(step_folder(tmp_path, 9), "holds step 6 and was renamed")


def _link(path: Path) -> None:
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["metadata.json", "index.json", SHARD])
@pytest.mark.parametrize(
    ("replace", "match"),
    [(_link, "is a symbolic link"), (_pipe, "is no regular file"), (_folder, "is no regular file")],
)
def test_what_is_no_file_is_neither_followed_nor_waited_for(
    tmp_path: Path, name: str, replace: Callable[[Path], None], match: str
) -> None:
    folder = _saved(tmp_path)
    replace(folder / name)
    _refused(folder, match)
    assert newest(tmp_path)[0] is None


def test_deeply_nested_json_is_damage(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    (folder / "metadata.json").write_text("[" * 100_000)
    _refused(folder, "is not valid JSON")
