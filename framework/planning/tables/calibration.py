"""Fits one bounded constant of a device to the tables that are named as calibrated, and nothing else.

`gemm`, the share of the peak that a large product reaches, is the only constant that is fitted. The others are
shares of datasheets' figures as they are usually measured: 0.8 of links, 0.85 of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from counterflow.framework.planning.kernels import Efficiencies
from counterflow.framework.planning.tables.table import PublishedTable, Row, reproduce

BOUNDS = (0.3, 0.95)
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fitted efficiencies, and the rows they were fitted to, which show what is left of their errors."""

    share: Efficiencies
    mean_error: float
    rows: tuple[Row, ...]


def fit_gemm(tables: Sequence[PublishedTable], start: Efficiencies) -> Fit:
    """The `gemm` within BOUNDS with the least mean absolute error over `tables`, three digits of it."""

    def rows_at(value: float) -> tuple[Row, ...]:
        share = replace(start, gemm=value)
        return tuple(row for table in tables for row in reproduce(table, share).rows if row.counts)

    def error(value: float) -> float:
        rows = rows_at(value)
        return sum(abs(row.error) for row in rows) / len(rows)

    best = round(golden_section(error, *BOUNDS, tolerance=5e-4), 3)
    return Fit(share=replace(start, gemm=best), mean_error=error(best), rows=rows_at(best))


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
