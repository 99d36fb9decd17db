"""The model shapes of conf/model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from counterflow.framework.config.mapping import from_mapping
from counterflow.models.config import ModelConfig

SHAPES = Path(__file__).parents[2] / "conf" / "model"
NAMES = tuple(sorted(path.stem for path in SHAPES.glob("*.yaml")))


def shape_values(name: str) -> dict[str, Any]:
    """What the file says."""
    return yaml.safe_load((SHAPES / f"{name}.yaml").read_text())


def shape(name: str) -> ModelConfig:
    return from_mapping(ModelConfig, shape_values(name))
