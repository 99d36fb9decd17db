"""The `counterflow` command: `counterflow COMMAND [options] [overrides]`.

Dispatches what `launch/arguments.py` has parsed, and turns every error into one message and an exit code. It imports
nothing heavy, so that help and mistakes on the command line answer at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from counterflow.launch.arguments import Arguments, command_help, parse, program_help
from counterflow.launch.command import LaunchOptions, UsageError
from counterflow.launch.commands.table import COMMANDS

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


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
            from counterflow.framework.redaction import redacted

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
        print(command_help(arguments.command, arguments.words), end="")
        return EXIT_OK
    return None


def _run(arguments: Arguments, argv: Sequence[str]) -> tuple[int, Any]:
    import shlex

    assert arguments.command is not None
    command = COMMANDS[arguments.command]
    options = LaunchOptions(
        out=arguments.out,
        json_output=arguments.json,
        command=("counterflow", *map(shlex.quote, argv)),
        own=arguments.own,
        in_sweep=arguments.multirun,
    )
    if command.read is not None:
        return EXIT_OK, command.run(command.read(arguments.words), options)
    from counterflow.launch.sweep import print_config, run_all, run_one

    if arguments.cfg:
        return EXIT_OK, print_config(arguments.words, arguments.config_dir)
    run = run_all if arguments.multirun else run_one
    holds, result = run(command, options, arguments.words, arguments.config_dir)
    return EXIT_OK if holds else EXIT_FAILED, result


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
    import json

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


if __name__ == "__main__":
    sys.exit(main())
