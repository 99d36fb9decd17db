"""Sinks that fail or hang: said once, and the caller neither fails nor waits."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from counterflow.framework.metrics.config import LoggerConfig
from counterflow.framework.metrics.guarded import BackgroundSink, GuardedSink
from counterflow.framework.metrics.record import RunSummary, StepRecord
from counterflow.framework.metrics.sinks import close_sinks, failures_of, open_sinks, wandb_dir
from counterflow.framework.metrics.status import Status
from tests.framework.metrics.records import SUMMARY, record


class Notebook:
    """Notes what it is told; fails at one step, or waits for an event before another."""

    def __init__(self, fails_at: int = -1, waits_at: int = -1) -> None:
        self.told: list[object] = []
        self.folder: Path | None = None
        self.go_on = threading.Event()
        self._fails_at, self._waits_at = fails_at, waits_at

    def log(self, record: StepRecord) -> None:
        if record.step == self._fails_at:
            raise OSError(28, "No space left on device")
        if record.step == self._waits_at:
            self.go_on.wait(30)
        self.told.append(record.step)

    def summary(self, summary: RunSummary) -> None:
        self.told.append("summary")

    def close(self, status: Status) -> None:
        self.told.append(status)


def test_what_fails_is_said_once_and_closed(caplog: pytest.LogCaptureFixture) -> None:
    for background in (False, True):
        caplog.clear()
        inner = Notebook(fails_at=1)
        sink = BackgroundSink("x", lambda inner=inner: inner, timeout_s=9) if background else None
        sink = sink or GuardedSink("x", lambda inner=inner: inner)
        with caplog.at_level(logging.WARNING):
            for step in range(4):
                sink.log(record(step))
            sink.summary(SUMMARY)
            close_sinks([sink], "failed", 9)
        assert inner.told == [0, "failed"]
        assert len(caplog.records) == 1
        assert failures_of([sink]) == {"x": "OSError: [Errno 28] No space left on device"}


def test_what_cannot_be_opened_takes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Notebook:
        raise RuntimeError("Could not determine home directory.")

    with caplog.at_level(logging.WARNING):
        for sink in (GuardedSink("x", broken), BackgroundSink("x", broken, timeout_s=9)):
            sink.log(record(0))
            sink.close("finished")
            assert "home directory" in failures_of([sink])["x"]


def test_a_failure_does_not_tell_what_is_hidden() -> None:
    def broken() -> Notebook:
        raise OSError("/vault/runs: no room")

    hidden = {"/vault/runs": "${oc.env:RUNS}"}
    for sink in (
        GuardedSink("x", broken, hidden=hidden),
        BackgroundSink("x", broken, timeout_s=9, hidden=hidden),
    ):
        sink.close("finished")
        assert failures_of([sink]) == {"x": "OSError: ${oc.env:RUNS}: no room"}


def test_a_hanging_sink_is_given_up_and_never_waited_for() -> None:
    inner = Notebook(waits_at=0)
    sink = BackgroundSink("x", lambda: inner, timeout_s=0.2)
    begin = time.monotonic()
    sink.log(record(0))
    time.sleep(0.4)
    sink.log(record(1))
    close_sinks([sink], "interrupted", 0.3)
    assert time.monotonic() - begin < 10
    assert "logger.timeout_s=0.2" in failures_of([sink])["x"]
    inner.go_on.set()


def test_records_are_handed_on_in_order_before_the_end() -> None:
    inner = Notebook()
    sink = BackgroundSink("x", lambda: inner, timeout_s=30)
    for step in range(50):
        sink.log(record(step))
    close_sinks([sink], "interrupted", 30)
    assert inner.told == [*range(50), "interrupted"]


def test_wandb_without_its_server_leaves_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at port 9 of this machine; W&B gives up after its own time-out and is named."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    opened = open_sinks(LoggerConfig(name="wandb", mode="online", timeout_s=1), tmp_path, {})
    begin = time.monotonic()
    for sink in opened:
        sink.log(record(0))
    assert time.monotonic() - begin < 1
    time.sleep(1.2)
    for sink in opened:
        sink.log(record(1))
    close_sinks(opened, "finished", 2)
    failures = failures_of(opened)
    assert list(failures) == ["W&B"]
    assert "0123456789" not in failures["W&B"]
    assert wandb_dir(opened) is None
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
