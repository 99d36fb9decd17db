"""Sinks that cannot stop a run: what fails in one, or takes too long, is said once, and the run goes on without it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from counterflow.framework.metrics.record import RunSummary, StepRecord
from counterflow.framework.metrics.status import Status
from counterflow.framework.redaction import redacted

_log = logging.getLogger(__name__)
_MAX_WAITING_CALLS = 10_000


class _Sink(Protocol):
    @property
    def folder(self) -> Path | None: ...

    def log(self, record: StepRecord) -> None: ...

    def summary(self, summary: RunSummary) -> None: ...

    def close(self, status: Status) -> None: ...


class GuardedSink:
    """The sink that `make` opens; after its first failure, nothing more is handed to it.

    name: what messages call it. failure: why it takes no more records; None while it does.
    hidden: what to write for values that a failure may name and nobody may read.
    """

    def __init__(
        self, name: str, make: Callable[[], _Sink], *, hidden: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._hidden = hidden
        self.failure: str | None = None
        self._sink: _Sink | None = None
        self._try(lambda: setattr(self, "_sink", make()))

    @property
    def folder(self) -> Path | None:
        return None if self._sink is None else self._sink.folder

    def log(self, record: StepRecord) -> None:
        self._hand(lambda sink: sink.log(record))

    def picture(self, name: str, path: Path, step: int) -> None:
        """Show the PNG at `path`, where the sink shows pictures."""
        self._hand(lambda sink: _show(sink, name, path, step))

    def summary(self, summary: RunSummary) -> None:
        self._hand(lambda sink: sink.summary(summary))

    def begin_close(self, status: Status) -> None:
        """Let the sink close behind what it was handed, without waiting for it."""
        # What has failed is closed as well: it may hold files.
        if self._sink is not None:
            self._try(lambda: self._sink and self._sink.close(status))

    def wait_closed(self, until: float) -> None:
        """Return once it is closed, or at `until` (time.monotonic)."""

    def close(self, status: Status) -> None:
        self.begin_close(status)
        self.wait_closed(time.monotonic())

    def _hand(self, action: Callable[[_Sink], object]) -> None:
        sink = self._sink
        if self.failure is None and sink is not None:
            self._try(lambda: action(sink))

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # whatever a sink does, the training goes on
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if self.failure is None:
            self.failure = redacted(why, self._hidden)
            _log.warning(
                "%s stopped taking records (%s); the run goes on without it", self.name, self.failure
            )


class BackgroundSink(GuardedSink):
    """A guarded sink with a thread of its own, for one that speaks to a server: the run never waits for it.

    Calls are done in their order. One that takes longer than `timeout_s`, the opening included, is given up, with
    all that follow.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], _Sink],
        *,
        timeout_s: float,
        hidden: Mapping[str, str] | None = None,
    ) -> None:
        self._hidden = hidden
        self._timeout_s = timeout_s
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._busy_since: float | None = time.monotonic()
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"{name} sink", daemon=True)
        self._make = make
        self.name = name
        self.failure: str | None = None
        self._sink: _Sink | None = None
        self._status: Status | None = None
        self._thread.start()
        # Before the interpreter waits for threads and runs what W&B left for its end; else a program that forgets to
        # close loses what is still waiting here.
        register: Callable[[Callable[[], None]], None] | None = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(self._drain)

    @property
    def folder(self) -> Path | None:
        self._is_open.wait(self._timeout_s)
        return super().folder

    def begin_close(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            self._calls.put(None)

    def wait_closed(self, until: float) -> None:
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and self.failure is None:
            self._fail("it has not finished in time; what it has not sent yet stays in the run's folder")

    def close(self, status: Status) -> None:
        self.begin_close(status)
        self.wait_closed(time.monotonic() + self._timeout_s)

    def _hand(self, action: Callable[[_Sink], object]) -> None:
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._timeout_s:
            self._fail(f"it did not answer within logger.timeout_s={self._timeout_s:g}")
        elif self._calls.qsize() > _MAX_WAITING_CALLS:
            self._fail(f"{_MAX_WAITING_CALLS} records wait for it")
        if self.failure is None:
            self._calls.put(lambda: action(self._sink) if self._sink is not None else None)

    def _work(self) -> None:
        self._do(lambda: setattr(self, "_sink", self._make()))
        self._is_open.set()
        while (call := self._calls.get()) is not None:
            if self.failure is None:
                self._do(call)
        # What has failed is closed as well.
        sink, status = self._sink, self._status
        if sink is not None and status is not None:
            self._do(lambda: sink.close(status))

    def _do(self, call: Callable[[], object]) -> None:
        self._busy_since = time.monotonic()
        self._try(call)
        self._busy_since = None

    def _drain(self) -> None:
        if self._status is None:
            self._calls.put(None)
            self._thread.join(self._timeout_s)


def _show(sink: object, name: str, path: Path, step: int) -> None:
    picture = getattr(sink, "picture", None)
    if picture is not None:
        picture(name, path, step)
