"""The command line as `Arguments`, and its help: argparse with a subcommand for each row of the table of commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from counterflow.launch.command import Command, Help, Option, UsageError
from counterflow.launch.commands.table import COMMANDS
from counterflow.launch.printing import did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

_EXIT_CODES = (
    "exit codes: 0 done, 1 the run failed, 2 a mistake on the command line or in the config, 130 Ctrl-C, "
    "143 SIGTERM"
)
_PROGRAM_HELP = """
Hybrid-parallel pretraining of language models: tensor x pipeline x data from one config.

commands:
{commands}

KEY=VALUE changes one value of the config (zero.stage=3); GROUP=CHOICE takes a prepared set of values
(schedule=dualpipe). `counterflow train --cfg job` prints every key with its value.

examples:
  counterflow train                           a small model on eight local ranks, on any laptop
  counterflow simulate schedule=dualpipe      its timeline, without starting a rank
  counterflow train --help                    what train does and its most used keys
"""


class Arguments(NamedTuple):
    """A parsed command line. `words` keep their order: overrides, or what else the command takes. `own` has the values
    of the command's own options; the rest are those that commands share.
    """

    command: str | None = None
    words: tuple[str, ...] = ()
    own: Mapping[str, Any] = MappingProxyType({})
    json: bool = False
    traceback: bool = False
    out: Path | None = None
    cfg: str | None = None
    multirun: bool = False
    config_dir: Path | None = None
    help: bool = False
    version: bool = False


def _path(text: str) -> Path:
    from pathlib import Path

    return Path(text)


def _job(text: str) -> str:
    if text != "job":
        raise argparse.ArgumentTypeError(f"{text}: only the job's config can be printed; write --cfg job")
    return text


_JSON = Option(
    "--json", "the last line of stdout is one JSON object (a list with --multirun); the rest goes to stderr"
)
_OUT = Option(
    "--out",
    "write there instead of a new folder under runs/",
    metavar="DIR",
    example="results/first",
    read=_path,
)
_OF_CONFIGS = (
    Option(
        "--cfg", "print the composed config and stop", alias="-c", metavar="job", example="job", read=_job
    ),
    Option("--multirun", "run every combination of a=1,2 b=x,y and print a table", alias="-m"),
    Option(
        "--config-dir",
        "look for config groups in DIR too (DIR/model/mine.yaml makes model=mine)",
        metavar="DIR",
        example="my_conf",
        read=_path,
    ),
)
_OF_ALL = (
    Option("--traceback", "print the Python traceback of an error as well"),
    Option("--help", "this text, or a command's", alias="-h"),
    Option("--version", "print the version"),
)


def options_of(command: Command) -> tuple[Option, ...]:
    """What may stand on a command line of `command`."""
    out = (_OUT,) if command.takes_out else ()
    of_configs = _OF_CONFIGS if command.read is None else ()
    return (_JSON, *out, *of_configs, *command.options, *_OF_ALL)


def _all_options() -> tuple[Option, ...]:
    own = (option for command in COMMANDS.values() for option in command.options)
    return (_JSON, _OUT, *_OF_CONFIGS, *own, *_OF_ALL)


def parse(argv: Sequence[str]) -> Arguments:
    """The command line as `Arguments`; options may stand anywhere.

    Raises UsageError: for an unknown command or option, or an option without its value.
    """
    parser = _Parser(prog="counterflow").with_options(_all_options())
    subparsers = parser.add_subparsers(dest="command", prog="counterflow", parser_class=_Parser)
    # Only of the commands that the line may mean: a parser takes a millisecond to make.
    for command in filter(None, map(COMMANDS.get, dict.fromkeys(argv))):
        subparsers.add_parser(command.name).with_options(options_of(command))
    # What argparse knows no place for are the words, between the options or behind them.
    namespace, words = parser.parse_known_args(argv)
    values = vars(namespace)
    name: str | None = values.pop("command")
    known = {option.name: option for option in _all_options()}
    given = [option.name for option in known.values() if option.dest in values]
    for word in words:
        if word.startswith("-"):
            given.append(known_name := word.partition("=")[0])
            if known_name not in known and known_name not in {option.alias for option in known.values()}:
                raise UsageError(
                    f"{word}: no such option{did_you_mean(known_name, known)}; the options are {', '.join(known)}"
                )
    if name is None:
        return Arguments(help="help" in values, version="version" in values)
    command = COMMANDS[name]
    own_names = {each for option in options_of(command) for each in (option.name, option.alias)}
    for each in given:
        if each not in own_names:
            raise UsageError(f"{each}: no option of {name}; `counterflow {name} --help` shows its own")
    own = {option.dest: values.pop(option.dest, None) for option in command.options}
    own |= dict.fromkeys(command.own_keys)
    kept: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if key in command.own_keys:
            own[key] = value
        else:
            kept.append(word)
    return Arguments(command=name, words=tuple(kept), own=own, **values)


def program_help() -> str:
    """What `counterflow --help` prints."""
    commands = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    parser = _Parser(
        usage="counterflow COMMAND [options] [KEY=VALUE ...]     (timeline: the folder of a run)",
        description=_PROGRAM_HELP.format(commands=commands).strip(),
    )
    return parser.with_options(_all_options()).format_help()


def command_help(name: str, words: Sequence[str] = ()) -> str:
    """What `counterflow NAME --help` prints; of bench with the name of one in `words`, what that one does."""
    text = COMMANDS[name].help_on(words)
    title = " ".join(filter(None, (name, text.title)))
    parser = _Parser(usage=f"counterflow {title} [options] {text.argument}", description=_description(text))
    return parser.with_options(options_of(COMMANDS[name])).format_help()


def _description(text: Help) -> str:
    from inspect import cleandoc

    keys = _rows(text.keys)
    width = max((len(key) for key, _ in keys), default=0) + 2
    sections = {
        text.keys_heading: [f"{key:<{width}}{meaning}" for key, meaning in keys],
        "examples:": [f"{example}\n      {meaning}" for example, meaning in _rows(text.examples)],
        "output:": cleandoc(text.output).splitlines(),
    }
    told = [
        "\n".join((title, *(f"  {line}" for line in lines))) for title, lines in sections.items() if lines
    ]
    return "\n\n".join((cleandoc(text.about), *told))


def _rows(text: str) -> list[tuple[str, str]]:
    """The keys or examples of a help, each with its meaning."""
    from inspect import cleandoc

    rows = (line.partition("  ") for line in cleandoc(text).splitlines() if line)
    return [(row[0], row[2].strip()) for row in rows]


class _Formatter(argparse.RawTextHelpFormatter):
    """Texts as they are written, without the word `usage`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=21, width=120)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        super().add_usage(usage, actions, groups, "")


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong, and takes no abbreviation of an option."""

    def __init__(self, **settings: Any) -> None:
        settings |= {"formatter_class": _Formatter, "epilog": _EXIT_CODES}
        super().__init__(add_help=False, allow_abbrev=False, **settings)

    def with_options(self, options: Iterable[Option]) -> _Parser:
        """This parser, once it knows these."""
        group = self.add_argument_group("options (anywhere on the line)")
        for option in options:
            value: dict[str, Any] = {"action": "store_true"}
            if option.metavar:
                value = {"metavar": option.metavar, "type": option.read}
            names = (option.name, *filter(None, (option.alias,)))
            # Nothing where it is not given: a subparser's default would cover what stood before the command.
            group.add_argument(*names, default=argparse.SUPPRESS, help=option.meaning, **value)
        return self

    def error(self, message: str) -> NoReturn:
        """Raises UsageError: argparse's message with the value, the rule and the remedy."""
        # As in "argument --cfg/-c: expected one argument".
        from ast import literal_eval

        names, _, what = message.removeprefix("argument ").partition(": ")
        name = names.partition("/")[0]
        if match := re.match(r"invalid choice: (.*) \(choose", what):
            raise UsageError(_no_command(str(literal_eval(match[1]))))
        if match := re.match(r"ignored explicit argument (.*)", what):
            value = literal_eval(match[1])
            raise UsageError(f"{name}={value}: {name} takes no value; write {name}")
        if what == "expected one argument":
            examples = {option.name: option.example for option in _all_options()}
            raise UsageError(f"{name}: needs a value, as in {name} {examples[name]}")
        raise UsageError(f"{name} {what}")


def _no_command(word: str) -> str:
    names = ", ".join(COMMANDS)
    if "=" in word:
        return f"{word}: the command comes first, as in counterflow train {word}; the commands are {names}"
    return f"{word}: no such command{did_you_mean(word, COMMANDS)}; the commands are {names}"
