"""What a process has open: its threads and its files, by name."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path

# Threads that a library starts once and keeps for the life of the process, by their first use.
KEPT_THREADS = ("pt_autograd", "python", "rayon", "openblas", "gmain")
# The fonts of matplotlib are opened once as well.
KEPT_FILES = (".ttf", ".afm")


def threads() -> Counter[str]:
    """The names of this process's threads, each with how many have it; Python's own by the names it gives them."""
    of_python = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    return of_python + Counter(_read(task / "comm") for task in Path("/proc/self/task").iterdir())


def files() -> Counter[str]:
    """What this process's file descriptors are open on, each with how many are."""
    found: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found[os.readlink(descriptor).split(":[")[0]] += 1
        except FileNotFoundError:
            continue  # the listing's own
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"


class OpenResources:
    """Remembers what is open now; `left_over` says what has been opened since and not closed."""

    def __init__(self) -> None:
        self._threads, self._files = threads(), files()

    def left_over(self) -> str | None:
        """The threads and files that were not open before; None where there are none."""
        found = self._compare()
        collections = 0
        # What holds on to an autograd node that one collection frees is garbage for the next one only.
        while found is not None and collections < 5:
            gc.collect()
            collections += 1
            found = self._compare()
        # A thread that was told to end takes a moment.
        deadline = time.monotonic() + 5.0
        while found is not None and time.monotonic() < deadline:
            time.sleep(0.02)
            found = self._compare()
        return found

    def _compare(self) -> str | None:
        new_threads = {
            name: count
            for name, count in (threads() - self._threads).items()
            if not name.startswith(KEPT_THREADS) and name != "ended"
        }
        new_files = {
            name: count for name, count in (files() - self._files).items() if not name.endswith(KEPT_FILES)
        }
        if not new_threads and not new_files:
            return None
        return f"threads {new_threads}, files {new_files}"
