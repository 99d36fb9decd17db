"""What memory that is taken now is for, told to whoever counts it (framework/memory/live.py).

A name on the thread, nothing more: it costs a fraction of a microsecond where nobody counts.
"""

from __future__ import annotations

from threading import local
from types import TracebackType

PARTS: tuple[str, ...] = (
    "parameters",
    "gathered",
    "gradients",
    "optimizer",
    "activations",
    "loss",
    "messages",
    "experts",
    "offloaded",
    "other",
)


class _Current(local):
    part = "activations"


_current = _Current()


def current_part() -> str:
    """One of PARTS."""
    return _current.part


class memory_of:  # noqa: N801 (a context manager, read as a verb)
    """What is taken within is for `part`."""

    __slots__ = ("_before", "_part")

    def __init__(self, part: str) -> None:
        self._part = part

    def __enter__(self) -> None:
        self._before = _current.part
        _current.part = self._part

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.part = self._before
