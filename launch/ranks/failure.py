"""Why a run ended: what a failing rank leaves behind, and the one rank and cause to name among many failures.

When a rank dies, its peers fail too, with errors that tell of closed connections. Those errors are *secondary*:
they are named only where no other cause is known. Where a rank waited too long for one that says nothing, the silent
one is named first, with the place where it was.
"""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from counterflow.framework.checkpoint.manifest import CheckpointError
from counterflow.framework.errors import StoppedError
from counterflow.framework.redaction import redacted

# How gloo, NCCL and torch's store tell that a peer is gone, or that it did not come in time.
_PEER_LOSS = re.compile(
    r"read error|connection (?:was )?(?:closed|reset|refused)|broken pipe|timed? ?out waiting|wait timeout"
    r"|socket timeout|remote process exited|communicator was aborted|failed to (?:recv|send)"
    r"|watchdog caught collective",
    re.IGNORECASE,
)
# Of these, those of a peer that is there and does not come.
_WAITED = re.compile(
    r"timed? ?out waiting|wait timeout|socket timeout|watchdog caught collective", re.IGNORECASE
)
_MAX_TOLD = 4
STOPPED = ("T", "t")
# What a state of proc(5) tells of a rank that others wait for; running and sleeping tell nothing.
_STATES = {
    "T": "stopped by a signal such as SIGSTOP",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a device",
    "Z": "ended, but not waited for",
}
_SAME_MOMENT_S = 0.3
# A path on the machine that built torch, and a greeting.
_GLOO_DECORATION = re.compile(r"\[/\S+\.cc:\d+\] ?| This is typically caused by.*GLHF!\S* ?\S*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An exception that ended `rank`: `where` is the line that raised it, `traceback` all of it.

    secondary: it tells that another rank is gone or late. waited: that one did not come in time.
    not_kept: why the traceback could not be written to the run's folder; None: it is there.
    """

    rank: int
    time_s: float
    kind: str
    message: str
    where: str
    secondary: bool
    traceback: str
    waited: bool = False
    not_kept: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """The end of a rank's process, as the launcher saw it. code: negative is the signal that killed it."""

    rank: int
    pid: int
    code: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What to tell: `rank` failed first, `message` says how, `details` is its traceback or stack where it has one.

    witnesses: other ranks whose tracebacks tell something.
    """

    rank: int
    message: str
    details: str | None
    witnesses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A rank that told nothing while others waited.

    where: what its main thread was in, None where that is not known; waits: for other ranks itself. stack: all of it.
    pid, state: of its process when it was looked at, the state a letter of proc(5); None: not known.
    """

    rank: int
    where: str | None
    waits: bool
    stack: str
    pid: int | None = None
    state: str | None = None


def is_peer_loss(error: BaseException) -> bool:
    """Whether `error`, or an error it was raised from, tells that another rank is gone or late."""
    return _says(error, _PEER_LOSS)


def _says(error: BaseException, pattern: re.Pattern[str]) -> bool:
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, (RuntimeError, ConnectionError)) and pattern.search(str(link)):
            return True
        link = link.__cause__
    return False


def describe(rank: int, error: BaseException, hidden: Mapping[str, str] | None = None) -> RankError:
    """The record of `error`, from inside its `except` block; hidden: what to write for values (`hidden_values`)."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    # What the code on the way up said of it: the action, the collective and its ranks.
    notes = [note for note in getattr(error, "__notes__", ()) if note not in str(error)]
    secondary = is_peer_loss(error)
    return RankError(
        rank=rank,
        time_s=time.time(),
        kind=type(error).__name__,
        message=redacted(
            "; ".join([_GLOO_DECORATION.sub("", str(error)).strip() or "(no message)", *notes]), hidden
        ),
        where=where,
        secondary=secondary,
        traceback=redacted("".join(traceback.format_exception(error)), hidden),
        waited=secondary and _says(error, _WAITED),
    )


def error_path(run_dir: Path, rank: int) -> Path:
    """Where the traceback of a failing rank is kept."""
    return run_dir / f"rank-{rank}-error.txt"


def fault_path(run_dir: Path, rank: int) -> Path:
    """Where the interpreter writes a rank's stack when a signal such as SIGSEGV kills it."""
    return run_dir / f"rank-{rank}-fault.txt"


def stack_path(run_dir: Path, rank: int) -> Path:
    """Where the stack of a rank is kept that others waited for."""
    return run_dir / f"rank-{rank}-stack.txt"


def keep(path: Path, text: str) -> str | None:
    """Write `text` for people; why it could not be written, or None. A full disk hides no cause."""
    try:
        path.write_text(text)
    except OSError as error:
        return error.strerror or str(error)
    return None


