"""What `counterflow bench` takes: its own few values, not those of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBenchConfig:
    """`counterflow bench schedules`.

    mode: `sleep` (every action sleeps action_ms), `compute` (a small Llama on two ranks), or both.
    repeats: counted steps of each case. schedules: empty measures every schedule.
    num_ranks: ranks of the sleeping pipeline. num_microbatches: of a step; every schedule is measured with each.
    """

    mode: Literal["sleep", "compute", "both"] = "both"
    repeats: int = 5
    action_ms: float = 30.0
    num_ranks: int = 8
    num_microbatches: tuple[int, ...] = (32,)
    schedules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("repeats", "num_ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not self.action_ms > 0:
            raise ValueError(
                f"action_ms={self.action_ms}: a positive time in milliseconds; 30 is the default"
            )
        if not self.num_microbatches or min(self.num_microbatches) < 1:
            raise ValueError(
                f"num_microbatches={list(self.num_microbatches)}: one number or more, each at least 1, as in "
                "num_microbatches=[20,32]"
            )
