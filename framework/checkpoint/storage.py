"""Save and load shards through torch.distributed.checkpoint, whole or not at all, with one error for all ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from counterflow.framework.checkpoint.agreement import by_rank, on_all, place_in
from counterflow.framework.checkpoint.index import check_files, read_index
from counterflow.framework.checkpoint.manifest import (
    CheckpointError,
    check_file,
    latest,
    read_manifest,
    remedy,
)
from counterflow.framework.checkpoint.planner import ShardLoadPlanner, ShardSavePlanner
from counterflow.framework.checkpoint.safetensors_storage import (
    RANK_STATE,
    SafetensorsReader,
    SafetensorsWriter,
    file_name,
)
from counterflow.framework.checkpoint.shard import TensorShard


def save(
    folder: Path,
    shards: Sequence[TensorShard],
    metadata: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None,
    rank_state: Mapping[str, Any] | None = None,
) -> None:
    """Write the checkpoint `folder` (named by `step_folder`, on storage that all ranks see) from all of `group`.

    shards: what this rank holds; together they must hold every element of each tensor. Equal shards are copies
    and are written once. metadata: JSON (data position, `config_hash`); that of the group's rank 0 counts.
    rank_state: JSON of this rank alone (random generators), read back by `read_rank_state`. group: None is this
    process alone. The checkpoint appears by one rename once every file is on the disk; leftovers of dead runs
    beside it are deleted.

    Raises, on every rank alike, ValueError: where shards overlap, leave gaps or disagree, or metadata is not
    JSON. CheckpointError: where a rank cannot write; nothing is left behind and older checkpoints are untouched.
    """
    writer = SafetensorsWriter(folder, metadata, rank_state)
    try:
        with _agreed_errors(f"checkpoint '{folder}' was not written", lambda: _still_there(folder)):
            dcp_save(
                {},
                storage_writer=writer,
                planner=ShardSavePlanner(shards),
                process_group=group,
                no_dist=group is None,
            )
    except BaseException:
        writer.discard()
        raise


def load(
    folder: Path,
    shards: Sequence[TensorShard],
    *,
    group: dist.ProcessGroup | None,
    verify_checksums: bool = True,
    partial: bool = False,
    optional: tuple[str, ...] = (),
    digest: str | None = None,
) -> dict[str, Any]:
    """Fill the tensors of `shards` in place from the checkpoint `folder`, and return its metadata and `step`.

    Any layout loads what any layout saved. Every file is checked before the first tensor is touched: its size,
    and with `verify_checksums` its crc32, each file by one rank. Floating-point dtypes are converted to that of
    the shard. group: None is this process alone. partial: leave aside tensors that no rank asks for; optional: only
    those whose names begin so. digest: of the manifest that was agreed on.

    Raises, on every rank alike, ValueError: where a tensor is missing or has another shape, the checkpoint has
    tensors that no rank asks for, or an unknown format version. CheckpointError: where a file is damaged,
    naming it and an older whole checkpoint.
    """
    reader = SafetensorsReader(folder, group, verify_checksums=verify_checksums, digest=digest)
    planner = ShardLoadPlanner(shards, checkpoint=str(folder), partial=partial, optional=optional)
    with _agreed_errors(f"checkpoint '{folder}' was not loaded", lambda: remedy(folder)):
        dcp_load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    return {"step": reader.manifest.step, **reader.manifest.metadata}


def damage(folder: Path, group: dist.ProcessGroup | None, *, checksums: bool = True) -> str | None:
    """What is wrong with the checkpoint `folder`, the same on every rank; None where it is sound.

    Each file is read by one rank of `group`: its size, what it holds, and with `checksums` its crc32.
    Raises ValueError: where the format version is unknown.
    """

    rank, num_ranks = place_in(group)

    def check() -> None:
        manifest = read_manifest(folder)
        part = slice(rank, None, num_ranks)
        check_files(folder, manifest, read_index(folder, manifest), part=part, checksum=checksums)

    try:
        on_all(check, group)
    except CheckpointError as error:
        return str(error)
    return None


def read_rank_state(folder: Path, rank: int, num_ranks: int) -> dict[str, Any] | None:
    """What this rank of the group gave as `rank_state`; None where it gave nothing or the group had another size.

    Raises ValueError: where the format version is unknown. CheckpointError: where the manifest is damaged.
    """
    manifest = read_manifest(folder)
    if manifest.num_ranks != num_ranks:
        return None
    for record in manifest.files:
        if record.name == file_name(rank):
            check_file(folder, record, checksum=False)
    with safe_open(folder / file_name(rank), framework="pt") as file:
        text = (file.metadata() or {}).get(RANK_STATE)
    return None if text is None else json.loads(text)


@contextmanager
def _agreed_errors(what: str, advice: Callable[[], str]) -> Iterator[None]:
    """Turn the exception that DCP raises on all ranks into one that says `what` failed, where, and what to do."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        ranks_of: dict[str, list[int]] = {}
        for rank, (cause, _) in sorted(error.failures.items()):
            if not isinstance(cause, Exception):  # an interrupt is not a failed checkpoint
                raise cause from None
            text = str(cause) if isinstance(cause, ValueError | CheckpointError) else repr(cause)
            ranks_of.setdefault(text, []).append(rank)
        message = f"{what}: {by_rank(ranks_of)}"
        causes = [cause for cause, _ in error.failures.values()]
        if all(isinstance(cause, ValueError) for cause in causes):
            raise ValueError(message) from None
        expected = all(isinstance(cause, ValueError | CheckpointError) for cause in causes)
        raise CheckpointError(f"{message}; {advice()}") from (None if expected else error)


def _still_there(folder: Path) -> str:
    older = None
    with suppress(OSError):
        older = latest(folder.parent)
    return "nothing is left of it" + (f"; '{older}' is untouched" if older else "")
