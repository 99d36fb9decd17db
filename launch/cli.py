"""The `counterflow` command: `counterflow COMMAND [options] [overrides]`.

This module parses, dispatches, and turns every error into one message and an exit code. It imports nothing heavy,
so that help and mistakes on the command line answer at once.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterflow.framework.redaction import redacted
from counterflow.launch.help.commands import COMMANDS, command_help, foreign_options, program_help

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig
    from counterflow.launch.compose import Recorded

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
_VALUE_OPTIONS = ("--out", "--cfg", "--config-dir", "--step")
_OPTIONS = (*_VALUE_OPTIONS, "--json", "--traceback", "--multirun", "--model-only", "--help", "--version")


class UsageError(ValueError):
    """A mistake on the command line outside the overrides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A parsed command line. `overrides` keep their order (for `timeline`: the run's folder); the rest are the
    options' values.
    """

    command: str | None = None
    overrides: tuple[str, ...] = ()
    json_output: bool = False
    traceback: bool = False
    out: Path | None = None
    print_config: bool = False
    multirun: bool = False
    model_only: bool = False
    config_dir: Path | None = None
    step: int | None = None
    help: bool = False
    version: bool = False


def parse(argv: Sequence[str]) -> Arguments:
    """The command line as `Arguments`; options may stand anywhere.

    Raises UsageError: for an unknown command or option, or an option without its value.
    """
    values: dict[str, Any] = {}
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        name = {"-m": "--multirun", "-h": "--help", "-c": "--cfg"}.get(name, name)
        if not name.startswith("-"):
            words.append(word)
            continue
        if name not in _OPTIONS:
            raise UsageError(
                f"{word}: no such option{_near(name, _OPTIONS)}; the options are {', '.join(_OPTIONS)}"
            )
        if name in _VALUE_OPTIONS:
            if not has_value:
                if not rest:
                    raise UsageError(f"{name}: needs a value, as in {_EXAMPLES[name]}")
                value = rest.pop(0)
            values[name] = value
        elif has_value:
            raise UsageError(f"{word}: {name} takes no value; write {name}")
        else:
            values[name] = True
    if (config := values.get("--cfg")) not in (None, "job"):
        raise UsageError(f"--cfg {config}: only the job's config can be printed; write --cfg job")
    step = str(values.get("--step", "1"))
    if not step.isdecimal():
        raise UsageError(f"--step {step}: must be a whole number, as in {_EXAMPLES['--step']}")
    command = words.pop(0) if words else None
    if command is not None and command not in COMMANDS:
        if "=" in command:
            raise UsageError(
                f"{command}: the command comes first, as in counterflow train {command}; the commands are "
                f"{', '.join(COMMANDS)}"
            )
        raise UsageError(
            f"{command}: no such command{_near(command, COMMANDS)}; the commands are {', '.join(COMMANDS)}"
        )
    if command is not None:
        for name in foreign_options(command):
            if name in values:
                raise UsageError(
                    f"{name}: no option of {command}; `counterflow {command} --help` shows its own"
                )
    return Arguments(
        command=command,
        overrides=tuple(words),
        json_output="--json" in values,
        traceback="--traceback" in values,
        out=Path(values["--out"]) if "--out" in values else None,
        print_config="--cfg" in values,
        multirun="--multirun" in values,
        model_only="--model-only" in values,
        config_dir=Path(values["--config-dir"]) if "--config-dir" in values else None,
        step=int(step) if "--step" in values else None,
        help="--help" in values,
        version="--version" in values,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code: 0 done, 1 the run failed, 2 a user's mistake, 128 + signal stopped."""
    argv = sys.argv[1:] if argv is None else list(argv)
    with _json_channel(active="--json" in argv) as emit:
        try:
            arguments = parse(argv)
            if (code := _answer_at_once(arguments)) is not None:
                return code
            # torch's C++ logs tell each lost connection on its own; the launcher names the cause once.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "WARNING" if arguments.traceback else "FATAL")
            code, result = _run(arguments, argv)
        except BaseException as error:
            code, message = _explain(error)
            message = redacted(message, getattr(error, "interpolations", None))
            if message:
                # Long messages stand on their own line; a terminal's progress line may be half written.
                print(f"error: {message}" if code != 130 else message, file=sys.stderr, flush=True)
            if "--traceback" in argv:
                _print_traceback(error)
            result = {"error": message, "exit_code": code}
        if result is not None:
            emit(result)
        return code


def _answer_at_once(arguments: Arguments) -> int | None:
    """What needs no config: help and version; None for a command to run."""
    if arguments.version:
        from importlib.metadata import version

        print(f"counterflow {version('counterflow')}")
        return EXIT_OK
    if arguments.command is None:
        print(program_help(), end="", file=sys.stdout if arguments.help else sys.stderr)
        return EXIT_OK if arguments.help else EXIT_USAGE
    if arguments.help:
        print(command_help(arguments.command, arguments.overrides), end="")
        return EXIT_OK
    return None


def _run(arguments: Arguments, argv: Sequence[str]) -> tuple[int, Any]:
    if arguments.command == "timeline":
        return EXIT_OK, _timeline(arguments)
    if arguments.command == "bench":
        return EXIT_OK, _bench(arguments)
    if arguments.command == "balance":
        return EXIT_OK, _balance(arguments)
    from counterflow.launch.compose import (
        compose_config,
        compose_recorded,
        expand_sweep,
        find_choices,
        to_yaml,
    )

    assert arguments.command is not None
    if arguments.print_config:
        mapping = compose_recorded(arguments.overrides, arguments.config_dir).mapping
        print(to_yaml(mapping), end="")
        return EXIT_OK, mapping
    if not arguments.multirun:
        recorded = compose_recorded(arguments.overrides, arguments.config_dir)
        with _hiding(recorded):
            config = recorded.config()
            result = _dispatch(arguments, config, arguments.out, argv, recorded)
        return _code_of(result), result
    combinations = expand_sweep(arguments.overrides, find_choices(arguments.config_dir))
    # All of them first: a mistake in the last combination must not show after hours of the others.
    configs = [compose_config(overrides, arguments.config_dir) for overrides in combinations]
    for config in configs:
        _check(arguments.command, config)
    return _run_all(arguments, combinations, configs)


def _run_all(
    arguments: Arguments, combinations: Sequence[Sequence[str]], configs: Sequence[TrainConfig]
) -> tuple[int, list[dict[str, Any]]]:
    """One run after another; one that fails does not keep the next from running, a signal does."""
    from counterflow.framework.errors import RunFailedError
    from counterflow.launch.compose import compose_recorded

    results: list[dict[str, Any]] = []
    code = EXIT_OK
    for number, (overrides, config) in enumerate(zip(combinations, configs, strict=True)):
        print(f"[{number + 1}/{len(configs)}] {' '.join(overrides)}", file=sys.stderr, flush=True)
        out = arguments.out / str(number) if arguments.out is not None else None
        recorded = compose_recorded(overrides, arguments.config_dir)
        try:
            with _hiding(recorded):
                result = _dispatch(arguments, config, out, [str(arguments.command), *overrides], recorded)
        except RunFailedError as error:
            message = redacted(str(error), recorded.values)
            print(f"error: {message}", file=sys.stderr, flush=True)
            code, result = EXIT_FAILED, {"error": message, "exit_code": EXIT_FAILED}
        code = max(code, _code_of(result))
        results.append({"overrides": list(overrides), **(result or {})})
    _print_table(str(arguments.command), results)
    return code, results


def _code_of(result: dict[str, Any] | None) -> int:
    """A parity that does not hold is a failure."""
    return EXIT_FAILED if result is not None and result.get("holds") is False else EXIT_OK


def _check(command: str, config: TrainConfig) -> None:
    from counterflow.framework.checks.rules import build_schedule, check

    if command == "simulate":
        build_schedule(config.schedule, config.parallel)
    elif command != "plan":
        check(config)


def _dispatch(
    arguments: Arguments, config: TrainConfig, out: Path | None, argv: Sequence[str], recorded: Recorded
) -> dict[str, Any] | None:
    """Run the command; what `--json` prints, or None where another rank prints it."""
    if arguments.command == "simulate":
        return _simulate(config, out)
    if arguments.command == "plan":
        return _plan(config, arguments)
    from counterflow.launch.commands.train import LaunchOptions

    options = LaunchOptions(
        out=out,
        json_output=arguments.json_output,
        command=("counterflow", *map(_quoted, argv)),
        config_values=recorded.mapping,
    )
    if arguments.command == "train":
        from counterflow.launch.commands.train import run

        return run(config, options)
    if arguments.command == "parity":
        from counterflow.launch.commands.parity import print_result, run
    elif arguments.command == "profile":
        from counterflow.launch.commands.profile import print_result, run
    else:
        from counterflow.launch.commands.memory import print_result, run
    result = run(config, options)
    print_result(result)
    return result


def _simulate(config: TrainConfig, out: Path | None) -> dict[str, Any]:
    from rich.console import Console

    from counterflow.framework.config.mapping import config_hash
    from counterflow.launch.commands.simulate import run

    name = f"{config.schedule.name}-p{config.parallel.pipeline_parallel_size}-m{config.schedule.num_microbatches}"
    # The same schedule and costs give the same pictures, so they have one folder.
    folder = Path(config.launcher.runs_dir) / f"simulate-{name}-{config_hash(config.schedule)[:8]}"
    return run(config, out or folder, console=Console())


def _plan(config: TrainConfig, arguments: Arguments) -> dict[str, Any]:
    if not arguments.model_only:
        raise UsageError("plan: layouts are not searched yet, only the model is counted; add --model-only")
    from rich.console import Console

    from counterflow.launch.commands.plan import run

    # A sweep ends in one table of all.
    return run(config, console=Console(quiet=arguments.multirun))


def _timeline(arguments: Arguments) -> dict[str, Any]:
    if len(arguments.overrides) != 1:
        raise UsageError(
            f"timeline takes the folder of one run, not {len(arguments.overrides)} words, as in "
            "counterflow timeline runs/20260131-120000-1a2b3c4d"
        )
    from rich.console import Console

    from counterflow.launch.commands.timeline import run

    return run(Path(arguments.overrides[0]), arguments.step, console=Console())


def _balance(arguments: Arguments) -> dict[str, Any]:
    if not arguments.overrides or "=" in arguments.overrides[0]:
        raise UsageError(
            "balance takes the folder of a run first, as in counterflow balance runs/20260131-120000-1a2b3c4d"
        )
    from rich.console import Console

    from counterflow.launch.commands.balance import plan_from, run

    run_dir = Path(arguments.overrides[0])
    return run(run_dir, plan_from(arguments.overrides[1:]), arguments.out or run_dir, console=Console())


def _bench(arguments: Arguments) -> dict[str, Any]:
    from rich.console import Console

    from counterflow.launch.bench.run import run

    return run(arguments.overrides, arguments.out, console=Console())


@contextlib.contextmanager
def _hiding(recorded: Recorded) -> Iterator[None]:
    """An error from within is told without what the config took from the environment."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(AttributeError):
            error.interpolations = recorded.values  # type: ignore[attr-defined]
        raise


def _explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the one message for `error`."""
    if isinstance(error, SystemExit):
        return int(error.code or 0) if not isinstance(error.code, str) else EXIT_FAILED, ""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped by Ctrl-C"
    if isinstance(error, UsageError):
        return EXIT_USAGE, f"{error}\n`counterflow --help` shows how the command line is put together"
    if isinstance(error, BrokenPipeError):
        return EXIT_OK, ""
    from counterflow.framework.errors import RunFailedError, RunInterruptedError

    if isinstance(error, RunInterruptedError):
        return 128 + error.signal_number, str(error)
    if isinstance(error, RunFailedError):
        return EXIT_FAILED, str(error)
    if isinstance(error, ValueError):
        return EXIT_USAGE, str(error)
    if isinstance(error, ImportError):
        return (
            EXIT_FAILED,
            f"{error}; is the installation whole? `pip install counterflow` installs what it needs",
        )
    return EXIT_FAILED, f"{type(error).__name__}: {error}; --traceback shows where it came from"


def _print_traceback(error: BaseException) -> None:
    import traceback

    details = getattr(error, "details", None)
    if details:
        print(details, end="", file=sys.stderr)
    else:
        traceback.print_exception(error)


@contextlib.contextmanager
def _json_channel(*, active: bool) -> Iterator[Any]:
    """Yields what writes the result. With `active`, stdout is stderr inside, for ranks and libraries too."""
    if not active:
        yield lambda _result: None
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)

    def emit(result: Any) -> None:
        line = json.dumps(_finite(result), allow_nan=False) + "\n"
        os.write(kept, line.encode())

    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield emit
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]  # type: ignore[misc]
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}  # type: ignore[misc]
    return value


