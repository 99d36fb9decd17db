"""Fits bounded constants of a device to the tables that are named as calibrated, and to nothing else.

Two are fitted for A100: `gemm`, the share of the peak that a large product reaches, to PTD-P's Table 1, and
`host_s`, what the host takes to launch a kernel, to vTrain's rows of two devices. The others are shares of
datasheets' figures as they are usually measured: 0.8 of links, 0.85 of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from counterflow.framework.planning.kernels import Efficiencies
from counterflow.framework.planning.tables.table import PublishedTable, Row, reproduce

BOUNDS = {"gemm": (0.3, 0.95), "host_s": (5e-6, 60e-6)}
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fitted efficiencies, and the rows they were fitted to, which show what is left of their errors."""

    share: Efficiencies
    mean_error: float
    rows: tuple[Row, ...]


def fit(name: str, tables: Sequence[PublishedTable], start: Efficiencies) -> Fit:
    """The constant `name` within its BOUNDS with the least mean absolute error over `tables`, the others as in
    `start`.
    """

    def rows_at(value: float) -> tuple[Row, ...]:
        share = replace(start, **{name: value})
        return tuple(row for table in tables for row in reproduce(table, share).rows if row.counts)

    def error(value: float) -> float:
        rows = rows_at(value)
        return sum(abs(row.error) for row in rows) / len(rows)

    low, high = BOUNDS[name]
    best = float(f"{golden_section(error, low, high, tolerance=1e-3 * (high - low)):.3g}")
    return Fit(share=replace(start, **{name: best}), mean_error=error(best), rows=rows_at(best))


def golden_section(of: Callable[[float], float], low: float, high: float, *, tolerance: float) -> float:
    """Where `of`, which falls and then rises between the bounds, is the least."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = of(left), of(right)
    while high - low > tolerance:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = of(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = of(right)
    return (low + high) / 2
