"""Config of the records' sinks (config group `logger`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerConfig:
    """Where step records go besides the console. `wandb` and `tensorboard` write the JSONL as well.

    timeline_interval_steps: every how many steps, and at the last, the measured timeline of a pipeline is written
    to the run's folder and its picture to W&B or TensorBoard; null: at the last step only; 0: never. Drawing
    takes about a second, in which every rank waits.
    expert_load_interval_steps: every how many steps, and at the last, a record has the load of each expert and the
    bytes between expert ranks, which `counterflow balance` reads; 0: never. For 58 layers of 256 experts they make a
    record 25 times as large.
    timeout_s: how long W&B or TensorBoard may take to start, for one call or to finish, before the run goes on without
    it; no rank waits for it meanwhile.
    """

    name: Literal["none", "jsonl", "wandb", "tensorboard"] = "wandb"
    project: str = "counterflow"
    mode: Literal["offline", "online"] = "offline"
    timeline_interval_steps: int | None = None
    expert_load_interval_steps: int = 10
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.timeline_interval_steps is not None and self.timeline_interval_steps < 0:
            raise ValueError(
                f"logger.timeline_interval_steps={self.timeline_interval_steps}: a number of steps; set it to 1 or "
                "more, to 0 for never, or to null for the last step only"
            )
        if self.expert_load_interval_steps < 0:
            raise ValueError(
                f"logger.expert_load_interval_steps={self.expert_load_interval_steps}: a number of steps; set it to 1 "
                "or more, or to 0 for never"
            )
        if not 1 <= self.timeout_s <= 3600:
            raise ValueError(
                f"logger.timeout_s={self.timeout_s}: from 1 second to an hour (3600); 60 is the default"
            )

    def keeps_loads_of(self, step: int, num_steps: int) -> bool:
        """Whether the record of `step`, counted from 0, has the load of each expert."""
        interval = self.expert_load_interval_steps
        return interval > 0 and (step + 1 == num_steps or (step + 1) % interval == 0)
