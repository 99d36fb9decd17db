"""The first cause among many failures, on records written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from counterflow.launch.ranks.failure import (
    RankError,
    RankExit,
    Silence,
    describe,
    is_peer_loss,
    keep,
    root_cause,
)
from counterflow.launch.ranks.reports import Reports, place_of

# Texts of torch 2.13, as gloo and the store gave them when a peer was killed or slept.
_CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:12469. This is typically caused by a remote worker crashing. Check the logs of the remote worker "
    "before reporting an error. GLHF! 🏖️"
)
_LATE = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for "
    "recv operation to complete"
)


def _error(
    rank: int, time_s: float, *, secondary: bool, kind: str = "RuntimeError", message: str = "x"
) -> RankError:
    return RankError(
        rank=rank,
        time_s=time_s,
        kind=kind,
        message=message,
        where="a.py:1",
        secondary=secondary,
        traceback="T",
    )


def _exit(rank: int, time_s: float, code: int) -> RankExit:
    return RankExit(rank=rank, pid=100 + rank, code=code, time_s=time_s)


@pytest.mark.parametrize("text", [_CLOSED, _LATE, "Broken pipe", "wait timeout after 300000ms, keys: /x"])
def test_peer_loss_is_told_from_other_errors(text: str) -> None:
    assert is_peer_loss(RuntimeError(text))
    assert not is_peer_loss(ValueError(text))  # a user's text is not evidence
    assert not is_peer_loss(RuntimeError("shapes do not match"))


def test_peer_loss_shows_through_an_error_raised_from_it() -> None:
    error = ValueError("rank 1 waits in 2RECV_F5")
    error.__cause__ = RuntimeError(_CLOSED)
    assert is_peer_loss(error)


@pytest.mark.parametrize(
    ("exits", "errors", "rank"),
    [
        # Killed; two peers tell of it, and the launcher's SIGTERM ends the fourth.
        (
            [_exit(2, 1.0, -9), _exit(3, 1.1, -15)],
            [_error(0, 1.01, secondary=True), _error(1, 1.02, secondary=True)],
            2,
        ),
        # A rank's own error comes first although a peer recorded its loss earlier, during the clean-up.
        ([_exit(1, 1.5, 1)], [_error(0, 1.0, secondary=True), _error(1, 1.3, secondary=False)], 1),
        # An error of its own, then a peer that C++ aborted.
        ([_exit(0, 2.0, -6), _exit(1, 1.1, 1)], [_error(1, 1.0, secondary=False)], 1),
        # A peer that reacts to a killed rank with an error that is not known as a loss.
        ([_exit(3, 1.0, -9), _exit(0, 1.2, 1)], [_error(0, 1.1, secondary=False)], 3),
        # Nobody died: all waited too long, the first is named.
        ([_exit(1, 3.0, 1)], [_error(1, 1.0, secondary=True), _error(0, 1.1, secondary=True)], 1),
    ],
)
def test_the_first_cause_is_named(exits: list[RankExit], errors: list[RankError], rank: int) -> None:
    for order in (1, -1):
        cause = root_cause(exits[::order], errors[::order], Path("/run"))
        assert cause is not None
        assert cause.rank == rank


def test_no_record_is_no_cause() -> None:
    assert root_cause([], [], Path("/run")) is None


def test_the_message_is_plain_and_points_to_the_traceback() -> None:
    try:
        raise RuntimeError(_CLOSED)
    except RuntimeError as error:
        record = describe(1, error)
    cause = root_cause([], [record, _error(0, record.time_s + 1, secondary=True)], Path("/run"))
    assert cause is not None
    assert cause.message == (
        f"rank 1 failed: RuntimeError: Connection closed by peer [127.0.0.1]:12469., at {record.where} (RuntimeError "
        "on rank 0 too); its traceback is in /run/rank-1-error.txt"
    )
    assert cause.details == record.traceback


def test_a_report_needs_no_disk(tmp_path: Path) -> None:
    try:
        raise OSError("no space left")
    except OSError as error:
        error.add_note("in action 0F1 of rank 5")
        record = describe(5, error)
    reports = Reports(6)
    try:
        reports.of_rank[5].failed(record)
        reports.of_rank[2].done()
        assert reports.errors() == [record]
        assert [reports.is_done(rank) for rank in (2, 5)] == [True, False]
    finally:
        reports.close()
    assert (record.kind, record.secondary) == ("OSError", False)
    assert record.message == "no space left; in action 0F1 of rank 5"
    assert record.where.startswith("test_failure.py:")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_with_the_cause(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    assert keep(full, "T") == "No space left on device"
    error = replace(_error(1, 1.0, secondary=False), not_kept="No space left on device")
    cause = root_cause([], [error], Path("/run"))
    assert cause is not None
    assert "could not be written to /run/rank-1-error.txt (No space left on device)" in cause.message


def test_the_silent_rank_is_named_before_those_that_waited() -> None:
    waited = [
        replace(_error(0, 1.0, secondary=True, message="no gradient from rank 2"), waited=True),
        replace(_error(3, 1.1, secondary=True), waited=True),
    ]
    silent = [
        Silence(rank=1, where="wait (p2p.py:9)", waits=True, stack="S1"),
        Silence(rank=2, where="forward (model.py:12)", waits=False, stack="S2"),
    ]
    # The first leaves; the launcher ends the others.
    exits = [_exit(0, 3.0, 1), _exit(1, 3.1, -15), _exit(2, 6.0, -9)]
    cause = root_cause(exits, waited, Path("/run"), silent=silent)
    assert cause is not None
    assert (cause.rank, cause.witnesses) == (2, (0, 3))
    assert cause.message == (
        "rank 2 did not come to where others waited for it: it was in forward (model.py:12), rank 1 waited too, in "
        "wait (p2p.py:9); its stack is in /run/rank-2-stack.txt; rank 0 waited: no gradient from rank 2, at a.py:1; "
        "rank 3 waited: x, at a.py:1"
    )


def test_ranks_that_wait_for_each_other_are_all_named() -> None:
    waited = [replace(_error(rank, rank, secondary=True), waited=True) for rank in (0, 1)]
    cause = root_cause([_exit(0, 3.0, 1)], waited, Path("/run"))
    assert cause is not None
    assert cause.message.startswith(
        "the ranks waited for each other until the time-out, and no rank did what"
    )
    assert "rank 0 waited: x" in cause.message
    assert "rank 1 waited: x" in cause.message


def test_the_launchers_signal_is_no_cause_though_it_is_seen_first() -> None:
    exits = [_exit(3, 1.0, -15), _exit(2, 1.02, 3), _exit(1, 1.03, -15)]
    cause = root_cause(exits, [], Path("/run"))
    assert cause is not None
    assert cause.rank == 2


def test_the_place_of_a_thread_is_its_innermost_own_frame() -> None:
    stack = (
        'Thread 0x01 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 1 in wait\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/v/site-packages/torch/x.py", line 3 in op\n'
        '  File "/home/me/model.py", line 12 in forward\n  File "/home/me/main.py", line 2 in <module>\n'
    )
    place = place_of(stack)
    assert place is not None
    assert (place.where, place.waits) == ("forward (model.py:12)", False)
    waiting = place_of(stack.replace("torch/x.py", "torch/distributed/distributed_c10d.py"))
    assert waiting is not None
    assert waiting.waits
    assert place_of("") is None


def test_what_the_config_took_from_the_environment_is_not_kept() -> None:
    try:
        raise OSError("/vault/corpus: cannot be read")
    except OSError as error:
        record = describe(0, error, {"/vault/corpus": "${oc.env:CORPUS}"})
    assert record.message == "${oc.env:CORPUS}: cannot be read"
    assert "/vault" not in record.traceback


def test_a_failed_save_is_told_by_its_folder_and_not_by_a_rank() -> None:
    told = "checkpoint '/r/step-00000002' was not written: ranks 0, 1: no room to write there (No space left)"
    errors = [
        _error(rank, 2.0 - rank, secondary=False, kind="CheckpointError", message=told) for rank in range(2)
    ]
    cause = root_cause([], errors, Path("/run"))
    assert cause is not None
    assert cause.message == told
