"""The first cause among many failures, on records written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.failure import RankError, RankExit, describe, is_peer_loss, load_errors, root_cause, save_error

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
    cause = root_cause(
        [], [_error(1, 1.0, secondary=True, message=_CLOSED), _error(0, 2.0, secondary=True)], Path("/run")
    )
    assert cause is not None
    assert cause.message == (
        "rank 1 failed: RuntimeError: Connection closed by peer [127.0.0.1]:12469., at a.py:1 (RuntimeError on rank 0 "
        "too); its traceback is in /run/rank-1-error.txt"
    )
    assert cause.details == "T"


def test_records_survive_the_file(tmp_path: Path) -> None:
    try:
        raise OSError("no space left")
    except OSError as error:
        record = describe(5, error)
    save_error(record, tmp_path, tmp_path)
    assert load_errors(tmp_path) == [record]
    assert (record.kind, record.message, record.secondary) == ("OSError", "no space left", False)
    assert record.where.startswith("test_failure.py:")
    assert "no space left" in (tmp_path / "rank-5-error.txt").read_text()
