"""The lock of a run's folder: one run at a time writes there.

Note [Whose lock it is]
`run.lock` says host, process and when that process began, so that a number that was given out again is not taken for
the holder. While a run lives it also holds the kernel's lock on that file, which the ranks it forked share: it goes
with the last of them, whatever ended them. Where the file system has no such locks, what the file says decides.
A holder on another host, or in another container, cannot be looked at; its lock is never taken over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

LOCK_FILE = "run.lock"
_MAX_BYTES = 1 << 16

# gone: the process has ended. elsewhere: it cannot be looked at from here.
State = Literal["living", "gone", "elsewhere"]


class LockedError(ValueError):
    """The folder belongs to another run: the message names its process and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process, told apart from every other. process_started: in the kernel's ticks since boot; None: not known."""

    host: str
    pid: int
    process_started: int | None = None
    boot: str | None = None
    pid_namespace: str | None = None

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Holder:
        """A process of this machine."""
        return cls(
            host=socket.gethostname(),
            pid=pid,
            process_started=_process_started(pid),
            boot=_boot(),
            pid_namespace=_pid_namespace(),
        )

    @property
    def state(self) -> State:
        """Whether the process lives, as far as can be seen from here."""
        if self.host != socket.gethostname() or self.pid_namespace != _pid_namespace():
            return "elsewhere"
        if self.boot != _boot() or not _exists(self.pid):
            return "gone"
        started = _process_started(self.pid)
        is_another = None not in (started, self.process_started) and started != self.process_started
        return "gone" if is_another else "living"


class RunLock:
    """Holds `run.lock` of a folder until it is released or this process and those it forked have ended.

    taken_over: of the run whose lock was found, where its process is gone.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock of `folder`.

        Raises LockedError: where another run holds it. OSError: where no lock can be written there.
        """
        self.taken_over: Holder | None = None
        self._path = folder / LOCK_FILE
        self._file = -1
        while self._file < 0:
            file, is_new = _open(self._path)
            try:
                if self._take(file, is_new=is_new):
                    self._file = file
            finally:
                if self._file < 0:
                    os.close(file)

    def _take(self, file: int, *, is_new: bool) -> bool:
        """Whether `file` is this process's lock now; False where it was released in between and is no more there."""
        is_free = _flock(file)
        if is_free is not False and not _is_at(self._path, file):
            return False
        before = None if is_new else _parse(os.pread(file, _MAX_BYTES, 0))
        # Without the kernel's locks, a file that says nothing yet may be in the hands of its maker.
        is_unknown = before is None and not is_new and is_free is None
        if is_free is False or is_unknown or (before is not None and before.state != "gone"):
            raise LockedError(_refusal(self._path, before, is_held=is_free is False))
        self.taken_over = before
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(asdict(Holder.here())).encode(), 0)
        os.fsync(file)
        return True

    def release(self) -> None:
        """Give the folder free, once; a lock that somebody else has put in its place stays."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            if _is_at(self._path, self._file):
                self._path.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # processes that were forked share it
        os.close(self._file)
        self._file = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def holder_of(folder: Path) -> Holder | None:
    """Who holds the lock of `folder`, without touching it; None: nobody, or nobody that can be made out."""
    try:
        file = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _parse(os.read(file, _MAX_BYTES))
    except OSError:
        return None
    finally:
        os.close(file)


def is_own(holder: Holder | None) -> bool:
    """Whether `holder` is this process or, of a rank that a launcher has forked, the launcher."""
    return holder in (Holder.of(os.getpid()), Holder.of(os.getppid()))


def _refusal(path: Path, holder: Holder | None, *, is_held: bool) -> str:
    if holder is None:
        return (
            f"{path.parent}: another run has just begun to write there; wait for its end or name another folder, and "
            f"where there is none, delete {path}"
        )
    if holder.state == "elsewhere" and not is_held:
        return (
            f"{path.parent}: {holder} writes there, which cannot be looked at from here; wait for its end or name "
            f"another folder, and where that process has ended without a word, delete {path}"
        )
    ranks = "" if holder.state != "gone" else " (it has ended, and its ranks have not yet)"
    return f"{path.parent}: {holder} writes there{ranks}; wait for its end, or name another folder"


def _open(path: Path) -> tuple[int, bool]:
    """The lock file, opened, and whether it was made just now."""
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), True
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # released in between
                return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), False


def _is_at(path: Path, file: int) -> bool:
    try:
        there, held = path.lstat(), os.fstat(file)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _flock(file: int) -> bool | None:
    """Whether the kernel gave its lock on `file`; None: there are none here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    return True


def _parse(data: bytes) -> Holder | None:
    """Whom a lock file names; None where it says nothing that can be read."""
    try:
        content: Any = json.loads(data)
        if not isinstance(content, Mapping):
            return None
        holder = Holder(**content)
    except (ValueError, TypeError):
        return None
    return holder if isinstance(holder.host, str) and type(holder.pid) is int and holder.pid > 0 else None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # somebody else's
    return True


def _process_started(pid: int) -> int | None:
    try:
        # The name stands in parentheses and may hold anything; starttime is field 22 (proc(5)).
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
