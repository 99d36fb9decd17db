"""How ranks on this machine tell their launcher what became of them, without a disk.

Each rank has two files in memory: one for messages (one JSON object a line: it is ready, it is done, the error that
ended it), one for stacks, which the interpreter writes by itself on a fatal signal, and on `STACK_SIGNAL` when the
launcher asks for them: even a rank that hangs in a call of C answers. So the cause of a full disk is told as well.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from counterflow.launch.ranks.failure import (
    STOPPED,
    Cause,
    RankError,
    RankExit,
    Silence,
    error_path,
    fault_path,
    keep,
    root_cause,
    stack_path,
)

STACK_SIGNAL = signal.SIGUSR2
# Deep recursions have tracebacks without end; their last lines tell.
_MAX_TRACEBACK_CHARS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One rank's side: the paths of its two files, which it opens itself, forked or not."""

    rank: int
    messages: str
    stacks: str

    def ready(self) -> None:
        """Have this process's stacks written where a fatal signal or the launcher asks for them, and say so."""
        # Kept open for the life of the process: the interpreter keeps its number alone.
        fd = os.open(self.stacks, os.O_WRONLY | os.O_APPEND)
        faulthandler.enable(fd, all_threads=True)
        faulthandler.register(STACK_SIGNAL, fd, all_threads=True)
        self._tell({"ready": True})

    def done(self) -> None:
        """Say that the work is done: whatever ends the process now is no failure."""
        self._tell({"done": True})

    def failed(self, error: RankError) -> None:
        """Tell `error`; of several the last counts."""
        values = asdict(error)
        values["traceback"] = error.traceback[-_MAX_TRACEBACK_CHARS:]
        self._tell({"error": values})

    def _tell(self, message: dict[str, Any]) -> None:
        # A launcher that is gone hears nothing; that ends this rank by other means.
        with contextlib.suppress(OSError):
            fd = os.open(self.messages, os.O_WRONLY | os.O_APPEND)
            try:
                left = memoryview((json.dumps(message) + "\n").encode())
                while left:
                    left = left[os.write(fd, left) :]
            finally:
                os.close(fd)


class Reports:
    """The launcher's side, made before the ranks; `close` frees the memory."""

    def __init__(self, num_ranks: int) -> None:
        self._fds: list[int] = []
        self._paths: list[str] = []
        self._asked: dict[int, tuple[int, str | None]] = {}
        self.of_rank = [
            Report(rank=rank, messages=self._open("messages"), stacks=self._open("stacks"))
            for rank in range(num_ranks)
        ]

    def is_done(self, rank: int) -> bool:
        """Whether the rank has said that its work is done."""
        return any("done" in message for message in self._messages(rank))

    def errors(self) -> list[RankError]:
        """The error of each rank that has told one, in the order of time."""
        found: list[RankError] = []
        for report in self.of_rank:
            told = [message["error"] for message in self._messages(report.rank) if "error" in message]
            if told:
                found.append(RankError(**told[-1]))
        return sorted(found, key=lambda error: error.time_s)

    def ask_for_stacks(self, pids: Iterable[tuple[int, int]]) -> None:
        """Have every rank of `pids` (rank, pid) that has told no error write its stack, once.

        A rank that is stopped cannot, so it is let go on: the run is over in any case.
        """
        told = {error.rank for error in self.errors()}
        for rank, pid in pids:
            if rank in told or rank in self._asked:
                continue
            state = process_state(pid)
            self._asked[rank] = pid, state
            # The signal would kill a rank that is not ready for it.
            if any("ready" in message for message in self._messages(rank)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
                    if state in STOPPED:
                        os.kill(pid, signal.SIGCONT)

    def asked(self, rank: int) -> tuple[int | None, str | None]:
        """Process and its state, as in /proc, of a rank that was asked for its stack."""
        return self._asked.get(rank, (None, None))

    def stacks(self) -> dict[int, str]:
        """What the interpreter of each rank has written, where it has."""
        texts = {report.rank: _read(report.stacks) for report in self.of_rank}
        return {rank: text for rank, text in texts.items() if text}

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        for path in self._paths:
            Path(path).unlink(missing_ok=True)
        self._fds.clear()
        self._paths.clear()

    def _open(self, name: str) -> str:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(f"counterflow-{name}")
            self._fds.append(fd)
            return f"/proc/{os.getpid()}/fd/{fd}"
        fd, path = tempfile.mkstemp(prefix=f"counterflow-{name}-")
        os.close(fd)
        self._paths.append(path)
        return path

    def _messages(self, rank: int) -> list[dict[str, Any]]:
        # What follows the last line end is not written whole yet.
        lines = _read(self.of_rank[rank].messages).split("\n")[:-1]
        return [json.loads(line) for line in lines]


def process_state(pid: int) -> str | None:
    """The letter of a process's state in /proc (proc(5)); None where that is not known."""
    try:
        # The name stands in parentheses and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank's main thread was. waits: within a transfer or collective, and so for other ranks."""

    where: str
    waits: bool


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\S+) in (?P<name>.*)$', re.MULTILINE)
_WAITING = re.compile(r"distributed_c10d\.py|pipeline/p2p\.py|parallel/collectives\.py|/rendezvous\.py")


def place_of(stack: str) -> Place | None:
    """Where the thread was that took the signal, which is the main one; None where the stack does not say."""
    _, found, block = stack.rpartition("Current thread ")
    if not found:
        block = stack.rpartition("Thread ")[2]
    frames = list(_FRAME.finditer(block.partition("\n\n")[0]))
    if not frames:
        return None
    own = [
        frame for frame in frames if not re.search(r"/(?:site|dist)-packages/|/lib/python\d", frame["file"])
    ]
    frame = (own or frames)[0]
    waits = any(_WAITING.search(each["file"]) for each in frames[:6])
    return Place(where=f"{frame['name']} ({Path(frame['file']).name}:{frame['line']})", waits=waits)


def explain(reports: Reports, exits: Sequence[RankExit], run_dir: Path) -> Cause | None:
    """The failure to name (see `root_cause`), with what shows it kept in `run_dir` and nothing that would mislead."""
    errors, stacks = reports.errors(), reports.stacks()
    num_ranks = len(reports.of_rank)
    # A rank that was asked where it was may have told afterwards that a peer had gone: it was silent before.
    told = {error.rank for error in errors if error.waited or not error.secondary or error.rank not in stacks}
    silent = [
        _silence(rank, stacks.get(rank, ""), *reports.asked(rank))
        for rank in range(num_ranks)
        if rank not in told
    ]
    cause = root_cause(exits, errors, run_dir, silent=silent, faults=stacks)
    if cause is None:
        return None
    kept = {error.rank for error in errors if not error.secondary} | {cause.rank, *cause.witnesses}
    for rank in set(range(num_ranks)) - kept:
        with contextlib.suppress(OSError):
            error_path(run_dir, rank).unlink(missing_ok=True)
    if cause.witnesses:
        for each in silent:
            if each.stack:
                keep(stack_path(run_dir, each.rank), each.stack)
    elif cause.details is not None and cause.details == stacks.get(cause.rank):
        keep(fault_path(run_dir, cause.rank), cause.details)
    return cause


def _silence(rank: int, stack: str, pid: int | None, state: str | None) -> Silence:
    place = place_of(stack)
    return Silence(
        rank=rank,
        where=None if place is None else place.where,
        # A rank that was stopped is what the others wait for, wherever it was.
        waits=place is not None and place.waits and state not in STOPPED,
        stack=stack,
        pid=pid,
        state=state,
    )