def root_cause(
    exits: Sequence[RankExit],
    errors: Sequence[RankError],
    run_dir: Path,
    *,
    silent: Sequence[Silence] = (),
    faults: Mapping[int, str] | None = None,
) -> Cause | None:
    """The failure to name: `exits` are those that the launcher did not bring about itself, unless they came later.

    The earliest of: an error of a rank's own, and the end of a rank without an error. Where there is neither, and a
    rank waited too long, those that told nothing (`silent`); else the earliest error that tells of a lost peer.
    faults: the stacks that interpreters wrote on a fatal signal, by rank.
    """
    recorded = {error.rank for error in errors}
    own = sorted((error for error in errors if not error.secondary), key=lambda error: error.time_s)
    waited = sorted((error for error in errors if error.waited), key=lambda error: error.time_s)
    ends = sorted(
        (
            end
            for end in exits
            if end.rank not in recorded and not (waited and _was_told_to_end(end, waited[0].time_s))
        ),
        # The launcher's SIGTERM follows another end at once, and may be seen before it.
        key=lambda end: end.time_s + (_SAME_MOMENT_S if end.code == -signal.SIGTERM else 0),
    )
    if ends and (not own or ends[0].time_s < own[0].time_s):
        return _of_exit(ends[0], run_dir, (faults or {}).get(ends[0].rank))
    if own:
        return _of_error(own, run_dir)
    if waited:
        return _of_hang(waited, silent, run_dir)
    secondary = sorted(errors, key=lambda error: error.time_s)
    return _of_error(secondary, run_dir) if secondary else None


def _was_told_to_end(end: RankExit, since_s: float) -> bool:
    """Whether it is how the launcher ends those that are left, once a rank has waited too long."""
    return end.time_s > since_s and end.code in (-signal.SIGTERM, -signal.SIGKILL)


def _of_hang(waited: Sequence[RankError], silent: Sequence[Silence], run_dir: Path) -> Cause:
    """Some waited too long: name those that told nothing, those first that did not wait themselves."""
    first = waited[0]
    told = [f"rank {error.rank} waited: {error.message}{_at(error)}" for error in waited[:_MAX_TOLD]]
    if len(waited) > _MAX_TOLD:
        told.append(f"and {len(waited) - _MAX_TOLD} more waited")
    witnesses = tuple(error.rank for error in waited)
    if not silent:
        others = "" if len(waited) == 1 else ", and no rank did what another waited for"
        return Cause(
            rank=first.rank,
            message=f"the ranks waited for each other until the time-out{others}: {'; '.join(told)}; "
            f"{_traceback_of(first, run_dir)}",
            details=first.traceback,
            witnesses=witnesses,
        )
    ordered = sorted(silent, key=lambda each: (each.waits, each.rank))
    named = [_silence(each) for each in ordered[:_MAX_TOLD]]
    if len(ordered) > _MAX_TOLD:
        named.append(f"and {len(ordered) - _MAX_TOLD} more")
    stack = ordered[0].stack
    where = f"; its stack is in {stack_path(run_dir, ordered[0].rank)}" if stack else ""
    return Cause(
        rank=ordered[0].rank,
        message=f"{', '.join(named)}{where}; {'; '.join(told)}",
        details=f"rank {ordered[0].rank}, when rank {first.rank} had waited too long:\n{stack}\n{first.traceback}",
        witnesses=witnesses,
    )


def _silence(silence: Silence) -> str:
    state = _STATES.get(silence.state or "")
    process = [f"process {silence.pid}"] if silence.pid is not None else []
    known = ", ".join([*process, *([state] if state else [])])
    who = f"rank {silence.rank} ({known})" if known else f"rank {silence.rank}"
    if silence.where is None:
        return f"{who} did not come to where others waited for it and told nothing"
    if silence.waits:
        return f"{who} waited too, in {silence.where}"
    return f"{who} did not come to where others waited for it: it was in {silence.where}"


def _of_error(errors: Sequence[RankError], run_dir: Path) -> Cause:
    first = errors[0]
    if first.kind == StoppedError.__name__:
        return Cause(rank=first.rank, message=first.message, details=None)
    if first.kind == CheckpointError.__name__:
        # All ranks agreed on it, and it names the folder, the cause and the ranks that it is from.
        return Cause(rank=first.rank, message=first.message, details=first.traceback)
    same = sorted(error.rank for error in errors[1:] if error.kind == first.kind)
    others = ""
    if same:
        noun = "rank" if len(same) == 1 else "ranks"
        others = f" ({first.kind} on {noun} {', '.join(map(str, same))} too)"
    return Cause(
        rank=first.rank,
        message=f"rank {first.rank} failed: {first.kind}: {first.message}{_at(first)}{others}; "
        f"{_traceback_of(first, run_dir)}",
        details=first.traceback,
    )


def _at(error: RankError) -> str:
    return f", at {error.where}" if error.where else ""


def _traceback_of(error: RankError, run_dir: Path) -> str:
    path = error_path(run_dir, error.rank)
    if error.not_kept is None:
        return f"its traceback is in {path}"
    return f"its traceback could not be written to {path} ({error.not_kept}), and --traceback prints it"


def _of_exit(end: RankExit, run_dir: Path, fault: str | None) -> Cause:
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
    if fault and -end.code != signal.SIGKILL:
        return Cause(
            rank=end.rank,
            message=f"{message}; its stack is in {fault_path(run_dir, end.rank)}",
            details=fault,
        )
    return Cause(rank=end.rank, message=message, details=None)
