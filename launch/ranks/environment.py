"""Who started this process: nobody, or torchrun, Slurm or another that started ranks beside it.

Pure functions of the environment's variables. What is half said or does not fit is named, never guessed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from counterflow.framework.errors import ConfigError

_ENOUGH = "a joined rank needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
_LOCAL = "or unset {} to start local ranks"
# MPI says who is who, but not where the ranks meet.
_MPI = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
# Steps that Slurm numbers from the end are no srun: a batch script, an interactive shell, a container of the job.
_LAST_SRUN_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRank:
    """One rank among others that somebody else started.

    ranks_on_node: how many of them share this node's devices; None: not known. size_name: the variable that says
    `world_size`.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_on_node: int | None
    master_addr: str
    master_port: int
    size_name: str = "WORLD_SIZE"

    @property
    def is_on_loopback(self) -> bool:
        """Whether all ranks are on this machine, for no other reaches the address at which they meet."""
        return self.master_addr in ("localhost", "::1") or self.master_addr.startswith("127.")

    @property
    def meeting(self) -> str:
        """Where the ranks meet, as this one was told."""
        return f"MASTER_ADDR={self.master_addr} and MASTER_PORT={self.master_port}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment that torch's `env://` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def joined_rank(environment: Mapping[str, str]) -> JoinedRank | None:
    """The rank that this environment describes; None: no other process was started beside this one.

    Raises ConfigError: for variables that are missing, malformed or contradict each other, each by name.
    """
    found = {name: value for name, value in environment.items() if value.strip()}
    if any(name in found for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _of_torchrun(found)
    if (task := _of_slurm(found)) is not None:
        return task
    for size, rank in _MPI.items():
        if rank in found and found.get(size, "1") != "1" and "SLURM_STEP_ID" not in found:
            raise ConfigError(
                [
                    f"{size}={found[size]}: MPI has started this process {found[size]} times, and does not say where "
                    f"they meet; set RANK=${rank}, WORLD_SIZE=${size}, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in a "
                    "wrapper, or start it with torchrun or srun"
                ]
            )
    return None


def check_single_start(environment: Mapping[str, str]) -> None:
    """Refuse to start local ranks in each of several processes.

    Raises ConfigError: where this process is one of several.
    """
    joined = joined_rank(environment)
    if joined is not None and joined.world_size > 1:
        raise ConfigError(
            [
                f"{joined.size_name}={joined.world_size} in the environment: only `train` joins ranks that somebody "
                f"else started, and this is one of {joined.world_size} copies of a command that starts its own; start "
                "it once, without torchrun or srun"
            ]
        )


def restart_problem(environment: Mapping[str, str], *, resume: str | None, earlier: str | None) -> str | None:
    """Why a second round of a job is not begun, or None: this is the first.

    resume: the value of checkpoint.resume. earlier: the folder of the first round's run, where it is known.
    """
    folder = earlier or "runs/RUN"
    resumed = f"start the job anew with checkpoint.resume={folder}" + (
        "" if earlier else " (the folder that the first round named)"
    )
    if (count := environment.get("TORCHELASTIC_RESTART_COUNT", "0").strip()) not in ("", "0"):
        return (
            f"TORCHELASTIC_RESTART_COUNT={count}: torchrun has restarted these ranks, and a restarted job does not go "
            f"on by itself: it would begin at step 0 in a new folder; {resumed}, and torchrun --max-restarts=0"
        )
    count = environment.get("SLURM_RESTART_COUNT", "0").strip()
    if count not in ("", "0") and resume is None:
        return (
            f"SLURM_RESTART_COUNT={count}: Slurm has queued this job again, and it would begin at step 0 in a new "
            f"folder; {resumed}, or unset SLURM_RESTART_COUNT to begin anew on purpose"
        )
    return None


def socket_environment() -> Mapping[str, str]:
    """What a local rank's environment holds, whatever the user's says, so that its collectives stay on this machine."""
    interface = "lo" if sys.platform == "linux" else "lo0"
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def cuda_environment(environment: Mapping[str, str], *, deterministic: bool = False) -> Mapping[str, str]:
    """What a rank on a GPU needs besides, before CUDA is started there; what the user has set stays.

    Kernels are loaded at the start, since one that is loaded at its first use may wait for a receive that is posted.
    Memory comes in segments that grow, so that seldom any has to be freed, which waits as well. deterministic: cuBLAS
    gives the same result every time only with a workspace of a fixed size, and torch refuses it without.
    """
    workspace = {("CUBLAS_WORKSPACE_CONFIG",): ":4096:8"} if deterministic else {}
    return _unset(
        environment,
        {
            **workspace,
            ("CUDA_MODULE_LOADING",): "EAGER",
            ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
        },
    )


def flight_recorder_environment(environment: Mapping[str, str], run_dir: Path) -> Mapping[str, str]:
    """Lets torch record the last operations of every NCCL group, and write them to `run_dir` where one waits too long.

    The files are nccl-<rank>, read by `python -m torch.distributed.flight_recorder.fr_trace`. What the user has set
    stays.
    """
    return _unset(
        environment,
        {
            ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
            ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(run_dir / "nccl-"),
            ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        },
    )


def _unset(environment: Mapping[str, str], wanted: Mapping[tuple[str, ...], str]) -> dict[str, str]:
    """`wanted` by the first of its names, without what stands in `environment` under any of them."""
    return {
        names[0]: value for names, value in wanted.items() if not any(name in environment for name in names)
    }


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form: `gpu[03-05,9],login` is gpu03.

    Raises ValueError: where there is none.
    """
    match = re.match(r"(?:[^,\[\]\s]|\[[0-9,\-]+\])+", nodelist)
    if match is None:
        raise ValueError(f"no host in {nodelist!r}")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match.group())


def tasks_of_node(tasks_per_node: str, node: int) -> int | None:
    """The tasks of the node with this index in Slurm's short form: `4(x2),3` is 4, 4, 3; None: not said."""
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        repeated = int(match[2] or 1)
        if node < repeated:
            return int(match[1])
        node -= repeated
    return None


def _of_torchrun(found: Mapping[str, str]) -> JoinedRank:
    problems: list[str] = []
    said = next(name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in found)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in found]
    if missing:
        problems.append(
            f"{said}={found[said]} in the environment without {' and '.join(missing)}: {_ENOUGH}; set "
            f"{'them' if len(missing) > 1 else 'it'} too (torchrun does), {_LOCAL.format(said)}"
        )
    numbers = {
        name: _number(found, name, problems)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    }
    rank, world_size, local_rank = numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]
    ranks_on_node, port = numbers["LOCAL_WORLD_SIZE"], numbers["MASTER_PORT"]
    if world_size == 0:
        problems.append("WORLD_SIZE=0 in the environment: a job has a rank; set it to the number of ranks")
    elif rank is not None and world_size is not None and rank >= world_size:
        problems.append(
            f"RANK={rank} in the environment: WORLD_SIZE={world_size}, so ranks are 0 to {world_size - 1}; give each "
            "process one of them"
        )
    if local_rank is not None:
        for name, size in (("LOCAL_WORLD_SIZE", ranks_on_node), ("WORLD_SIZE", world_size)):
            if size is not None and local_rank >= size > 0:
                problems.append(
                    f"LOCAL_RANK={local_rank} in the environment: {name}={size}, so it is 0 to {size - 1}; number the "
                    "processes of each node from 0"
                )
                break
    if ranks_on_node is not None and world_size and not 1 <= ranks_on_node <= world_size:
        problems.append(
            f"LOCAL_WORLD_SIZE={ranks_on_node} in the environment: a node has from 1 to WORLD_SIZE={world_size} ranks; "
            "set it to the processes of this node, or unset it"
        )
    problems += _port_problems(port)
    if problems:
        raise ConfigError(problems)
    assert rank is not None
    assert world_size is not None
    assert port is not None
    return JoinedRank(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank or 0,
        ranks_on_node=ranks_on_node,
        master_addr=found["MASTER_ADDR"].strip(),
        master_port=port,
    )


