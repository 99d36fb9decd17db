"""What a command of `counterflow` is: its help, its options, what it reads and what it does.

The top of a command's module imports nothing heavy, so that help and mistakes on the command line answer at once; its
functions import what they work with. The records are named tuples for the same reason: dataclasses are a third of
what Python takes to start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from counterflow.framework.config.tree import TrainConfig

A_RUN = "runs/20260131-120000-1a2b3c4d"
# The keys that a layout is made of, for the help of the commands that start ranks.
LAYOUT_KEYS = """
    parallel.tensor_parallel_size=2  ranks that share each layer
    parallel.pipeline_parallel_size=2  stages of layers, one after another
    parallel.data_parallel_size=2  copies that each take a part of the batch
    schedule=dualpipe  1f1b, interleaved_1f1b, zb1p, zbv, dualpipe_v, ... (a wrong name lists all)
    schedule.num_microbatches=8  parts of a step's batch (dualpipe: even, >= 2 x stages)
"""


class UsageError(ValueError):
    """A mistake on the command line outside the overrides."""


class Option(NamedTuple):
    """One option of a command line.

    metavar: what its help writes for the value; "": it is a flag. example: a value, for who has left it out.
    read: the value of what was written; argparse.ArgumentTypeError says what is wrong with it.
    """

    name: str
    meaning: str
    alias: str | None = None
    metavar: str = ""
    example: str = ""
    read: Callable[[str], Any] = str

    @property
    def dest(self) -> str:
        """The name of its value."""
        return self.name.lstrip("-").replace("-", "_")


class Help(NamedTuple):
    """What `counterflow COMMAND --help` prints above the options.

    about: the docstring of the module. keys and examples: one a line, and behind two spaces its meaning. output: where
    results go. title: what stands behind the command's name. argument: what the words are.
    """

    about: str
    examples: str
    output: str
    keys: str = ""
    keys_heading: str = "most used keys:"
    title: str = ""
    argument: str = "[KEY=VALUE ...]"


class LaunchOptions(NamedTuple):
    """What the command line says beside the config.

    out: the run's folder; None makes a new one under `launcher.runs_dir`. command: as the user wrote it.
    config_values: the config as it may be written down; None: what was given, without passwords. own: values of the
    command's own options. in_sweep: whether a table of all runs follows. may_go_on: whether `out` may be the folder of
    a run, which goes on there.
    """

    out: Path | None = None
    json_output: bool = False
    command: Sequence[str] = ()
    config_values: Mapping[str, Any] | None = None
    own: Mapping[str, Any] = MappingProxyType({})
    in_sweep: bool = False
    may_go_on: bool = False


def check_layout(config: TrainConfig) -> None:
    """Raises ConfigError: where a run of this config could not start."""
    from counterflow.framework.checks.rules import check

    check(config)


class Command(NamedTuple):
    """One command: a module of `launch/commands` has its `COMMAND`, and `launch/commands/table.py` its line.

    help: or a function that makes it of the words behind the command.
    read: the words as what `run` takes; None: they are overrides of the config of a run, which `run` takes.
    run: does the work, and prints what `print_result` does not; what `--json` prints, or None where another rank
        prints it.
    check: refuses a config before the first run of a sweep. columns: dotted names of the result that the table of a
        sweep shows. options: those that no other command has. takes_out: whether there is --out.
    own_keys: of words KEY=VALUE that are the command's and not the config's.
    """

    name: str
    summary: str
    help: Help | Callable[[Sequence[str]], Help]
    run: Callable[[Any, LaunchOptions], dict[str, Any] | None]
    read: Callable[[Sequence[str]], Any] | None = None
    print_result: Callable[[dict[str, Any]], None] | None = None
    check: Callable[[TrainConfig], None] = check_layout
    columns: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    own_keys: tuple[str, ...] = ()
    takes_out: bool = True

    def help_on(self, words: Sequence[str] = ()) -> Help:
        """The help for a command line with these words."""
        return self.help(words) if callable(self.help) else self.help
