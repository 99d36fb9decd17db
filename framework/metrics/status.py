"""How a run ended, as sinks are told."""

from __future__ import annotations

from typing import Literal

Status = Literal["finished", "failed", "interrupted"]
