"""Commands that take the config of a run: composed once for its use and for its record, run once or in a sweep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import RunFailedError
from counterflow.framework.redaction import redacted
from counterflow.launch.command import Command, LaunchOptions
from counterflow.launch.compose import (
    Recorded,
    compose_config,
    compose_recorded,
    expand_sweep,
    find_choices,
    to_yaml,
)
from counterflow.launch.printing import new_table, say


def print_config(overrides: Sequence[str], config_dir: Path | None) -> dict[str, Any]:
    """The composed config, printed as YAML."""
    mapping = compose_recorded(overrides, config_dir).mapping
    print(to_yaml(mapping), end="")
    return dict(mapping)


def run_one(
    command: Command, options: LaunchOptions, overrides: Sequence[str], config_dir: Path | None
) -> tuple[bool, dict[str, Any] | None]:
    """Whether the result holds, and the result of one run."""
    recorded = compose_recorded(overrides, config_dir)
    with _hiding(recorded):
        result = _run(command, recorded.config(), recorded, options)
    return _holds(result), result


def run_all(
    command: Command, options: LaunchOptions, overrides: Sequence[str], config_dir: Path | None
) -> tuple[bool, list[dict[str, Any]]]:
    """The same of every combination, one after another, and a table: one run that fails does not keep the next from
    running, a signal does.
    """
    combinations = expand_sweep(overrides, find_choices(config_dir))
    # All of them first: a mistake in the last combination must not show after hours of the others.
    configs = [compose_config(words, config_dir) for words in combinations]
    for config in configs:
        command.check(config)
    results: list[dict[str, Any]] = []
    all_hold = True
    for number, (words, config) in enumerate(zip(combinations, configs, strict=True)):
        say(f"[{number + 1}/{len(configs)}] {' '.join(words)}")
        recorded = compose_recorded(words, config_dir)
        of_run = options._replace(
            out=options.out / str(number) if options.out is not None else None,
            command=("counterflow", command.name, *words),
        )
        try:
            with _hiding(recorded):
                result = _run(command, config, recorded, of_run)
        except RunFailedError as error:
            message = redacted(str(error), recorded.values)
            say(f"error: {message}")
            all_hold, result = False, {"error": message, "exit_code": 1}
        all_hold = all_hold and _holds(result)
        results.append({"overrides": list(words), **(result or {})})
    _print_table(command, results)
    return all_hold, results


def _run(
    command: Command, config: TrainConfig, recorded: Recorded, options: LaunchOptions
) -> dict[str, Any] | None:
    result = command.run(config, options._replace(config_values=recorded.mapping))
    if command.print_result is not None and result is not None:
        command.print_result(result)
    return result


def _holds(result: dict[str, Any] | None) -> bool:
    """A parity that does not hold is a failure."""
    return result is None or result.get("holds") is not False


@contextlib.contextmanager
def _hiding(recorded: Recorded) -> Iterator[None]:
    """An error from within is told without what the config took from the environment."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(AttributeError):
            error.interpolations = recorded.values  # type: ignore[attr-defined]
        raise


def _print_table(command: Command, results: Sequence[dict[str, Any]]) -> None:
    """One line a run: the overrides that vary, and what the command says of itself."""
    from rich.console import Console

    common = (
        set[str].intersection(*(set(result["overrides"]) for result in results)) if results else set[str]()
    )
    varying = [" ".join(text for text in result["overrides"] if text not in common) for result in results]
    table = new_table(f"{len(results)} runs")
    table.add_column("overrides", overflow="fold", no_wrap=max(map(len, varying), default=0) <= 36)
    for column in command.columns:
        # In words, so that a narrow terminal breaks a heading between them.
        table.add_column(column.replace("_", " ").replace(".", " "), justify="right")
    for result, overrides in zip(results, varying, strict=True):
        cells = (
            [result.get("error", "")]
            if "error" in result
            else [_cell(result, name) for name in command.columns]
        )
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
