"""CSV both ways, with torch.distributed.pipelining as the other reader, writer and simulator; and the grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from torch.distributed.pipelining.schedules import (
    _Action,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
)

from counterflow.parallel.pipeline.analysis.passes import add_communication, lower
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import COMPUTE, Schedule
from counterflow.parallel.pipeline.ir.dependencies import ScheduleError
from counterflow.parallel.pipeline.ir.text import from_csv, grid, to_csv
from counterflow.parallel.pipeline.schedules.registry import generate
from tests.parallel.pipeline.schedules.test_registry import fitting_sizes
from tests.parallel.pipeline.test_mutation import receives_at_the_last_moment


@given(sizes=fitting_sizes())
@settings(max_examples=40, deadline=None)
def test_round_trip(sizes: tuple[str, int, int]) -> None:
    schedule = generate(*sizes)
    lowered = lower(schedule, zero_stage=3)
    assert from_csv(to_csv(schedule, compute_only=True), name=sizes[0]) == schedule
    assert from_csv(to_csv(lowered, compute_only=False), name=sizes[0]) == lowered
    only_compute = from_csv(to_csv(lowered, compute_only=True), schedule.placement)
    assert all(action.kind in COMPUTE for actions in only_compute.actions for action in actions)


def torch_runtime(schedule: Schedule) -> Any:
    """torch's runtime without its stages, which need a process group: enough to read and lower a schedule."""
    runtime: Any = _PipelineScheduleRuntime.__new__(_PipelineScheduleRuntime)
    runtime.pipeline_order = {}
    runtime.pp_group_size = schedule.num_ranks
    runtime._num_stages = schedule.num_stages
    runtime._n_microbatches = schedule.num_microbatches
    runtime._stages = []
    runtime._defer_pp_recv = False
    return runtime


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "dualpipe"])
def test_torch_reads_every_action(name: str) -> None:
    for actions in lower(generate(name, 4, 8), zero_stage=3).actions:
        for action in actions:
            theirs = _Action.from_str(str(action))
            assert theirs is not None
            assert str(theirs) == str(action)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_torch_loads_the_files(name: str, tmp_path: Path) -> None:
    """Two copies of a stage are beyond torch's reader, which has one rank per stage."""
    schedule = generate(name, 4, 8)
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(schedule, compute_only=True))
    runtime = torch_runtime(schedule)
    runtime._load_csv(str(path))
    assert runtime.stage_index_to_group_rank == {0: 0, 1: 1, 2: 2, 3: 3}

    lowered = lower(schedule, zero_stage=3)
    path.write_text(to_csv(lowered, compute_only=False))
    runtime._load_csv(str(path), format="compute_comms")
    for rank, actions in enumerate(lowered.actions):
        assert list(map(str, runtime.pipeline_order_with_comms[rank])) == list(map(str, actions))


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_torchs_simulator_runs_what_we_lower(name: str) -> None:
    """There a receive waits for its message, here it is posted ahead: so it takes them at the last moment."""
    lowered = add_communication(generate(name, 4, 8))
    lists = [list(map(str, receives_at_the_last_moment(lowered, rank))) for rank in range(4)]
    assert [sorted(actions) for actions in lists] == [
        sorted(map(str, actions)) for actions in lowered.actions
    ]
    order = {rank: [_Action.from_str(action) for action in actions] for rank, actions in enumerate(lists)}
    steps = _simulate_comms_compute(order, lambda stage: stage, lowered.num_stages)
    for rank, actions in enumerate(lists):
        assert [str(action) for action in steps[rank] if action is not None] == actions


def test_what_torch_lowers_is_verified_here(tmp_path: Path) -> None:
    schedule = generate("1f1b", 4, 8)
    source, target = tmp_path / "compute.csv", tmp_path / "comms.csv"
    source.write_text(to_csv(schedule, compute_only=True))
    runtime = torch_runtime(schedule)
    runtime._load_csv(str(source))
    runtime._dump_csv(str(target), format="compute_comms")
    theirs = from_csv(target.read_text())
    report = verify(theirs)
    assert report.executable
    assert report.peak_activations == (4, 3, 2, 1)


def test_empty_cells_are_waiting_time() -> None:
    schedule = from_csv("0F0,,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,,\n")
    assert schedule.placement == ((0, 1),)
    assert (schedule.num_stages, schedule.num_microbatches) == (2, 2)
    verify(schedule)


def test_a_placement_of_several_stages_per_rank() -> None:
    assert from_csv("0F0,2F0,2B0,0B0\n1F0,1B0\n").placement == ((0, 1, 0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 2 of the schedule: '1X0' is not a pipeline action"),
        ("0F0,0B\n", "B needs a micro-batch"),
        ("0B0\n", "no forward"),
        ("0F0,0B0\n2F0,2B0\n", "no rank runs the forward of stage 1"),
        ("0F0,0F2,0B0,0B2\n0F1,0F3,0B1,0B3\n", "forwards are on several ranks"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


def test_grid() -> None:
    schedule = generate("1f1b", 2, 2)
    assert grid(schedule, mark=(1, 2)).splitlines() == [
        "        rank 0  rank 1",
        "step 0  0F0     1F0",
        "step 1  0F1     1B0",
        "step 2  0B0     >1F1",
        "step 3  0B1     1B1",
    ]
    cut = grid(generate("1f1b", 32, 64), mark=(30, 90), max_steps=4, max_ranks=3).splitlines()
    assert cut[0].split() == ["rank", "29", "rank", "30", "rank", "31"]
    assert cut[-1] == "(steps 88..91 of 128, ranks 29..31 of 32)"
    assert ">" in cut[3]
