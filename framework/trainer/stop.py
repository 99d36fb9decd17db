"""SIGTERM in a rank: the run stops after the step in hand, on all ranks alike, and its sinks close in order.

The signal is noticed by a thread, for the main one may be within a collective for long. Every rank tells the others
with what it measured in the step (measure.py), so all stop after the same step. Where that takes too long the run
closes what it can and the process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

# Of launcher.grace_s: until then the step may end; the rest is for closing.
_STEP_SHARE, _CLOSE_SHARE = 0.5, 0.35


class StopRequest:
    """Whether this rank was asked to stop. grace_s: how long after the signal the process is killed."""

    def __init__(self, grace_s: float) -> None:
        self.requested = threading.Event()
        self.close_s = grace_s * _CLOSE_SHARE
        self._step_s = grace_s * _STEP_SHARE
        self._over = threading.Event()
        self._late: list[Callable[[], None]] = []

    def when_late(self, action: Callable[[], None]) -> None:
        """Call `action`, in another thread, before the process ends because its step did not end in time."""
        self._late.append(action)

    def finish(self) -> None:
        """The run has stopped by itself, or failed: nothing ends the process any more."""
        self._over.set()

    def watch(self, pipe: int) -> None:
        """Wait for a signal's byte in `pipe`; returns when the other end is closed or the run is over."""
        while data := os.read(pipe, 64):
            if signal.SIGTERM not in data:
                continue
            self.requested.set()
            if self._over.wait(self._step_s):
                return
            for action in self._late:
                with contextlib.suppress(Exception):
                    action()
            os._exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def stop_on_sigterm(grace_s: float) -> Iterator[StopRequest]:
    """SIGTERM sets the request that this yields; only the main thread of a process can take signals."""
    request = StopRequest(grace_s)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=request.watch, args=(reading,), name="stop request", daemon=True)
    thread.start()
    try:
        yield request
    finally:
        request.finish()
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        os.close(writing)
        thread.join(1.0)
        os.close(reading)
