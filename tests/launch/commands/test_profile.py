"""`counterflow profile` as a command, and its file as the input of simulate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from counterflow.launch.cli import main
from counterflow.parallel.pipeline.analysis.cost_profile import load_profile

_LAYOUT = [
    "parallel.pipeline_parallel_size=2",
    "parallel.tensor_parallel_size=1",
    "parallel.data_parallel_size=1",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.vocab_size=4096",
    "data.seq_length=16",
]


def result_of(capfd: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["--json", *argv, *_LAYOUT]) == 0
    return json.loads(capfd.readouterr().out.splitlines()[-1])


def test_profile_then_simulate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    result = result_of(capfd, "profile", "schedule=zbv", "--out", str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.json"]
    assert result["num_stages"] == len(result["stages"]) == 4
    assert load_profile(path).num_stages == 4
    assert 0.5 < result["inflation"] < 3
    use = f"schedule.costs.profile={path}"
    simulated = [
        result_of(capfd, "simulate", f"schedule={name}", use, "--out", str(tmp_path / name))
        for name in ("auto", "zbv", "1f1b", "zb1p")
    ]
    assert simulated[0]["makespan"] <= min(other["makespan"] for other in simulated[1:])
    assert simulated[0]["makespan"] < 10  # seconds


def test_the_default_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = result_of(capfd, "profile", "schedule=1f1b", f"launcher.runs_dir={tmp_path / 'runs'}")
    (path,) = (tmp_path / "runs").iterdir()
    assert path.name.startswith("profile-s2-")
    assert result["path"] == str(path)
