"""A thread that does copies one after another, beside the one that computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """wait: until the copy may begin. copy: how many bytes it copied. done: says that they are there."""

    wait: Callable[[], None]
    copy: Callable[[], int]
    done: Callable[[], None]


class Lane:
    """Runs jobs in order. failed: called with what a job raised; the jobs after it are dropped.

    bytes_per_s: the most it copies: one that was quicker is followed by a sleep. None: no limit.
    """

    def __init__(
        self, name: str, *, bytes_per_s: float | None, failed: Callable[[BaseException], None]
    ) -> None:
        self._bytes_per_s, self._failed = bytes_per_s, failed
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # Daemon: a copy that hangs on a disk must not hold the process.
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Returns once every job is done."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        is_broken = False
        while (job := self._jobs.get()) is not None:
            if not is_broken:
                try:
                    self._run(job)
                except BaseException as error:
                    is_broken = True
                    self._failed(error)
            del job  # not kept over the wait for the next one: it holds memory

    def _run(self, job: Job) -> None:
        job.wait()
        begin = time.perf_counter()
        num_bytes = job.copy()
        if self._bytes_per_s is not None:
            time.sleep(max(0.0, begin + num_bytes / self._bytes_per_s - time.perf_counter()))
        job.done()
