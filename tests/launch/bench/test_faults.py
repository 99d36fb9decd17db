"""The faults bench: runs that are really killed, and end as if they had not been."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from counterflow.framework.bench.config import FaultBenchConfig
from counterflow.launch.bench.faults import faults_of, measure


def test_each_kind_of_fault_comes_as_often_as_the_others() -> None:
    faults = faults_of(FaultBenchConfig(trials=100))
    kinds = [(each.victim, each.moment, each.restarts_itself) for each in faults]
    assert {kinds.count(kind) for kind in kinds} == {20}
    assert faults == faults_of(FaultBenchConfig(trials=100))
    assert faults != faults_of(FaultBenchConfig(trials=100, seed=1))


@pytest.mark.parametrize("trials", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_runs_end_as_the_undisturbed_one_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = measure(FaultBenchConfig(trials=trials, num_steps=6), tmp_path, Console(quiet=True))
    assert found["trials"] == found["bitwise_equal"] == trials
    assert found["partial_taken"] == found["left_behind"] == 0, found["left"]
