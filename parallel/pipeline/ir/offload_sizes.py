"""The activations that move as one: what they are called, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass

Unit = tuple[int, int]
"""(stage, micro-batch): all that one forward keeps for its backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Of one micro-batch on a stage. kept: from its forward to its backward; most: during the backward."""

    kept: int
    most: int