def _of_slurm(found: Mapping[str, str]) -> JoinedRank | None:
    """The rank of a task of `srun`; None: of none, or of one with a single task."""
    if "SLURM_PROCID" not in found:
        return None
    problems: list[str] = []
    step_id = found.get("SLURM_STEP_ID", "").strip()
    step = int(step_id) if re.fullmatch(r"[0-9]+", step_id) else None
    if step_id and (step is None or step >= _LAST_SRUN_STEP):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in found else "SLURM_NTASKS"
    world_size = _number(found, size_name, problems)
    rank = _number(found, "SLURM_PROCID", problems)
    if problems:
        raise ConfigError(problems)
    assert rank is not None
    if world_size is None or world_size == 1:
        if rank == 0:
            return None
        raise ConfigError(
            [
                f"SLURM_PROCID={rank} in the environment with {size_name}={world_size or ''}: a task among others, "
                "whose number is not said; start it with srun, or unset SLURM_PROCID to start local ranks"
            ]
        )
    if step is None and rank == 0 and size_name == "SLURM_NTASKS":
        # A batch script looks like the first of its tasks: joining would wait for the others, which nobody starts.
        raise ConfigError(
            [
                f"SLURM_NTASKS={world_size} and SLURM_PROCID=0 in the environment without SLURM_STEP_ID: a batch "
                "script is one process, and the tasks are started by srun; start this command with srun to join "
                "them, or with `env -u SLURM_PROCID` to start local ranks"
            ]
        )
    if rank >= world_size:
        raise ConfigError(
            [
                f"SLURM_PROCID={rank} in the environment: {size_name}={world_size}, so tasks are 0 to "
                f"{world_size - 1}; start the command with srun"
            ]
        )
    local_rank = _number(found, "SLURM_LOCALID", problems)
    node = _number(found, "SLURM_NODEID", problems)
    address = found.get("MASTER_ADDR", "").strip() or _slurm_address(found, problems)
    port = _number(found, "MASTER_PORT", problems)
    if "SLURM_LOCALID" not in found:
        problems.append(
            f"SLURM_PROCID={rank} in the environment without SLURM_LOCALID, which says the task's place on its node; "
            "start the command with srun"
        )
    if "MASTER_PORT" not in found:
        job = _number(found, "SLURM_JOB_ID", problems)
        # Below the ports that systems give out by themselves, and another for each step.
        port = 10000 + ((job or 0) * 16 + (step or 0)) % 20000
    problems += _port_problems(port)
    if problems:
        raise ConfigError(problems)
    assert local_rank is not None
    assert port is not None
    tasks = found.get("SLURM_STEP_TASKS_PER_NODE", found.get("SLURM_TASKS_PER_NODE", ""))
    return JoinedRank(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        ranks_on_node=None if node is None else tasks_of_node(tasks, node),
        master_addr=address,
        master_port=port,
        size_name=size_name,
    )


def _slurm_address(found: Mapping[str, str], problems: list[str]) -> str:
    """The host of task 0, which is on the first node of the step."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = next((name for name in names if name in found), None)
    if name is None:
        problems.append(
            "SLURM_PROCID in the environment without SLURM_STEP_NODELIST: the host of task 0 is not known; set "
            "MASTER_ADDR to it"
        )
        return ""
    try:
        return first_host(found[name])
    except ValueError:
        problems.append(
            f"{name}={found[name]!r}: no host can be read from it; set MASTER_ADDR to that of task 0"
        )
        return ""


def _number(found: Mapping[str, str], name: str, problems: list[str]) -> int | None:
    if name not in found:
        return None
    text = found[name].strip()
    if re.fullmatch(r"[0-9]+", text):
        return int(text)
    problems.append(
        f"{name}={text} in the environment: must be a whole number from 0; set it so, {_LOCAL.format(name)}"
    )
    return None


def _port_problems(port: int | None) -> list[str]:
    if port is None or 1 <= port <= 65535:
        return []
    return [
        f"MASTER_PORT={port} in the environment: a port is from 1 to 65535; set it to a free one of rank 0's host"
    ]
