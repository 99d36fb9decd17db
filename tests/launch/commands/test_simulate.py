"""`counterflow simulate` as a function: its numbers, its files, its table, its refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.planning.costs import message_bytes
from counterflow.launch.commands.simulate import simulate_to
from counterflow.launch.printing import readable_bytes
from counterflow.launch.simulation import MAX_DRAWN
from counterflow.parallel.mesh import MeshConfig
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.config import CostsConfig, ScheduleConfig
from counterflow.parallel.pipeline.ir.text import from_csv


def test_golden_run(tmp_path: Path) -> None:
    text = io.StringIO()
    result = simulate_to(
        tmp_path / "new" / "folder",
        TrainConfig(
            schedule=ScheduleConfig(name="dualpipe", num_microbatches=20, costs=CostsConfig(pair=3.0)),
            parallel=MeshConfig(pipeline_parallel_size=8, tensor_parallel_size=2),
        ),
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
    result = simulate_to(
        tmp_path,
        TrainConfig(schedule=ScheduleConfig(name="1f1b", num_microbatches=4)),
        console=Console(file=io.StringIO()),
    )
    assert (result["makespan"], result["idle"], result["bubble_makespan"]) == (12, [0], 0)


def test_an_impossible_size_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel\.pipeline_parallel_size=3"):
        simulate_to(
            tmp_path,
            TrainConfig(
                schedule=ScheduleConfig(name="dualpipe", num_microbatches=20),
                parallel=MeshConfig(pipeline_parallel_size=3),
            ),
            console=Console(file=io.StringIO()),
        )
    assert list(tmp_path.iterdir()) == []


def test_volume(tmp_path: Path) -> None:
    """The tiny model's messages over four stages: 128 numbers x 128 tokens x 2 samples x 4 bytes, halved by tp=2."""
    text = io.StringIO()
    config = TrainConfig(
        schedule=ScheduleConfig(name="1f1b", num_microbatches=6),
        parallel=MeshConfig(pipeline_parallel_size=4, data_parallel_size=2, tensor_parallel_size=2),
    )
    volume = simulate_to(tmp_path, config, console=Console(file=text, width=120))["volume"]
    size = 128 * 128 * 2 * 4 // 2
    assert message_bytes(config) == size
    assert volume["forward_bytes"] == volume["backward_bytes"] == 3 * 6 * size
    assert volume["by_axis"]["pipeline"] == 2 * 3 * 6 * size
    assert volume["total_bytes"] == sum(volume["by_axis"].values())
    assert volume["by_axis"]["data"] == sum(volume["unshard_bytes"]) + sum(volume["reduce_bytes"]) > 0
    assert [(link["source"], link["target"]) for link in volume["links"]][:3] == [(0, 1), (1, 0), (1, 2)]
    for shown in ("0 -> 1", readable_bytes(6 * size), "bytes, pipeline", "bytes, data"):
        assert shown in text.getvalue()


def test_given_sizes_come_before_the_models(tmp_path: Path) -> None:
    costs = CostsConfig(message_bytes=(5.0,), bandwidth_bytes_per_s=10.0)
    config = TrainConfig(
        schedule=ScheduleConfig(name="gpipe", num_microbatches=2, costs=costs),
        parallel=MeshConfig(pipeline_parallel_size=2),
    )
    result = simulate_to(tmp_path, config, console=Console(file=io.StringIO()))
    assert result["volume"]["forward_bytes"] == 10
    assert (
        result["makespan"] == 2 + 0.5 + 1 + 4 + 0.5 + 2
    )  # rank 1: F at 1.5 and 2.5, B at 3.5 and 5.5; rank 0: +.5


def test_a_large_schedule_is_proven_but_not_drawn(tmp_path: Path) -> None:
    text = io.StringIO()
    config = TrainConfig(
        schedule=ScheduleConfig(name="1f1b", num_microbatches=700),
        parallel=MeshConfig(pipeline_parallel_size=32, data_parallel_size=2),
    )
    assert MAX_DRAWN < 2 * 32 * 700
    result = simulate_to(tmp_path, config, console=Console(file=text, width=200))
    assert result["svg"] is result["png"] is result["executable_csv"] is None
    assert result["bubble_makespan"] == pytest.approx(31 / 731)
    assert f"above {MAX_DRAWN}" in result["notes"][0]
    assert "note: 44800 actions" in text.getvalue()
    assert "not counted: the schedule has 44800 actions, above the 40000 to which" in text.getvalue()


def test_a_searched_schedule(tmp_path: Path) -> None:
    costs = CostsConfig(forward=(1.0, 2.0, 1.0))
    config = TrainConfig(
        schedule=ScheduleConfig(name="auto", num_microbatches=6, costs=costs),
        parallel=MeshConfig(pipeline_parallel_size=3),
    )
    result = simulate_to(tmp_path, config, console=Console(file=io.StringIO()))
    assert result["schedule"] == "auto"
    assert result["notes"][0].startswith(f"auto: makespan {result['makespan']:g}")
    assert max(result["peak_activations"]) <= 3


def test_it_is_said_why_bytes_are_not_counted(tmp_path: Path) -> None:
    config = TrainConfig(
        schedule=ScheduleConfig(name="1f1b", num_microbatches=8),
        parallel=MeshConfig(pipeline_parallel_size=8, data_parallel_size=2),
    )
    (note,) = simulate_to(tmp_path, config, console=Console(file=io.StringIO()))["notes"]
    assert note.startswith("bytes on the data axis are not counted: the model does not divide into")
    assert "model.num_layers=4 gives from 1 to 6" in note
