"""Why a run ended: what a failing rank leaves behind, and the one rank and cause to name among many failures.

When a rank dies, its peers fail too, with errors that tell of closed connections. Those errors are *secondary*:
they are named only where no other cause is known.
"""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# How gloo, NCCL and torch's store tell that a peer is gone, or that it did not come in time.
_PEER_LOSS = re.compile(
    r"read error|connection (?:was )?(?:closed|reset|refused)|broken pipe|timed? ?out waiting|wait timeout"
    r"|socket timeout|remote process exited|communicator was aborted|failed to (?:recv|send)"
    r"|watchdog caught collective",
    re.IGNORECASE,
)
# A path on the machine that built torch, and a greeting.
_GLOO_DECORATION = re.compile(r"\[/\S+\.cc:\d+\] ?| This is typically caused by.*GLHF!\S* ?\S*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An exception that ended `rank`: `where` is the line that raised it, `traceback` all of it."""

    rank: int
    time_s: float
    kind: str
    message: str
    where: str
    secondary: bool
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """The end of a rank's process, as the launcher saw it. code: negative is the signal that killed it."""

    rank: int
    pid: int
    code: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What to tell: `rank` failed first, `message` says how, `details` is its traceback where it has one."""

    rank: int
    message: str
    details: str | None


def is_peer_loss(error: BaseException) -> bool:
    """Whether `error`, or an error it was raised from, tells that another rank is gone."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, (RuntimeError, ConnectionError)) and _PEER_LOSS.search(str(link)):
            return True
        link = link.__cause__
    return False


def describe(rank: int, error: BaseException) -> RankError:
    """The record of `error`, from inside its `except` block."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return RankError(
        rank=rank,
        time_s=time.time(),
        kind=type(error).__name__,
        message=str(error),
        where=where,
        secondary=is_peer_loss(error),
        traceback="".join(traceback.format_exception(error)),
    )


def error_path(run_dir: Path, rank: int) -> Path:
    """Where the traceback of a failing rank is kept."""
    return run_dir / f"rank-{rank}-error.txt"


def fault_path(run_dir: Path, rank: int) -> Path:
    """Where the interpreter writes a rank's stack when a signal such as SIGSEGV kills it."""
    return run_dir / f"rank-{rank}-fault.txt"


def save_error(error: RankError, run_dir: Path, control_dir: Path) -> None:
    """Leave `error` for the launcher (in `control_dir`) and for people (in `run_dir`)."""
    error_path(run_dir, error.rank).write_text(error.traceback)
    path = control_dir / f"error-{error.rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(error)))
    temporary.rename(path)


def load_errors(control_dir: Path) -> list[RankError]:
    """Every error that ranks have left, in the order of time."""
    errors = [RankError(**json.loads(path.read_text())) for path in control_dir.glob("error-*.json")]
    return sorted(errors, key=lambda error: error.time_s)


def root_cause(exits: Sequence[RankExit], errors: Sequence[RankError], run_dir: Path) -> Cause | None:
    """The failure to name: `exits` are those that the launcher did not bring about itself, unless they came later.

    The earliest of: an error of a rank's own, and the end of a rank without an error. Where there is neither, the
    earliest error that tells of a lost peer.
    """
    recorded = {error.rank for error in errors}
    own = sorted((error for error in errors if not error.secondary), key=lambda error: error.time_s)
    silent = sorted((end for end in exits if end.rank not in recorded), key=lambda end: end.time_s)
    if silent and (not own or silent[0].time_s < own[0].time_s):
        return _of_exit(silent[0], run_dir)
    secondary = sorted((error for error in errors if error.secondary), key=lambda error: error.time_s)
    return _of_error(own or secondary, run_dir) if own or secondary else None


def _of_error(errors: Sequence[RankError], run_dir: Path) -> Cause:
    first = errors[0]
    same = sorted(error.rank for error in errors[1:] if error.kind == first.kind)
    others = ""
    if same:
        noun = "rank" if len(same) == 1 else "ranks"
        others = f" ({first.kind} on {noun} {', '.join(map(str, same))} too)"
    message = _GLOO_DECORATION.sub("", first.message).strip() or "(no message)"
    where = f", at {first.where}" if first.where else ""
    return Cause(
        rank=first.rank,
        message=f"rank {first.rank} failed: {first.kind}: {message}{where}{others}; its traceback is in "
        f"{error_path(run_dir, first.rank)}",
        details=first.traceback,
    )


def _of_exit(end: RankExit, run_dir: Path) -> Cause:
    who = f"rank {end.rank} (process {end.pid})"
    if end.code >= 0:
        message = f"{who} left with exit code {end.code} before its work was done, without an exception"
        return Cause(rank=end.rank, message=message, details=None)
    try:
        name = signal.Signals(-end.code).name
    except ValueError:
        name = f"signal {-end.code}"
    message = f"{who} was killed by {name}"
    if -end.code == signal.SIGKILL:
        message += (
            ": somebody killed it, or the system was out of memory (the kernel's log says so); where memory ran "
            "out, lower data.micro_batch_size or the model's size, or raise zero.stage"
        )
    fault = fault_path(run_dir, end.rank)
    if fault.is_file() and fault.stat().st_size:
        message += f"; its stack is in {fault}"
        return Cause(rank=end.rank, message=message, details=fault.read_text())
    return Cause(rank=end.rank, message=message, details=None)
