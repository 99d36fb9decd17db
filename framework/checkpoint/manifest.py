"""The files of a checkpoint folder: its manifest, which checkpoints are whole, and which are kept.

A checkpoint is the folder `step-00000123` with
    metadata.json           format version, step, number of ranks, the caller's metadata, and the byte size and
                            crc32 of every other file; its own crc32 last
    index.json              for each tensor its dtype, its global shape and its chunks [file, offsets, sizes]
    rank-00000.safetensors  the chunks that rank wrote, keyed `name[0:4,8:16]`
A folder being written, replaced or deleted is named `step-00000123.tmp-<id>`, and is never a checkpoint.
crc32 because it is the fastest check in the standard library (2 GB/s a core; sha256 does half of it or less)
and the enemy is a truncated or rotten file, not a forger.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
MANIFEST = "metadata.json"
INDEX = "index.json"

_FOLDER = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-.+")
_READ_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged: the message names the file, the cause and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and checksum of one file of a checkpoint."""

    name: str
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What `metadata.json` says. digest: sha256 of it as it was read, by which ranks tell that they read the same."""

    step: int
    num_ranks: int
    files: tuple[FileRecord, ...]
    metadata: dict[str, Any]
    digest: str = ""


def step_folder(root: Path, step: int) -> Path:
    """The folder of the checkpoint of `step` under `root`."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The inverse of `step_folder`.

    Raises ValueError: where the folder is not named like a checkpoint.
    """
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise ValueError(
            f"'{folder}' is not the name of a checkpoint: expected step- and at least eight digits, such as "
            "step-00000123; use step_folder(root, step)"
        )
    return int(match[1])


def has_checkpoint_name(folder: Path) -> bool:
    """Whether `folder` is named as `step_folder` names one."""
    return _FOLDER.fullmatch(folder.name) is not None


def temporary_of(folder: Path) -> Path:
    """A fresh name beside `folder` under which it is written, replaced or deleted."""
    return folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:8]}")


def leftovers(root: Path) -> list[Path]:
    """What dead runs left half written under `root`, or what a living one is writing."""
    if not root.is_dir():
        return []
    return [path for path in root.iterdir() if _TEMPORARY.fullmatch(path.name)]


def remove_leftovers(root: Path) -> None:
    """Delete what dead runs left half written under `root`; one run at a time may write there."""
    for path in leftovers(root):
        shutil.rmtree(path, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> FileRecord:
    """Write `value` to `path` and to the disk."""
    data = json.dumps(value).encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(name=path.name, num_bytes=len(data), crc32=zlib.crc32(data))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `metadata.json` into `folder`.

    Raises ValueError: where the metadata is not JSON.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "num_ranks": manifest.num_ranks,
        "files": {file.name: {"bytes": file.num_bytes, "crc32": file.crc32} for file in manifest.files},
        "metadata": manifest.metadata,
    }
    try:
        checksum = _checksum(content)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the metadata of a checkpoint is JSON: {error}; give numbers, texts, lists and dicts"
        ) from error
    write_json(folder / MANIFEST, {**content, "crc32": checksum})


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`.

    Raises ValueError: where the format version is unknown. CheckpointError: where the manifest is damaged.
    """
    path = folder / MANIFEST
    data = _read_bytes(path)
    content = _parse(path, data)
    version = content.get("format_version")
    if version is not None and version != FORMAT_VERSION:
        raise ValueError(
            f"'{folder}' has checkpoint format version {version}, and this program reads version {FORMAT_VERSION}; "
            "load it with the program that wrote it"
        )
    checksum = content.pop("crc32", None)
    if checksum != _checksum(content):
        raise CheckpointError(f"'{path}' is damaged: its content does not have the crc32 it states")
    try:
        manifest = Manifest(
            step=_count(content["step"]),
            num_ranks=_count(content["num_ranks"]),
            files=tuple(
                FileRecord(
                    name=_plain_name(name), num_bytes=_count(entry["bytes"]), crc32=_count(entry["crc32"])
                )
                for name, entry in content["files"].items()
            ),
            metadata=dict(content["metadata"]),
            digest=hashlib.sha256(data).hexdigest(),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is damaged: it is no manifest ({error})") from None
    if manifest.step != step_of(folder):
        raise CheckpointError(
            f"'{folder}' holds step {manifest.step} and was renamed; call it "
            f"'{step_folder(folder.parent, manifest.step).name}' again"
        )
    return manifest


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises CheckpointError: where the file is missing or holds something else."""
    return _parse(path, _read_bytes(path))


def _read_bytes(path: Path) -> bytes:
    try:
        _regular_size(path)
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read ({error.strerror})") from None


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are the first
        raise CheckpointError(f"'{path}' is damaged: it is not valid JSON") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"'{path}' is damaged: it holds no JSON object")
    return content


def _regular_size(path: Path) -> int:
    """Bytes of the file `path`, which is itself in its folder: no link, which may lead out of it, and no pipe."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"'{path}' is missing") from None
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read ({error.strerror})") from None
    if stat.S_ISLNK(status.st_mode):
        raise CheckpointError(f"'{path}' is a symbolic link; put the file itself in its place")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"'{path}' is no regular file")
    return status.st_size


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _plain_name(name: Any) -> str:
    """`name`, where it is that of a file in the folder itself."""
    if not isinstance(name, str) or name in ("", ".", "..", MANIFEST) or set(name) & set("/\\\0"):
        raise ValueError(f"{name!r} is no file of the folder")
    return name


def read_metadata(folder: Path) -> dict[str, Any]:
    """The caller's metadata of the checkpoint in `folder`, and its `step`.

    Raises ValueError: where the format version is unknown. CheckpointError: where the manifest is damaged.
    """
    manifest = read_manifest(folder)
    return {"step": manifest.step, **manifest.metadata}


def check_file(folder: Path, file: FileRecord, *, checksum: bool) -> None:
    """Compare the size (and the crc32, which reads all of it) of a file with its record.

    Raises CheckpointError: naming the file and what is wrong with it.
    """
    path = folder / file.name
    size = _regular_size(path)
    if size != file.num_bytes:
        state = "truncated" if size < file.num_bytes else "too long"
        raise CheckpointError(f"'{path}' is {state}: it has {size} bytes and should have {file.num_bytes}")
    if checksum and (found := _file_crc32(path)) != file.crc32:
        raise CheckpointError(f"'{path}' is corrupt: its crc32 is {found:08x} and should be {file.crc32:08x}")


def newest(root: Path, *, before: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint under `root` (of a step below `before`), and what is wrong with those after it.

    Whole: the manifest is sound and every file is there in its size. Temporary folders are passed over. A checkpoint
    of an unknown format version is not damaged: `load` refuses it.
    """
    problems: list[str] = []
    for folder in reversed(_folders(root)):
        if before is not None and step_of(folder) >= before:
            continue
        if (problem := whole_problem(folder)) is None:
            return folder, problems
        problems.append(problem)
    return None, problems


def latest(root: Path, *, before: int | None = None) -> Path | None:
    """`newest`, with a warning for each checkpoint that it passes over; None where there is none."""
    folder, problems = newest(root, before=before)
    for problem in problems:
        logger.warning("passing over a damaged checkpoint: %s", problem)
    return folder


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """The checkpoint `folder` stays as long as it is read, though its run lives and prunes; where there are locks.

    Raises CheckpointError: where it is being deleted, or is not there.
    """
    gone = CheckpointError(
        f"'{folder}' is being deleted by its run, which keeps the newest ones (checkpoint.keep); name a newer one"
    )
    try:
        file = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"'{folder / MANIFEST}' cannot be read ({error.strerror})") from None
    try:
        if _locked(file, fcntl.LOCK_SH) is False:
            raise gone
        try:
            is_there = os.path.samestat(os.fstat(file), (folder / MANIFEST).lstat())
        except OSError:
            is_there = False
        if not is_there:
            raise gone
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def _not_held(folder: Path) -> Iterator[bool]:
    """Whether nobody reads `folder`, and until the end of the block nobody begins to."""
    try:
        file = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield True  # without a manifest nobody reads it
        return
    try:
        yield _locked(file, fcntl.LOCK_EX) is not False
    finally:
        os.close(file)


def _locked(file: int, kind: int) -> bool | None:
    """Whether the kernel gave its lock; None: there are none here."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def prune(root: Path, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints under `root`, and damaged ones older than those.

    One that somebody reads stays until the next time. For one rank to call. Raises ValueError: where `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least the newest checkpoint is kept; set it to 1 or more")
    num_whole = 0
    for folder in reversed(_folders(root)):
        if num_whole >= keep:
            with _not_held(folder) as is_free:
                if is_free:
                    # Renamed first, so that a checkpoint never shows half deleted.
                    doomed = temporary_of(folder)
                    folder.rename(doomed)
                    shutil.rmtree(doomed, ignore_errors=True)
        elif whole_problem(folder) is None:
            num_whole += 1


def publish(temporary: Path, folder: Path) -> None:
    """Make the finished `temporary` visible as `folder` by one rename, in place of an older one of that step."""
    sync_folder(temporary)
    replaced = None
    if folder.exists():
        replaced = temporary_of(folder)
        folder.rename(replaced)
    temporary.rename(folder)
    sync_folder(folder.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Write the entries of `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not sync folders
            raise
    finally:
        os.close(descriptor)


def remedy(folder: Path) -> str:
    """What to do about a damaged checkpoint: the newest older whole one, if there is one."""
    older = None
    with contextlib.suppress(ValueError, OSError):
        older, _ = newest(folder.parent, before=step_of(folder))
    if older is None:
        return "there is no older whole checkpoint beside it; start again, or restore the file from a copy"
    return f"go on from the older checkpoint '{older}', which is whole (checkpoint.resume={older})"


def whole_problem(folder: Path) -> str | None:
    """Why the checkpoint `folder` is not whole, by its manifest and the sizes of its files; None where it is."""
    try:
        for file in read_manifest(folder).files:
            check_file(folder, file, checksum=False)
    except CheckpointError as error:
        return str(error)
    except ValueError:
        return None
    return None


def _folders(root: Path) -> list[Path]:
    """Visible checkpoint folders under `root`, by step."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _FOLDER.fullmatch(path.name)), key=step_of)


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _file_crc32(path: Path) -> int:
    value, block = 0, memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while num_bytes := file.readinto(block):
                value = zlib.crc32(block[:num_bytes], value)
    except OSError as error:  # no permission, or a disk that gives it no more
        raise CheckpointError(f"'{path}' cannot be read ({error.strerror})") from None
    return value
