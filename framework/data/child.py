"""Work done in a child process that ends with its parent, with its progress and what it raised handed back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

# (what is being done, share done in 0..1)
Progress = Callable[[str, float], None]

_PROGRESS_INTERVAL_S = 0.1
_Result = TypeVar("_Result")


def run_in_child(work: Callable[[Progress], _Result], progress: Progress | None) -> _Result:
    """The result of `work` in a forked process.

    Raises ValueError: the one that `work` raised.
    Raises RuntimeError: where it raised something else, or the process died.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(work, ours, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        while True:
            try:
                kind, *rest = ours.recv()
            except EOFError:
                child.join()
                raise RuntimeError(
                    f"the process that prepares the data died (exit code {child.exitcode}); if memory ran "
                    "out, set data.max_bytes"
                ) from None
            if kind == "progress":
                if progress is not None:
                    progress(rest[0], rest[1])
            elif kind == "invalid":
                raise ValueError(rest[0])
            elif kind == "error":
                raise RuntimeError(f"preparing the data failed:\n{rest[0]}")
            else:
                return rest[0]
    finally:
        child.kill()
        child.join()
        ours.close()


def _child(work: Callable[[Progress], _Result], parents: Connection, connection: Connection) -> None:
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def leave_with_parent() -> None:
        try:
            connection.recv()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    last_report = [0.0]

    def report(what: str, share: float) -> None:
        if share >= 1 or time.monotonic() - last_report[0] >= _PROGRESS_INTERVAL_S:
            last_report[0] = time.monotonic()
            connection.send(("progress", what, share))

    try:
        connection.send(("done", work(report)))
    except ValueError as error:
        connection.send(("invalid", str(error)))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    os._exit(0)  # no exit handlers and no flushing: the buffers belong to the parent
