"""One run at a time writes to a folder; what a dead one left is taken over."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from counterflow.framework.trainer.run_lock import LOCK_FILE, Holder, LockedError, RunLock, holder_of


def _hold(folder: Path, connection: Connection) -> None:
    """Take the lock and keep it until told otherwise."""
    try:
        lock = RunLock(folder)
    except LockedError as error:
        connection.send(str(error))
        return
    connection.send(None)
    connection.recv()
    lock.release()


def _started(folder: Path) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(folder, theirs))
    process.start()
    return process, ours


def _write(folder: Path, **changes: Any) -> None:
    holder = dataclasses.replace(Holder.here(), **changes)
    (folder / LOCK_FILE).write_text(json.dumps(dataclasses.asdict(holder)))


def test_a_second_run_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    process, first = _started(tmp_path)
    assert first.recv() is None
    with pytest.raises(
        LockedError, match=f"process {process.pid} on host {socket.gethostname()} writes there"
    ):
        RunLock(tmp_path)
    holder = holder_of(tmp_path)
    assert holder is not None
    assert (holder.pid, holder.state) == (process.pid, "living")
    first.send("done")
    process.join()
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path) as lock:
        assert lock.taken_over is None
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_start_at_once_one_has_the_folder(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(json.dumps(dataclasses.asdict(_gone())))
    started = [_started(tmp_path) for _ in range(6)]
    refused = [connection.recv() for _, connection in started]
    assert refused.count(None) == 1
    for (process, connection), message in zip(started, refused, strict=True):
        if message is None:
            connection.send("done")
        process.join()


def _gone() -> Holder:
    """A process that has ended."""
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return dataclasses.replace(Holder.here(), pid=process.pid or 0)


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path: Path) -> None:
    process, connection = _started(tmp_path)
    assert connection.recv() is None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with RunLock(tmp_path) as lock:
        assert lock.taken_over is not None
        assert lock.taken_over.pid == process.pid


def test_a_process_is_told_by_when_it_began_not_by_its_number_alone(tmp_path: Path) -> None:
    started = Holder.here().process_started
    assert started is not None
    _write(tmp_path, process_started=started - 100)  # this number, given out before
    with RunLock(tmp_path) as lock:
        assert lock.taken_over is not None
    _write(tmp_path, boot="another one")
    with RunLock(tmp_path) as lock:
        assert lock.taken_over is not None


@pytest.mark.parametrize("change", [{"host": "far-away"}, {"pid_namespace": "pid:[1]"}])
def test_a_holder_that_cannot_be_looked_at_keeps_its_lock(tmp_path: Path, change: dict[str, str]) -> None:
    _write(tmp_path, pid=1, **change)
    with pytest.raises(LockedError, match=r"cannot be looked at from here.* delete .*run\.lock"):
        RunLock(tmp_path)
    holder = holder_of(tmp_path)
    assert holder is not None
    assert holder.state == "elsewhere"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 1, "pid": "x"}', '{"pid": 3}'])
def test_a_file_that_names_nobody_is_no_lock(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    assert holder_of(tmp_path) is None
    with RunLock(tmp_path):
        holder = holder_of(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()


def test_without_locks_of_the_kernel_the_file_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(file: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "unsupported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with RunLock(tmp_path), pytest.raises(LockedError, match=f"process {os.getpid()} on host"):
        RunLock(tmp_path)
    (tmp_path / LOCK_FILE).write_text("")
    with pytest.raises(LockedError, match="has just begun to write there"):
        RunLock(tmp_path)


def test_a_lock_that_was_put_in_its_place_stays(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    with RunLock(tmp_path):
        lock.release()
        assert (tmp_path / LOCK_FILE).exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"):
        RunLock(tmp_path)
    assert (tmp_path / "precious").read_text() == "kept"
