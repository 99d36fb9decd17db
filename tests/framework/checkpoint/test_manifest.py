from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from counterflow.framework.checkpoint.config import CheckpointConfig
from counterflow.framework.checkpoint.manifest import (
    FileRecord,
    Manifest,
    check_file,
    latest,
    prune,
    read_manifest,
    read_metadata,
    step_folder,
    step_of,
    write_manifest,
)


def _checkpoint(root: Path, step: int) -> Path:
    folder = step_folder(root, step)
    folder.mkdir(parents=True)
    data = f"content of {step}".encode()
    (folder / "data").write_bytes(data)
    file = FileRecord(name="data", num_bytes=len(data), crc32=zlib.crc32(data))
    write_manifest(
        folder, Manifest(step=step, num_ranks=1, files=(file,), metadata={"config_hash": "abc", "lr": 0.1})
    )
    return folder


def test_manifest_round_trip(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, 123)
    assert folder.name == "step-00000123"
    assert step_of(folder) == 123
    assert read_metadata(folder) == {"step": 123, "config_hash": "abc", "lr": 0.1}
    check_file(folder, read_manifest(folder).files[0], checksum=True)


def test_latest_passes_over_temporary_and_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    first, second, third, fourth = (_checkpoint(tmp_path, step) for step in (1, 2, 3, 100_000_000))
    _checkpoint(tmp_path, 200_000_000).rename(tmp_path / "step-200000000.tmp-0123abcd")
    (tmp_path / "step-99.txt").write_text("")
    assert latest(tmp_path) == fourth
    assert latest(tmp_path, before=3) == second
    (fourth / "data").write_bytes(b"short")
    assert latest(tmp_path) == third
    assert "truncated" in caplog.text
    assert str(fourth) in caplog.text
    (third / "metadata.json").unlink()
    assert latest(tmp_path) == second
    (second / "data").unlink()
    assert latest(tmp_path) == first
    text = (first / "metadata.json").read_text()
    (first / "metadata.json").write_text(text[:-5])
    assert latest(tmp_path) is None


def test_a_changed_manifest_is_damaged(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, 1)
    text = (folder / "metadata.json").read_text()
    (folder / "metadata.json").write_text(text.replace('"lr": 0.1', '"lr": 0.2'))
    assert latest(tmp_path) is None


def test_unknown_format_version_is_refused_not_passed_over(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 1)
    folder = _checkpoint(tmp_path, 2)
    content = json.loads((folder / "metadata.json").read_text())
    content["format_version"] = 7
    (folder / "metadata.json").write_text(json.dumps(content))
    assert latest(tmp_path) == folder
    with pytest.raises(ValueError, match="format version 7, and this program reads version 1"):
        read_metadata(folder)


def test_prune_keeps_the_newest_whole(tmp_path: Path) -> None:
    folders = {step: _checkpoint(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    (folders[4] / "data").write_bytes(b"")
    (folders[1] / "data").write_bytes(b"")
    prune(tmp_path, 2)
    # 4 is damaged and does not count; it is newer than what is kept, so it stays to be looked at.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000003",
        "step-00000004",
        "step-00000005",
    ]
    with pytest.raises(ValueError, match="keep=0"):
        prune(tmp_path, 0)


def test_names_and_config_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'.*/checkpoint-7' is not the name of a checkpoint"):
        step_of(tmp_path / "checkpoint-7")
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0"):
        CheckpointConfig(keep=0)
    with pytest.raises(ValueError, match=r"checkpoint\.interval_steps=-1"):
        CheckpointConfig(interval_steps=-1)
