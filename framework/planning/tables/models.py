"""Shapes of conf/model by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from counterflow.framework.config.mapping import from_mapping
from counterflow.framework.planning.data_files import load_yaml
from counterflow.models.config import ModelConfig

_SHAPES = Path(__file__).parents[3] / "conf" / "model"


@cache
def conf_model(name: str) -> ModelConfig:
    return from_mapping(ModelConfig, load_yaml(_SHAPES / f"{name}.yaml"))