def _print_table(command: str, results: Sequence[dict[str, Any]]) -> None:
    """One line a run: the overrides that vary, and what the command says of itself."""
    from rich.console import Console
    from rich.table import Table

    common = (
        set[str].intersection(*(set(result["overrides"]) for result in results)) if results else set[str]()
    )
    varying = [" ".join(text for text in result["overrides"] if text not in common) for result in results]
    table = Table(title=f"{len(results)} runs", title_justify="left")
    columns = COMMANDS[command].columns
    table.add_column("overrides", overflow="fold", no_wrap=max(map(len, varying), default=0) <= 36)
    for column in columns:
        # In words, so that a narrow terminal breaks a heading between them.
        table.add_column(column.replace("_", " ").replace(".", " "), justify="right")
    for result, overrides in zip(results, varying, strict=True):
        cells = [result.get("error", "")] if "error" in result else [_cell(result, name) for name in columns]
        table.add_row(overrides or "(none)", *cells)
    Console().print(table)


def _cell(result: dict[str, Any], dotted: str) -> str:
    value: Any = result
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None  # type: ignore[misc]
    if isinstance(value, list):
        value = max(value, default=None)  # type: ignore[type-var]
    if isinstance(value, (int, float)) and abs(value) >= 1e9:
        return f"{value / 1e9:,.2f}e9"
    if isinstance(value, float) and abs(value) < 1e4:
        return f"{value:.4g}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,.0f}"
    return "" if value is None else str(value)  # type: ignore[arg-type]


def _near(word: str, known: Sequence[str] | dict[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _quoted(word: str) -> str:
    import shlex

    return shlex.quote(word)


_EXAMPLES = {
    "--out": "--out results/first",
    "--cfg": "--cfg job",
    "--config-dir": "--config-dir my_conf",
    "--step": "--step 100",
}


if __name__ == "__main__":
    sys.exit(main())
