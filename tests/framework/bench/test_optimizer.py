"""The bench of the optimizer step: its theory, and that it runs the modes it names."""

from __future__ import annotations

import pytest

from counterflow.framework.bench.config import OptimizerBenchConfig
from counterflow.framework.bench.optimizer import Mode, OptimizerRow, measure_optimizer
from tests.rank_pool import RankPool


def test_every_mode_runs(ranks: RankPool) -> None:
    """ZB-H2 is a parallelogram: 3 x 8 actions on each of 4 ranks, and 3 more from the first rank to the last."""
    rows: list[OptimizerRow] = ranks.run(measure_optimizer, 4, ("zb_h2", "dualpipe"), 4, 8, 0.001, 3, 1)[0]
    zb_h2, dualpipe = rows
    assert zb_h2.theory_span_s == pytest.approx(0.024)
    assert zb_h2.theory_makespan_s == pytest.approx(0.027)
    for row in (zb_h2, dualpipe):
        assert {mode: len(times) for mode, times in row.step_s.items()} == dict.fromkeys(Mode, 1)
        # 24 actions sleep a millisecond or more each.
        assert all(row.median_s(mode) > 0.024 for mode in Mode)
        assert row.ratio(Mode.WAITS) == 1


def test_a_row_of_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="num_steps=1: must be at least 2"):
        OptimizerBenchConfig(num_steps=1)
