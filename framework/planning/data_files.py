"""Reads the data of the planner: files of YAML beside this module, each of which names its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data"


@cache
def load_yaml(path: Path) -> Any:
    """What the file holds, read once; nobody may change it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, Loader=loader)
