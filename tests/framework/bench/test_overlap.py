"""The overlap bench: its figures by hand, and a small run of it."""

from __future__ import annotations

from typing import cast

import pytest
import torch.distributed as dist

from counterflow.framework.bench import overlap
from counterflow.framework.bench.config import OverlapBenchConfig
from counterflow.framework.bench.overlap import (
    NODES_PER_TOKEN,
    NUM_RANKS,
    WIDTH,
    PacedPoint,
    Row,
    Timing,
    Workload,
    measure_overlap,
    sleeping_workload,
    steady_state,
)
from counterflow.parallel.collectives import ByteMeter
from counterflow.parallel.pipeline.ir.action import Action
from counterflow.parallel.pipeline.ir.trace import Activity, Interval, Trace
from tests.rank_pool import RankPool


def timing(step_s: float, exposed: float, steady: float, compute: float = 6.0) -> Timing:
    return Timing(
        step_s=step_s,
        exposed_s=exposed,
        steady_exposed_s=steady,
        steady_compute_s=compute,
        num_handovers=0,
    )


def test_the_figures_of_a_row_are_those_of_pairs_of_steps() -> None:
    row = Row(
        schedule="dualpipe",
        num_stages=2,
        num_microbatches=8,
        compute="sleeping",
        with_overlap=(timing(2.0, 1.0, 0.2), timing(4.0, 1.0, 0.4), timing(2.5, 3.0, 0.1)),
        without=(timing(3.0, 4.0, 2.0), timing(4.0, 4.0, 2.0), timing(3.5, 6.0, 4.0)),
        traces_with=(),
        traces_without=(),
    )
    assert row.alltoall_share == pytest.approx(2 / 8)
    assert row.hidden_shares == pytest.approx([0.9, 0.8, 0.975])
    assert row.hidden_share == pytest.approx(0.9)
    assert row.hidden_share_of_step == pytest.approx(0.75)
    assert row.speedup == pytest.approx(1.4)
    assert row.speedup_of_minima == pytest.approx(1.5)


def test_a_sleeping_layer_has_the_share_that_was_asked_for() -> None:
    """Four transfers of a layer beside its six phases, at 10 MB/s and 10 ms a phase."""
    workload = sleeping_workload(0.01, 0.4, 1e7)
    transfer_s = workload.tokens * NODES_PER_TOKEN * WIDTH * 4 / 1e7
    assert 4 * transfer_s / (4 * transfer_s + 6 * 0.01) == pytest.approx(0.4, abs=0.01)


def test_the_steady_state_is_from_the_first_pair_to_the_last() -> None:
    actions = [
        Action.parse(each) for each in ("0F0", "(0F1;1B5)OVERLAP_F_B", "1B6", "(1F7;0B0)OVERLAP_F_B", "0B1")
    ]

    def interval(activity: Activity, stage: int, microbatch: int, start: float) -> Interval:
        return Interval(activity, stage, microbatch, start, start + 1)

    together = Trace(
        intervals=(
            interval(Activity.FORWARD, 0, 0, 0),
            interval(Activity.BACKWARD, 1, 5, 2),
            interval(Activity.FORWARD, 0, 1, 3),
            interval(Activity.BACKWARD, 1, 5, 4),
            interval(Activity.BACKWARD, 1, 6, 5),
            interval(Activity.BACKWARD, 0, 0, 7),
            interval(Activity.FORWARD, 1, 7, 8),
            interval(Activity.BACKWARD, 0, 1, 9),
        )
    )
    assert steady_state(together, actions) == (2, 9)
    apart = Trace(
        intervals=(
            interval(Activity.FORWARD, 0, 0, 0),
            interval(Activity.FORWARD, 0, 1, 1),
            interval(Activity.INPUT_GRADIENT, 1, 5, 2),
            interval(Activity.WEIGHT_GRADIENT, 1, 5, 3),
            interval(Activity.FORWARD, 1, 7, 4),
            interval(Activity.INPUT_GRADIENT, 0, 0, 5),
            interval(Activity.WEIGHT_GRADIENT, 0, 0, 6),
            interval(Activity.BACKWARD, 0, 1, 7),
        )
    )
    assert steady_state(apart, actions) == (1, 7)


class Clock:
    """Time that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Kept:
    """A point that keeps works to be waited for later, in any order."""

    def __init__(self) -> None:
        self.works: list[dist.Work] = []

    def wait(self, work: dist.Work | None) -> None:
        assert work is not None
        self.works.append(work)

    def wait_here(self, work: dist.Work | None) -> None:
        raise AssertionError


class Done:
    def wait(self) -> None: ...


def test_an_injected_wait_lets_bytes_through_one_transfer_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, meter, kept = Clock(), ByteMeter(), Kept()
    monkeypatch.setattr(overlap, "time", clock)
    point = PacedPoint(kept, meter, bytes_per_s=100.0)
    for num_bytes in (50, 200):
        meter.add("expert", num_bytes)
        point.wait(cast(dist.Work, Done()))
    clock.now = 0.25  # computed meanwhile
    kept.works[0].wait()
    assert clock.now == pytest.approx(0.5)
    kept.works[1].wait()
    assert clock.now == pytest.approx(2.5)
    clock.now = 10.0
    meter.add("expert", 100)
    point.wait(cast(dist.Work, Done()))
    kept.works[2].wait()
    assert clock.now == pytest.approx(11.0)


def small_run(schedule: str, workload: Workload) -> list[Row]:
    return measure_overlap([schedule], 4, 1, workload, injected_bytes_per_s=1e8)


@pytest.mark.parametrize(
    ("schedule", "workload"),
    [
        ("dualpipe", Workload(phase_s=0.001, tokens=8)),
        ("interleaved_1f1b", Workload(phase_s=0.001, tokens=8)),
        ("dualpipe", Workload(phase_s=0.0, tokens=64)),
    ],
    ids=str,
)
def test_a_small_run_measures_both_ways(ranks: RankPool, schedule: str, workload: Workload) -> None:
    for (row,) in ranks.run(small_run, NUM_RANKS, schedule, workload):
        (together,), (apart,) = row.with_overlap, row.without
        assert together.num_handovers > 0
        assert apart.num_handovers == 0
        assert apart.steady_exposed_s > 0
        assert 0 < row.alltoall_share < 1
        assert apart.exposed_s >= apart.steady_exposed_s
        assert len(row.traces_with) == len(row.traces_without) == NUM_RANKS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedules": ("zbv",)}, "no pairs to overlap; choose from dualpipe"),
        ({"schedules": ()}, "nothing to measure"),
        ({"num_microbatches": 5}, "an even number, at least 4"),
        ({"alltoall_share": 1.0}, "between 0 and 1"),
        ({"mbit_per_s": 0.0}, "must be above 0"),
        ({"tokens": 100}, "a multiple of 64"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OverlapBenchConfig(**values)  # type: ignore[arg-type]
