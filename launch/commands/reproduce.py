"""Runs the rows of published tables through the step-time model and prints predicted beside published.

Each table is a record of its source, hardware and layouts. Constants were fitted to the tables that say so and to no
other; no prediction reads a published figure. Starts no rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from counterflow.launch.command import Command, Help, LaunchOptions, Option, UsageError
from counterflow.launch.printing import new_table, print_lines

if TYPE_CHECKING:
    from rich.console import Console

    from counterflow.framework.planning.tables.table import Reproduced

_HELP = Help(
    argument="table=ID|all",
    about=__doc__ or "",
    examples="""
        counterflow reproduce table=ptdp_table1  PTD-P's weak scaling on A100, 1.7B to 1T
        counterflow reproduce table=zb_table4 --json  ratios of zero-bubble schedules to 1F1B
        counterflow reproduce table=all  every table, a line for each at the end""",
    output="""
        Nothing is written. --json: tables [{table, title, source, num_rows, calibrated, mean_error,
        median_error, max_error, quantities, rows [{label, quantity, published, predicted, error}]}].""",
)


def read(words: Sequence[str]) -> str:
    """The id of the table."""
    if len(words) != 1 or not words[0].startswith("table="):
        raise UsageError(
            f"reproduce takes table=ID or table=all, not {' '.join(words) or 'nothing'}, as in counterflow reproduce "
            "table=ptdp_table1"
        )
    return words[0].removeprefix("table=")


def run(table: str, options: LaunchOptions) -> dict[str, Any]:
    """Every row of the table, printed. Returns what `--json` prints."""
    from rich.console import Console

    from counterflow.framework.planning.tables.registry import tables_named
    from counterflow.framework.planning.tables.table import reproduce

    as_markdown = bool(options.own["markdown"])
    console = Console(quiet=as_markdown)
    done: list[Reproduced] = []
    for each in tables_named(table):
        done.append(reproduce(each))
        _print_rows(console, done[-1])
    if len(done) > 1:
        _print_summary(console, done)
    if as_markdown:
        from datetime import date

        from counterflow.framework.planning.tables.markdown import markdown

        print(markdown(done, date.today().isoformat()), end="")
    return {"tables": [as_record(each) for each in done]}


def as_record(done: Reproduced) -> dict[str, Any]:
    """What `--json` has of a table."""
    return {
        "table": done.table.id,
        "title": done.table.title,
        "source": done.table.source,
        "num_rows": len(done.rows),
        "calibrated": done.table.calibrated,
        "mean_error": done.mean_error,
        "median_error": done.median_error,
        "max_error": done.max_error,
        "quantities": {
            name: {"mean_error": mean, "max_error": largest}
            for name, (mean, largest) in done.by_quantity().items()
        },
        "rows": [
            {
                "label": row.label,
                "quantity": row.quantity,
                "unit": row.unit,
                "published": row.published,
                "predicted": row.predicted,
                "error": row.error,
                "counts": row.counts,
                "note": row.note,
            }
            for row in done.rows
        ],
    }


def _print_rows(console: Console, done: Reproduced) -> None:
    about = done.table
    table = new_table(
        about.title,
        ("row", "figure", "published", "predicted", "error", "note"),
        left=("row", "figure", "note"),
    )
    for row in done.rows:
        table.add_row(
            row.label,
            row.quantity,
            f"{row.published:.4g} {row.unit}".rstrip(),
            f"{row.predicted:.4g} {row.unit}".rstrip(),
            f"{row.error:+.1%}",
            row.note if row.counts else f"apart: {row.note}",
        )
    console.print(table)
    print_lines(
        console,
        f"source      {about.source}; {about.hardware}",
        f"figures     {about.definition}",
        f"constants   {'were fitted to these rows' if about.calibrated else 'were not fitted to these rows'}",
        f"errors      mean {done.mean_error:.1%}, median {done.median_error:.1%}, largest {done.max_error:.1%}",
        *(f"note        {note}" for note in about.notes),
    )


def _print_summary(console: Console, done: Sequence[Reproduced]) -> None:
    table = new_table(
        "published tables",
        ("table", "rows", "fitted", "mean error", "median", "largest"),
        left=("table",),
    )
    for each in done:
        table.add_row(
            each.table.id,
            str(len(each.rows)),
            "yes" if each.table.calibrated else "no",
            f"{each.mean_error:.1%}",
            f"{each.median_error:.1%}",
            f"{each.max_error:.1%}",
        )
    console.print(table)


COMMAND = Command(
    name="reproduce",
    summary="run published tables through the step-time model, predicted beside published",
    help=_HELP,
    read=read,
    run=run,
    options=(Option("--markdown", "reproduce: print the tables as Markdown, as docs/tables.md has them"),),
    takes_out=False,
)
