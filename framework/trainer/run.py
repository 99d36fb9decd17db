"""RunContext: what the launcher hands to every rank beside the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterflow.framework.data.prepare import PreparedData


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One run, as each of its ranks sees it.

    run_dir: absolute; it exists, holds config.yaml, and is the same on every rank.
    data: the prepared tokens and tokenizer. config_hash: 64 hex digits.
    started_at: seconds since the epoch at which the launcher began, so that start-up can be timed.
    show_progress: whether rank 0 may draw on the terminal. Human output goes to stderr where `json_output` is
    set, for then stdout carries one JSON object; the launcher redirects it, so `print` is safe either way.
    config_values: the config as it may be written down, nested plain values without secrets.
    hidden: what to write for values of the config that must not be written down (framework/redaction.py).
    """

    run_dir: Path
    data: PreparedData
    config_hash: str
    started_at: float
    show_progress: bool = True
    json_output: bool = False
    config_values: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict, repr=False)
