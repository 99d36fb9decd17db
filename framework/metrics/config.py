"""Config of the records' sinks (config group `logger`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerConfig:
    """Where step records go besides the console. `wandb` and `tensorboard` write the JSONL as well."""

    name: Literal["none", "jsonl", "wandb", "tensorboard"] = "wandb"
    project: str = "counterflow"
    mode: Literal["offline", "online"] = "offline"
