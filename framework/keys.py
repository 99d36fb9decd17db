"""Keys of a command that has a few of its own: dataclass fields that say what they mean, and what they may be."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, TypeVar, cast

T = TypeVar("T")


def key(default: T, meaning: str, *, at_least: float | None = None, above: float | None = None) -> T:
    """A field of a dataclass of keys: its default, what the help says of it, and bounds of its number or numbers."""
    return cast(
        T, field(default=default, metadata={"meaning": meaning, "at_least": at_least, "above": above})
    )


def check_bounds(keys: Any) -> None:
    """Raises ValueError: for the first value that is out of its bounds; None has none."""
    for item in fields(keys):
        value, least, above = getattr(keys, item.name), item.metadata["at_least"], item.metadata["above"]
        for number in cast(tuple[Any, ...], value if isinstance(value, tuple) else (value,)):
            if least is not None and number is not None and not number >= least:
                raise ValueError(f"{item.name}={_written(value)}: must be at least {least}")
            if above is not None and number is not None and not number > above:
                raise ValueError(
                    f"{item.name}={_written(value)}: must be above {above}; the default is {_written(item.default)}"
                )


def keys_text(cls: type[Any]) -> str:
    """One key a line: `key=default`, as a user writes it, and behind two spaces its meaning."""
    return "\n".join(
        f"{item.name}={_written(item.default)}  {item.metadata['meaning']}" for item in fields(cls)
    )


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(_written, cast(tuple[Any, ...], value)))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
