"""Config of activation offloading (config group `offload`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["none", "lru", "schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Where activations wait for their backward. No result changes by it.

    policy: which micro-batches of a stage leave, and when they come back. `schedule` reads it off the rank's actions:
        what is needed furthest in the future leaves at once, and comes back ahead of its backward; `lru` waits until
        there is no room, moves what was used least recently, and brings it back when the backward asks for it.
    tier: `host` is pinned memory beside a GPU and a plain copy without one; `disk` is a file for each rank.
    budget_bytes, budget_share: what a rank may hold of activations at once, in bytes, or as a share of what the rank
        that holds most would without offloading. Neither: everything stays.
    min_bytes: smaller tensors stay.
    folder: of `disk`; null: launcher.runs_dir.
    copy_bytes_per_s: the most that copies take in each direction, and what the simulator counts with; null: as fast
        as they go, which it counts as no time.
    """

    policy: Policy = "none"
    tier: Literal["host", "disk"] = "host"
    budget_bytes: int | None = None
    budget_share: float | None = None
    min_bytes: int = 4096
    folder: str | None = None
    copy_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.budget_bytes is not None and self.budget_share is not None:
            raise ValueError(
                f"offload.budget_bytes={self.budget_bytes} with offload.budget_share={self.budget_share}: a budget is "
                "given in one way; set one of them to null"
            )
        if self.policy == "none" and self.has_budget:
            raise ValueError(
                f"offload.policy=none with offload.{self._budget_text}: nothing would keep within it; set "
                "offload.policy=schedule, or leave the budget out"
            )
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise ValueError(
                f"offload.budget_bytes={self.budget_bytes}: a number of bytes; set it to 1 or more"
            )
        if self.budget_share is not None and not 0 < self.budget_share <= 1:
            raise ValueError(
                f"offload.budget_share={self.budget_share}: a share of the peak, above 0 and at most 1; 0.5 is half"
            )
        if self.min_bytes < 0:
            raise ValueError(f"offload.min_bytes={self.min_bytes}: a number of bytes; set it to 0 or more")
        if self.copy_bytes_per_s is not None and not self.copy_bytes_per_s > 0:
            raise ValueError(
                f"offload.copy_bytes_per_s={self.copy_bytes_per_s}: bytes in a second, above 0; null does not limit"
            )

    @property
    def has_budget(self) -> bool:
        return self.budget_bytes is not None or self.budget_share is not None

    @property
    def is_active(self) -> bool:
        """Whether anything may leave."""
        return self.policy != "none" and self.has_budget

    @property
    def _budget_text(self) -> str:
        name = "budget_bytes" if self.budget_bytes is not None else "budget_share"
        return f"{name}={getattr(self, name)}"
