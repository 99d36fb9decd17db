"""The launcher against real processes: every way to end a run ends all of it, in time, with one message."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import Started
from tests.launch import toy_ranks

_LIMIT_S = 15.0
_NUM_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str
    seconds: float
    leftovers: list[str]


def _left(launcher: Started, marker: str) -> list[int]:
    """The live processes that inherited this marker in their environment, or that hold the launcher's output."""
    found = launcher.holders()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            environment = (path / "environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in environment and state != "Z":
            found.append(int(path.name))
    return found


def _run(entry: str, folder: Path, signals: tuple[tuple[signal.Signals, bool], ...] = ()) -> Outcome:
    """Run a toy entry on four ranks; each (signal, whole group?) is sent once a rank has said that it works.

    `seconds` counts from the last signal, or from the moment at which the first toy said that it fails.
    """
    marker = f"COUNTERFLOW_TEST_MARKER={folder.name}-{time.time_ns()}"
    name, _, value = marker.partition("=")
    launcher = Started(
        toy_ranks.main,
        [entry, str(_NUM_RANKS), str(folder)],
        environment={name: value, "TORCH_CPP_LOG_LEVEL": "FATAL"},
    )
    begin, said = time.time(), ""
    try:
        if signals:
            for _ in range(_NUM_RANKS):
                said += launcher.stdout.readline()
            assert said == "working\n" * _NUM_RANKS
        for index, (number, whole_group) in enumerate(signals):
            time.sleep(0.5 if index else 0.0)
            if whole_group:
                os.killpg(launcher.pid, number)
            else:
                os.kill(launcher.pid, number)
            begin = time.time()
        code, out, err = launcher.finish()
        begin = min((float(at) for at in re.findall(r"failing at (\S+)", out)), default=begin)
        seconds = time.time() - begin
        # Where the launcher itself was killed, the kernel ends the ranks a moment later.
        while (left := _left(launcher, marker)) and signals and time.time() - begin < 10:
            time.sleep(0.05)
        leftovers = [_command(pid) for pid in left]
        return Outcome(code=code, out=said + out, err=err, seconds=seconds, leftovers=leftovers)
    finally:
        for pid in _left(launcher, marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.close()


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
    return f"{pid}, which has ended"


def _one_message(outcome: Outcome) -> str:
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1, outcome.err
    assert outcome.seconds < _LIMIT_S
    assert outcome.leftovers == []
    return lines[0]


def test_results_come_back_by_rank(tmp_path: Path) -> None:
    outcome = _run("total", tmp_path)
    assert (outcome.code, outcome.out.strip(), outcome.err) == (0, "[6.0, 6.0, 6.0, 6.0]", "")
    assert list(tmp_path.iterdir()) == []


def test_no_rank_begins_before_all_are_forked(tmp_path: Path) -> None:
    """A fork while the store's server looks up an early rank's name leaves the resolver's lock taken in the child."""
    outcome = _run("started", tmp_path)
    assert (outcome.code, outcome.out.strip()) == (0, str([_NUM_RANKS] * _NUM_RANKS))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("last_raises", "FAILED rank 3 failed: KeyError: 'the shard is not there', at toy_ranks.py:"),
        ("last_is_killed", "was killed by SIGKILL"),
        ("last_segfaults", "was killed by SIGSEGV; its stack is in"),
        ("last_leaves", "left with exit code 0 before its work was done"),
        ("last_exits_3", "FAILED rank 3 failed: SystemExit: 3"),
        ("deaf", "FAILED rank 3 failed: RuntimeError: deaf and broken"),
        ("with_child", "was killed by SIGKILL"),
    ],
)
def test_a_failing_rank_ends_the_run_and_is_named(entry: str, said: str, tmp_path: Path) -> None:
    outcome = _run(entry, tmp_path)
    message = _one_message(outcome)
    assert outcome.code == 1
    assert message.startswith("FAILED rank 3 ")
    assert said in message
    errors = sorted(path.name for path in tmp_path.iterdir())
    if "failed:" in message:
        assert errors == ["rank-3-error.txt"]
        assert "Traceback" in (tmp_path / "rank-3-error.txt").read_text()
    else:
        assert errors == (["rank-3-fault.txt"] if "SIGSEGV" in message else [])


