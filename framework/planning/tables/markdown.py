"""docs/tables.md: the errors of every table, and each table's rows, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from counterflow.framework.planning.tables.table import Reproduced

_HEAD = """# Published tables

Predicted beside published, by `counterflow reproduce table=all --markdown` on {date}. Step times come from the
executed schedule, simulated with the times of stages; nothing predicted is read from a published figure. *Fitted*
says whether a constant was fitted to a table. Two were, both of A100: the share of the peak that a large product
reaches, to PTD-P's Table 1, and what the host takes to launch a kernel, to vTrain's rows of two devices. Errors are
of absolute values, over rows that count.

```console
counterflow reproduce table=ptdp_table1
```
"""


def markdown(done: Sequence[Reproduced], date: str) -> str:
    """The whole page."""
    lines = [_HEAD.format(date=date)]
    lines += ["| table | figure | rows | fitted | mean error | largest |", "|---|---|---:|---|---:|---:|"]
    for each in done:
        for quantity, (mean, largest) in each.by_quantity().items():
            count = sum(row.counts and row.quantity == quantity for row in each.rows)
            fitted = "yes" if each.table.calibrated else "no"
            lines.append(
                f"| [{each.table.id}](#{each.table.id}) | {quantity} | {count} | {fitted} | "
                f"{mean:.1%} | {largest:.1%} |"
            )
    for each in done:
        lines += _section(each)
    return "\n".join(lines) + "\n"


def _section(done: Reproduced) -> list[str]:
    about = done.table
    lines = ["", f"## {about.id}", "", f"{about.title}. {about.hardware}. Figures: {about.definition}."]
    lines += [f"Source: {about.source}.", *about.notes, ""]
    lines += ["| row | figure | published | predicted | error |", "|---|---|---:|---:|---:|"]
    rows = done.rows
    if len(rows) > MOST_ROWS:
        rows = tuple(sorted(rows, key=lambda row: -abs(row.error))[:MOST_ROWS])
        lines.insert(-2, f"The {MOST_ROWS} rows with the largest errors, of {len(done.rows)}.")
        lines.insert(-2, "")
    for row in rows:
        unit = f" {row.unit}" if row.unit else ""
        apart = "" if row.counts else f" (apart: {row.note})"
        lines.append(
            f"| {row.label} | {row.quantity}{apart} | {row.published:.4g}{unit} | {row.predicted:.4g}{unit} | "
            f"{row.error:+.1%} |"
        )
    return lines


# Rows of a table that are listed.
MOST_ROWS = 60
