"""`counterflow bench overlap`: its refusals, its picture, a run from the command line's side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from counterflow.framework.bench import network
from counterflow.framework.bench.overlap import Row, Timing
from counterflow.launch.bench.overlap import draw
from counterflow.launch.commands.bench import measure, read
from counterflow.parallel.pipeline.ir.trace import Activity, Interval, Trace


def test_namespaces_that_cannot_be_made_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(network, "why_not", lambda: "network namespaces need root")
    with pytest.raises(ValueError, match="need root; set network=injected"):
        measure(*read(["overlap", "network=namespaces"]), tmp_path, console=Console(quiet=True))


def test_the_picture_has_both_steps(tmp_path: Path) -> None:
    trace = Trace(
        step_s=3.0,
        intervals=(
            Interval(Activity.FORWARD, 0, 0, 0.0, 1.0),
            Interval(Activity.EXPERT_WAIT, 0, 0, 1.0, 2.0),
            Interval(Activity.BACKWARD, 1, 1, 2.0, 3.0),
        ),
    )
    timing = Timing(step_s=3.0, exposed_s=1.0, steady_exposed_s=1.0, steady_compute_s=2.0, num_handovers=1)
    row = Row(
        schedule="dualpipe",
        num_stages=2,
        num_microbatches=4,
        compute="sleeping",
        with_overlap=(timing,),
        without=(timing,),
        traces_with=(trace,) * 4,
        traces_without=(trace,) * 4,
    )
    path = draw(row, tmp_path / "overlap.png", "a network")
    assert path.stat().st_size > 10_000
    svg = path.with_suffix(".svg").read_text()
    assert "#e58f84" in svg.lower()  # the colour of an exposed wait


@pytest.mark.slow
def test_a_run_writes_rows_and_picture(tmp_path: Path) -> None:
    words = ["overlap", "phase_ms=2", "num_microbatches=4", "repeats=1", "network=injected"]
    result = measure(*read(words), tmp_path, console=Console(quiet=True))
    assert result["network"].startswith("injected: tokens wait 20.0 ns a byte")
    (row,) = result["rows"]
    assert row["schedule"] == "dualpipe"
    assert 0 < row["alltoall_share"] < 1
    assert row["num_handovers"] > 0
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["step_s"] == row["step_s"]
    assert (tmp_path / "overlap_dualpipe_sleeping.svg").exists()
    assert not list(tmp_path.glob("store-*"))