def test_a_rank_that_somebody_terminates_is_named(tmp_path: Path) -> None:
    outcome = _run("first_is_terminated", tmp_path)
    assert "rank 0 (process" in _one_message(outcome)
    assert "was killed by SIGTERM" in outcome.err


def test_a_rank_that_hangs_is_named_with_its_place(tmp_path: Path) -> None:
    """Neither those that waited, nor the signals by which the launcher ends the rest, are the cause."""
    message = _one_message(_run("third_hangs", tmp_path))
    assert re.match(
        r"FAILED rank 2 \(process \d+\) did not come to where others waited for it: it was in _compute_for_ever "
        r"\(toy_ranks\.py:",
        message,
    )
    assert re.search(r"rank [013] waited: .*[Tt]imed out", message)
    assert "_compute_for_ever" in (tmp_path / "rank-2-stack.txt").read_text()


def test_a_stopped_rank_is_named_with_its_state_and_its_stack(tmp_path: Path) -> None:
    message = _one_message(_run("third_is_stopped", tmp_path))
    stack = tmp_path / "rank-2-stack.txt"
    assert re.match(
        r"FAILED rank 2 \(process \d+, stopped by a signal such as SIGSTOP\) did not come to where others waited for "
        rf"it: it was in third_is_stopped \(toy_ranks\.py:\d+\); its stack is in {stack}; rank [013] waited: ",
        message,
    )
    assert "third_is_stopped" in stack.read_text()


def test_a_full_disk_is_named_though_nothing_can_be_written(tmp_path: Path) -> None:
    message = _one_message(_run("last_fills_the_disk", tmp_path))
    assert message.startswith("FAILED rank 3 failed: OSError: [Errno 28] No space left on device")
    assert "could not be written to" in message


def test_the_same_error_on_every_rank_is_told_once(tmp_path: Path) -> None:
    message = _one_message(_run("all_raise", tmp_path))
    assert "every rank found the same mistake" in message


@pytest.mark.parametrize(
    ("entry", "signals", "code", "said"),
    [
        ("work", ((signal.SIGINT, True),), 130, "STOPPED stopped by Ctrl-C; its 4 ranks have ended"),
        ("work", ((signal.SIGTERM, False),), 143, "STOPPED stopped by SIGTERM; its 4 ranks have ended"),
        ("work", ((signal.SIGHUP, True),), 129, "STOPPED stopped by SIGHUP; its 4 ranks have ended"),
        ("deaf_work", ((signal.SIGINT, True),), 130, "STOPPED stopped by Ctrl-C; its 4 ranks have ended"),
        ("deaf_work", ((signal.SIGINT, True), (signal.SIGINT, True)), 130, "STOPPED stopped by Ctrl-C"),
    ],
    ids=["ctrl-c", "sigterm", "sighup", "deaf-ctrl-c", "ctrl-c-twice"],
)
def test_a_signal_to_the_launcher_ends_the_run(
    entry: str, signals: tuple[tuple[signal.Signals, bool], ...], code: int, said: str, tmp_path: Path
) -> None:
    outcome = _run(entry, tmp_path, signals)
    assert _one_message(outcome).startswith(said)
    assert outcome.code == code
    if len(signals) == 2:
        assert outcome.seconds < 3.0  # the second Ctrl-C does not wait for the grace time
    assert list(tmp_path.iterdir()) == []


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    outcome = _run("work", tmp_path, ((signal.SIGKILL, False),))
    assert outcome.code == -signal.SIGKILL
    assert outcome.leftovers == []
