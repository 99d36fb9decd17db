"""What a bench is: the help, the keys and the measurement that its module has as `BENCH`.

As the top of a command's module, that of a bench imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from counterflow.framework.keys import keys_text
from counterflow.launch.command import Help

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


class Bench(NamedTuple):
    """about, examples, output: see `Help`. keys: the dataclass of its KEY=VALUE.

    measure: (keys, folder, console) -> its part of what `--json` prints; writes its pictures into the folder.
    """

    name: str
    summary: str
    about: str
    examples: str
    output: str
    keys: type[Any]
    measure: Callable[[Any, Path, Console], dict[str, Any]]

    @property
    def help(self) -> Help:
        """What `counterflow bench NAME --help` prints."""
        return Help(
            title=self.name,
            about=self.about,
            keys=keys_text(self.keys),
            keys_heading="its keys, with their defaults:",
            examples=self.examples,
            output=self.output,
        )
