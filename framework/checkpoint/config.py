"""Config of checkpoints (config group `checkpoint`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, how many are kept, and where a run goes on from.

    interval_steps: 0 saves at the end only. keep: newest checkpoints kept.
    resume: a run's folder to go on from at its newest whole checkpoint, or the folder of one checkpoint; `auto`: the
        run's own folder, --out, so that the same command goes on there after whatever ended it, or begins.
    allow_changes: settings of the model or the data, by full name, that may differ from what that was trained with.
    timeout_s: how long ranks wait for each other while one is saved or loaded, instead of comm.timeout_s.
    verify_checksums: on load, read every file once more and compare its crc32; sizes are always compared.
    """

    enabled: bool = True
    interval_steps: int = 0
    keep: int = 2
    resume: str | None = None
    allow_changes: tuple[str, ...] = ()
    verify_checksums: bool = True
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.interval_steps < 0:
            raise ValueError(
                f"checkpoint.interval_steps={self.interval_steps}: a number of steps; set it to 0 to save at the "
                "end only, or to 1 or more"
            )
        if self.keep < 1:
            raise ValueError(
                f"checkpoint.keep={self.keep}: at least the newest checkpoint is kept; set it to 1 or more, or "
                "checkpoint.enabled=false to write none"
            )
        if not 1 <= self.timeout_s <= 604800:
            raise ValueError(
                f"checkpoint.timeout_s={self.timeout_s}: from 1 second to a week (604800); 1800 is the default"
            )
