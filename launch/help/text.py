"""What the help of one command is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """summary: one line. about: what it does. overrides: the most used ones, (text, meaning). output: where
    results go. columns: dotted names of the result that a sweep's table shows. argument: what the command takes
    where that is not a config, and then `options`, its own ones, under `options_heading`.
    """

    summary: str
    about: str
    examples: tuple[tuple[str, str], ...]
    output: str
    overrides: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    argument: str = ""
    options: tuple[tuple[str, str], ...] = ()
    options_heading: str = "its own options:"

    @property
    def heading(self) -> str:
        """What stands above the keys."""
        return self.options_heading if self.options else "most used keys:"
