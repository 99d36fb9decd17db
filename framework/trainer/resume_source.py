"""Which checkpoint a run goes on from: chosen by one rank, found sound and the same by all."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from counterflow.framework.checkpoint.agreement import from_rank_0, on_all, place_in
from counterflow.framework.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    has_checkpoint_name,
    held,
    leftovers,
    newest,
    read_manifest,
    remedy,
    remove_leftovers,
    step_folder,
    step_of,
    whole_problem,
)
from counterflow.framework.trainer.run_lock import Holder, LockedError, RunLock, holder_of, is_own

logger = logging.getLogger(__name__)
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What checkpoint.resume names: a run's folder, its folder of checkpoints, or one checkpoint.

    root: where checkpoints are. step: of the one that is named; None: the newest whole one.
    run_dir: of the run that writes there; None where it is not in a run's folder.
    """

    value: str
    root: Path
    step: int | None
    run_dir: Path | None

    @classmethod
    def of(cls, value: str) -> Source:
        """Raises ValueError: where `value` is the folder of a checkpoint that has lost its name."""
        path = Path(value).absolute()
        if path.is_symlink() and not has_checkpoint_name(path):
            path = path.resolve()
        if has_checkpoint_name(path):
            root, step = path.parent, step_of(path)
        elif (path / MANIFEST).is_file():
            step = step_of(path)  # raises: it says what the name should be
            root = path.parent
        elif checkpoints_of(path).is_dir() or not any(map(has_checkpoint_name, _entries(path))):
            root, step = checkpoints_of(path), None
        else:
            root, step = path, None
        return cls(
            value=value, root=root, step=step, run_dir=root.parent if root.name == _CHECKPOINTS else None
        )

    def folder(self, step: int) -> Path:
        return step_folder(self.root, step)


def checkpoints_of(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / _CHECKPOINTS


def checkpoint_to_resume(source: str) -> Path:
    """The checkpoint to go on from, by what its folder shows; `agreed_checkpoint` reads it all.

    Raises ValueError: where there is none, or the run that is named still writes.
    """
    found = Source.of(source)
    return found.folder(_choose(found, None)[0])


def agreed_checkpoint(
    value: str,
    group: dist.ProcessGroup | None,
    *,
    verify_checksums: bool,
    holding: contextlib.ExitStack | None = None,
) -> tuple[Path, Manifest]:
    """The checkpoint that rank 0 chooses, read and found sound and the same by every rank of `group`.

    holding: what keeps the run that writes there from pruning it, on rank 0, until it is closed.
    One that is damaged is passed over for the next older one, and rank 0's log says why; not where it was named.

    Raises, on every rank alike, ValueError: where there is none, or the run that is named still writes.
    CheckpointError: where the one that was named is damaged, or ranks see different ones.
    """
    from counterflow.framework.checkpoint.storage import damage

    rank, _ = place_in(group)
    passed: list[str] = []
    before: int | None = None
    while True:
        source = on_all(lambda: Source.of(value), group)[rank]
        choose = functools.partial(_choose_and_hold, source, before, passed, holding)
        step, damaged = from_rank_0(choose, group)
        passed = [*passed, *damaged]
        folder = source.folder(step)
        manifest, problem = _read_alike(folder, group)
        if problem is None:
            problem = damage(folder, group, checksums=verify_checksums)
        if problem is None:
            break
        if source.step is not None:
            raise CheckpointError(f"checkpoint.resume={value}: {problem}; {remedy(folder)}")
        passed = [*passed, problem]
        before = step
    if rank == 0:
        for problem in passed:
            logger.warning("passing over a damaged checkpoint: %s; going on from %s", problem, folder)
        if (writer := _writer(source)) is not None:
            logger.warning("%s may be writing beside %s, which is what is read", writer, folder)
    assert manifest is not None
    return folder, manifest


def clean_leftovers(source: str) -> None:
    """Delete what the run to go on from left half written, unless it may live or its folder cannot be written to."""
    with contextlib.suppress(OSError, ValueError):
        found = Source.of(source)
        # The lock is taken where it is needed only: who reads beside us would see a run that writes.
        if found.run_dir is None or not leftovers(found.root):
            return
        if is_own(holder_of(found.run_dir)):
            remove_leftovers(found.root)
        else:
            with contextlib.suppress(LockedError), RunLock(found.run_dir):
                remove_leftovers(found.root)


def _choose(source: Source, before: int | None, passed: Sequence[str] = ()) -> tuple[int, list[str]]:
    """The step to go on from, by what folders show, and what was wrong with newer ones.

    passed: what was found wrong with still newer ones.
    """
    given = f"checkpoint.resume={source.value}"
    if source.step is not None:
        folder = source.folder(source.step)
        if (problem := whole_problem(folder)) is not None:
            raise ValueError(f"{given}: {problem}; {remedy(folder)}")
        return source.step, []
    holder = _writer(source)
    folder, damaged = newest(source.root, before=before)
    if holder is not None and holder.state == "living":
        named = f", or name one of its checkpoints, as in checkpoint.resume={folder}" if folder else ""
        raise ValueError(
            f"{given}: {holder} still writes there, so its newest checkpoint is not settled; wait for its end{named}"
        )
    if folder is None:
        reasons = [*passed, *damaged]
        told = f" ({'; '.join(reasons)})" if reasons else ""
        raise ValueError(
            f"{given}: there is no whole checkpoint under {source.root}{told}; name the folder of a run that has saved "
            "one, or leave checkpoint.resume out to start anew"
        )
    return step_of(folder), damaged


def _choose_and_hold(
    source: Source, before: int | None, passed: Sequence[str], holding: contextlib.ExitStack | None
) -> tuple[int, list[str]]:
    step, damaged = _choose(source, before, passed)
    if holding is not None:
        holding.enter_context(held(source.folder(step)))
    return step, damaged


def _writer(source: Source) -> Holder | None:
    """Who else may be writing where checkpoints are."""
    holder = None if source.run_dir is None else holder_of(source.run_dir)
    return None if holder is None or holder.state == "gone" or is_own(holder) else holder


def _read_alike(folder: Path, group: dist.ProcessGroup | None) -> tuple[Manifest | None, str | None]:
    """The manifest, or what is wrong with it. Raises CheckpointError: where ranks read different ones."""
    try:
        manifests = on_all(lambda: read_manifest(folder), group)
    except CheckpointError as error:
        return None, str(error)
    if len({manifest.digest for manifest in manifests}) > 1:
        others = [rank for rank, found in enumerate(manifests) if found.digest != manifests[0].digest]
        raise CheckpointError(
            f"ranks see different checkpoints of step {manifests[0].step}: that of rank 0 has sha256 "
            f"{manifests[0].digest[:16]}, that of rank {others[0]} {manifests[others[0]].digest[:16]}; let "
            "checkpoint.resume be one folder, on storage that all ranks share"
        )
    return manifests[place_in(group)[0]], None


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []
