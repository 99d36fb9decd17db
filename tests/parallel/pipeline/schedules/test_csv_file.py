"""Schedules by name: generated, searched for, read from a file; and every way in which a file may be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.parallel.pipeline.analysis.cost_profile import save_profile
from counterflow.parallel.pipeline.analysis.costs import costs_from
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.simulate import simulate
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.config import CostsConfig, ScheduleConfig
from counterflow.parallel.pipeline.ir.action import COMPUTE
from counterflow.parallel.pipeline.ir.text import to_csv
from counterflow.parallel.pipeline.schedules.csv_file import read_csv
from counterflow.parallel.pipeline.schedules.registry import generate, schedule_from
from tests.parallel.pipeline.analysis.test_costs import PROFILE
from tests.parallel.pipeline.ir.test_text import torch_runtime


def test_a_generated_one() -> None:
    config = ScheduleConfig(name="interleaved_1f1b", num_microbatches=8, num_chunks=3)
    assert schedule_from(config, 4).schedule == generate("interleaved_1f1b", 4, 8, num_chunks=3)
    with pytest.raises(
        ValueError, match=r"schedule.name=1f2b: no such schedule; choose one of 1f1b, auto, csv"
    ):
        schedule_from(ScheduleConfig(name="1f2b"), 4)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "zbv"])
@pytest.mark.parametrize("executable", [False, True])
def test_a_file_of_either_form(name: str, executable: bool, tmp_path: Path) -> None:
    schedule = generate(name, 4, 8)
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(lower(schedule, zero_stage=3) if executable else schedule, compute_only=False))
    source = schedule_from(ScheduleConfig(name="csv", path=str(path)), 4)
    assert source.schedule.placement == schedule.placement
    assert all(action.kind in COMPUTE for actions in source.schedule.actions for action in actions)
    assert ("left out and added anew" in source.note) is executable
    if not executable:
        assert source.schedule.actions == schedule.actions
    assert verify(lower(source.schedule, zero_stage=2)).executable


def test_a_file_that_torch_wrote(tmp_path: Path) -> None:
    schedule = generate("interleaved_1f1b", 2, 4)
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text(to_csv(schedule, compute_only=True))
    runtime = torch_runtime(schedule)
    runtime._load_csv(str(ours))
    runtime._dump_csv(str(theirs), format="compute_comms")
    assert "SEND_F" in theirs.read_text()
    assert read_csv(str(theirs), 2, 4).schedule.actions == schedule.actions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"mine.csv, line 2, action 2: '1X0' is not a pipeline action"),
        ("0F0,0B0,\n1B0,1F0\n", r"mine.csv, line 1, action 2: .* rank 1 at 1B0 waits for 1F0 of rank 1"),
        (
            "0F0,0B0,0F0\n1F0,1B0\n",
            r"mine.csv, line 1, action 3: the activation of stage 0 .* is computed twice",
        ),
        ("0F0,0B0\n1F0\n", r"mine.csv: .*never computed on rank 1"),
        ("0B0\n1B0\n", "mine.csv: the schedule has no forward"),
        ("0F0,0B0\n", "parallel.pipeline_parallel_size=2: .*mine.csv has 1 rows, one per rank; set .*=1"),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
            "schedule.num_microbatches=1: .*mine.csv has 2 micro-batches; set schedule.num_microbatches=2",
        ),
    ],
)
def test_a_wrong_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_csv(str(path), 2, 1)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schedule.path=null: schedule=csv reads a file"):
        read_csv(None, 2, 1)
    with pytest.raises(ValueError, match=r"none.csv: cannot be read \(No such file"):
        read_csv(str(tmp_path / "none.csv"), 2, 1)
    with pytest.raises(ValueError, match=r"is for schedule=csv, and schedule.name=1f1b"):
        ScheduleConfig(name="1f1b", path="x.csv")
    with pytest.raises(ValueError, match="is for schedule=auto"):
        ScheduleConfig(name="gpipe", memory_limit_activations=3)
    with pytest.raises(ValueError, match="one micro-batch at least"):
        ScheduleConfig(name="auto", memory_limit_activations=0)


def test_auto_takes_the_placement_that_the_costs_are_of(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    profile = CostsConfig(profile=str(path))
    line = schedule_from(ScheduleConfig(name="auto", costs=profile), 4)
    assert line.schedule.num_stages == 4
    assert line.note.startswith("auto: makespan ")
    # Of two stages a rank: one stage a rank is searched too, and the better is taken.
    both = [
        schedule_from(ScheduleConfig(name="auto", num_chunks=chunks, costs=profile), 2).schedule
        for chunks in (None, 1, 2)
    ]
    makespans = [simulate(schedule, costs_from(profile, schedule.num_stages)).makespan for schedule in both]
    assert makespans[0] == min(makespans[1:])
    assert [schedule.num_stages for schedule in both[1:]] == [2, 4]
    listed = CostsConfig(forward=(1.0, 2.0, 3.0, 4.0))
    assert schedule_from(ScheduleConfig(name="auto", costs=listed), 2).schedule.placement == ((0, 1, 1, 0),)
    with pytest.raises(ValueError, match=r"schedule.num_chunks=3: auto places one stage"):
        schedule_from(ScheduleConfig(name="auto", num_chunks=3), 2)
