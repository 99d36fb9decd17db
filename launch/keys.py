"""KEY=VALUE words of a command that has keys of its own, in the grammar of a run's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from omegaconf import OmegaConf

from counterflow.framework.config.mapping import from_mapping

T = TypeVar("T")


def read_keys(cls: type[T], words: Sequence[str]) -> T:
    """The words as the dataclass `cls`.

    Raises ValueError: for an unknown key or a value that does not fit.
    """
    for word in words:
        if "=" not in word:
            raise ValueError(f"{word}: expected KEY=VALUE, as in repeats=3")
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    assert isinstance(values, dict)
    return from_mapping(cls, {str(key): value for key, value in values.items()})
