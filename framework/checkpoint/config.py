"""Config of checkpoints (config group `checkpoint`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """interval_steps: 0 saves at the end only. keep: newest checkpoints kept. resume: a run folder to go on from."""

    enabled: bool = True
    interval_steps: int = 0
    keep: int = 2
    resume: str | None = None
