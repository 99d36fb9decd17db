"""What commands and benches print with: lines, tables, readable sizes, pictures. rich is imported when it is used."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table


def say(line: str) -> None:
    """A line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` where something known looks like `word`."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def print_lines(console: Console, *lines: str) -> None:
    """As they are: no colours, no markup, and a line breaks where the terminal breaks it."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_paths(console: Console, paths: Iterable[tuple[str | Path, str]]) -> None:
    """A line for each file: where it is, and what."""
    print_lines(console, *(f"{path}  ({what})" for path, what in paths))


def values_of(row: Any, *names: str) -> dict[str, Any]:
    """These attributes of a row by their names, tuples as lists."""
    values = {name: getattr(row, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}  # type: ignore[misc]


def new_table(
    title: str,
    columns: Iterable[str] = (),
    *,
    left: Collection[str] = (),
    no_wrap: bool = False,
    **settings: Any,
) -> Table:
    """A table whose columns stand at the right but for those in `left`; settings: of rich."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", **settings)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=no_wrap)
    return table


def readable_bytes(count: float) -> str:
    """As `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes any count")


def pyplot() -> Any:
    """matplotlib's, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_picture(figure: Any, path: Path, *, dpi: int = 150) -> Path:
    """Write a matplotlib `figure` to `path`, PNG, and beside it as SVG, and let go of it; `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    figure.savefig(path.with_suffix(".svg"))
    pyplot().close(figure)
    return path
