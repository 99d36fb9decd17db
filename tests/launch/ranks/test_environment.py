"""Who started a process, read from injected environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.framework.errors import ConfigError
from counterflow.launch.ranks.environment import (
    check_single_start,
    cuda_environment,
    first_host,
    flight_recorder_environment,
    joined_rank,
    restart_problem,
    tasks_of_node,
)

_TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
# Two nodes of three and two tasks, as srun sets them for the last task.
_SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
}


def _problems(environment: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        joined_rank(environment)
    return str(caught.value)


def test_nobody_started_ranks_beside_this_one() -> None:
    assert joined_rank({}) is None
    assert joined_rank({"MASTER_ADDR": "head", "MASTER_PORT": "29500", "RANK": ""}) is None
    one_task = {**_SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert joined_rank(one_task) is None
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "4294967291"}
    assert joined_rank(batch_script) is None


def test_the_ranks_of_torchrun_are_joined() -> None:
    joined = joined_rank(_TORCHRUN)
    assert joined is not None
    assert (joined.rank, joined.world_size, joined.local_rank, joined.ranks_on_node) == (5, 8, 1, 4)
    assert joined.variables == {name: _TORCHRUN[name] for name in joined.variables}
    assert not joined.is_on_loopback
    # One container for each rank says no place on a node.
    alone = joined_rank(
        {name: _TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    )
    assert alone is not None
    assert (alone.local_rank, alone.ranks_on_node) == (0, None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"WORLD_SIZE": None}, "RANK=5 in the environment without WORLD_SIZE"),
        ({"RANK": None}, "WORLD_SIZE=8 in the environment without RANK"),
        ({"RANK": None, "WORLD_SIZE": ""}, "LOCAL_RANK=1 in the environment without RANK and WORLD_SIZE"),
        ({"MASTER_PORT": None}, "RANK=5 in the environment without MASTER_PORT"),
        ({"MASTER_ADDR": " "}, "RANK=5 in the environment without MASTER_ADDR"),
        ({"RANK": "five"}, "RANK=five in the environment: must be a whole number from 0"),
        ({"RANK": "-1"}, "RANK=-1 in the environment: must be a whole number"),
        ({"WORLD_SIZE": "8.0"}, "WORLD_SIZE=8.0 in the environment: must be a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment: a job has a rank"),
        ({"RANK": "8"}, "RANK=8 in the environment: WORLD_SIZE=8, so ranks are 0 to 7"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 in the environment: LOCAL_WORLD_SIZE=4, so it is 0 to 3"),
        ({"LOCAL_RANK": "9", "LOCAL_WORLD_SIZE": None}, "LOCAL_RANK=9 in the environment: WORLD_SIZE=8"),
        (
            {"LOCAL_WORLD_SIZE": "9"},
            "LOCAL_WORLD_SIZE=9 in the environment: a node has from 1 to WORLD_SIZE=8",
        ),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http in the environment: must be a whole number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 in the environment: a port is from 1 to 65535"),
    ],
)
def test_what_is_half_said_or_malformed_is_named(changed: dict[str, str | None], said: str) -> None:
    environment = {name: value for name, value in {**_TORCHRUN, **changed}.items() if value is not None}
    assert said in _problems(environment)


def test_the_tasks_of_srun_are_joined() -> None:
    joined = joined_rank(_SRUN)
    assert joined is not None
    assert (joined.rank, joined.world_size, joined.local_rank, joined.ranks_on_node) == (4, 5, 1, 2)
    assert joined.master_addr == "gpu07"
    first = joined_rank({**_SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first is not None
    assert (first.master_addr, first.master_port) == (joined.master_addr, joined.master_port)
    assert first.ranks_on_node == 3
    another_step = joined_rank({**_SRUN, "SLURM_STEP_ID": "3"})
    assert another_step is not None
    assert another_step.master_port != joined.master_port
    said = joined_rank({**_SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert said is not None
    assert (said.master_addr, said.master_port) == ("head", 1234)
    # A launcher that srun starts has its own word.
    assert joined_rank({**_SRUN, **_TORCHRUN}) == joined_rank(_TORCHRUN)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_STEP_ID": None, "SLURM_STEP_NUM_TASKS": None, "SLURM_PROCID": "0"}, "without SLURM_STEP_ID"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID=x in the environment: must be a whole number"),
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID=5 in the environment: SLURM_STEP_NUM_TASKS=5"),
        ({"SLURM_LOCALID": None}, "without SLURM_LOCALID"),
        ({"SLURM_STEP_NODELIST": "]["}, "SLURM_STEP_NODELIST=']['"),
        ({"SLURM_STEP_NODELIST": None}, "set MASTER_ADDR"),
        ({"SLURM_NTASKS": None, "SLURM_STEP_NUM_TASKS": None}, "whose number is not said"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
    ],
)
def test_tasks_of_slurm_that_cannot_be_joined_are_refused(changed: dict[str, str | None], said: str) -> None:
    environment = {name: value for name, value in {**_SRUN, **changed}.items() if value is not None}
    assert said in _problems(environment)


@pytest.mark.parametrize(
    ("size", "rank"), [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")]
)
def test_copies_that_mpi_started_are_refused(size: str, rank: str) -> None:
    assert f"{size}=4: MPI has started this process 4 times" in _problems({size: "4", rank: "0"})
    assert joined_rank({size: "1", rank: "0"}) is None


@pytest.mark.parametrize("environment", [_TORCHRUN, _SRUN])
def test_a_command_that_starts_its_own_ranks_is_started_once(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="only `train` joins ranks"):
        check_single_start(environment)
    check_single_start({})
    check_single_start(
        {**_TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    )


# As `scontrol show hostnames` expands them.
@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[12,3]", "gpu12"),
        ("r[1-2]n[01-04]", "r1n01"),
        ("a-b[7].cluster.org,c", "a-b7.cluster.org"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_tasks_of_each_node() -> None:
    assert [tasks_of_node("4(x2),3", node) for node in range(4)] == [4, 4, 3, None]
    assert tasks_of_node("", 0) is None


def test_a_second_round_is_refused_with_the_way_on() -> None:
    assert restart_problem({}, resume=None, earlier=None) is None
    assert restart_problem({"TORCHELASTIC_RESTART_COUNT": "0"}, resume=None, earlier=None) is None
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    problem = restart_problem(again, resume="runs/old", earlier="runs/a")
    assert problem is not None
    assert "TORCHELASTIC_RESTART_COUNT=1" in problem
    assert "checkpoint.resume=runs/a" in problem
    queued = {"SLURM_RESTART_COUNT": "2"}
    problem = restart_problem(queued, resume=None, earlier=None)
    assert problem is not None
    assert "SLURM_RESTART_COUNT=2" in problem
    assert restart_problem(queued, resume="runs/a", earlier=None) is None


def test_a_rank_on_a_gpu_gets_what_the_user_has_not_set() -> None:
    assert cuda_environment({}) == {
        "CUDA_MODULE_LOADING": "EAGER",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    mine = {"CUDA_MODULE_LOADING": "LAZY", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    assert cuda_environment(mine) == {}, "under its old name too"
    assert cuda_environment(mine, deterministic=True) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_the_last_operations_of_a_group_are_written_into_the_runs_folder() -> None:
    found = flight_recorder_environment({}, Path("/runs/7"))
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == "/runs/7/nccl-"
    assert int(found["TORCH_FR_BUFFER_SIZE"]) > 0
    assert found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    mine = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/mine"}
    assert flight_recorder_environment(mine, Path("/runs/7")) == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
