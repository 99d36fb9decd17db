"""The shapes that come with the package."""

from __future__ import annotations

from typing import Any

import pytest

from counterflow.framework.config.mapping import to_mapping
from counterflow.models.config import ModelConfig
from tests.models.shapes import NAMES, shape, shape_values


def repeated(values: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """The keys whose value is the default's."""
    found: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += [f"{key}.{name}" for name in repeated(value, defaults[key])]
        elif defaults[key] == value:
            found.append(key)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_file_holds_only_what_differs_from_the_defaults(name: str) -> None:
    values = shape_values(name)
    assert shape(name).name == name
    values.pop("name")
    assert repeated(values, to_mapping(ModelConfig())) == []
