"""`counterflow simulate` as a function: its numbers, its files, its table, its refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from launch.simulate import run
from parallel.mesh import MeshConfig
from parallel.pipeline.config import CostsConfig, ScheduleConfig
from parallel.pipeline.text import from_csv
from parallel.pipeline.verify import verify


def test_golden_run(tmp_path: Path) -> None:
    text = io.StringIO()
    result = run(
        ScheduleConfig(name="dualpipe", num_microbatches=20, costs=CostsConfig(pair=3.0)),
        MeshConfig(pipeline_parallel_size=8, tensor_parallel_size=2),
        tmp_path / "new" / "folder",
        console=Console(file=text, width=100),
    )
    assert json.loads(json.dumps(result)) == result
    assert (result["makespan"], result["idle"], result["peak_activations"]) == (66, [6] * 8, [9] * 8)
    assert result["bubble_makespan"] == pytest.approx(6 / 66)
    assert result["bubble_span"] == pytest.approx(6 / 66)
    assert result["bubble_formula"] == pytest.approx(6 / 66)
    assert (result["schedule"], result["num_stages"], result["num_microbatches"]) == ("dualpipe", 8, 20)
    assert Path(result["svg"]).read_text().startswith("<svg")
    assert Path(result["png"]).read_bytes().startswith(b"\x89PNG")
    assert not verify(from_csv(Path(result["csv"]).read_text())).executable
    assert verify(from_csv(Path(result["executable_csv"]).read_text())).executable
    for shown in ("makespan          66", "(PP/2-1)(F&B+B-3W) = 6 idle per rank", "rank", "peak activations"):
        assert shown in text.getvalue()


def test_one_rank_is_the_same_path(tmp_path: Path) -> None:
    result = run(
        ScheduleConfig(name="1f1b", num_microbatches=4),
        MeshConfig(),
        tmp_path,
        console=Console(file=io.StringIO()),
    )
    assert (result["makespan"], result["idle"], result["bubble_makespan"]) == (12, [0], 0)


def test_an_impossible_size_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel\.pipeline_parallel_size=3"):
        run(
            ScheduleConfig(name="dualpipe", num_microbatches=20),
            MeshConfig(pipeline_parallel_size=3),
            tmp_path,
            console=Console(file=io.StringIO()),
        )
    assert list(tmp_path.iterdir()) == []
