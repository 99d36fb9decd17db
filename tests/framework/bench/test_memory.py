"""The memory bench: bytes against what is foretold; its times are not asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.framework.bench.config import MemoryBenchConfig
from counterflow.framework.bench.memory import (
    NONE,
    UNLIMITED,
    Row,
    base_config,
    cases_of,
    measure_memory,
    step_ratio,
)
from counterflow.framework.data.prepare import PreparedData
from tests.rank_pool import RankPool


def measured(bench: MemoryBenchConfig, folder: Path, data: PreparedData) -> tuple[list[Row], float]:
    cases = cases_of(bench, base_config(bench, folder), folder)
    return measure_memory(bench, cases, data, lambda row: None)


def test_bytes_are_what_is_foretold(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    bench = MemoryBenchConfig(num_microbatches=6, budgets=(0.5,), hidden_size=32, tokens=128, repeats=2)
    rows, rate = ranks.run(measured, 2, bench, tmp_path, tiny_data)[0]
    assert rate > 0
    by_name = {row.name: row for row in rows}
    assert list(by_name) == [NONE, "selective (attention)", "full", UNLIMITED, "lru, 50%", "schedule, 50%"]
    none = by_name[NONE]
    for row in rows:
        assert len(row.step_s) == len(row.stall_s) == 2
        # Of a forward whose copies are still under way when another begins, timing decides what is there at once.
        assert row.prediction_error < (0.05 if row.budget_bytes is None else 0.5), row.name
        if row.budget_bytes is not None:
            assert row.budget_bytes == pytest.approx(max(none.simulated_peak_bytes) / 2, abs=1)
            assert max(row.peak_bytes) <= 1.01 * row.budget_bytes
            assert row.moved_bytes > 0
    assert by_name[UNLIMITED].peak_bytes == none.peak_bytes
    assert max(by_name["full"].peak_bytes) < max(none.peak_bytes)
    assert step_ratio(none, none) == 1.0
