"""What would keep a run from starting on this host: found, and told at once, before the first rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from counterflow.framework.checkpoint.manifest import has_checkpoint_name, newest
from counterflow.framework.config.mapping import config_hash
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.devices import device_problems
from counterflow.framework.errors import ConfigError
from counterflow.framework.metrics.sinks import check_logger
from counterflow.launch.command import A_RUN
from counterflow.launch.ranks.environment import JoinedRank, restart_problem
from counterflow.launch.ranks.rounds import agent_of, earlier_round, round_problem
from counterflow.launch.runs import short_path
from counterflow.parallel.scratch_file import ScratchFile


def refuse_restart(config: TrainConfig, out: Path | None, joined: JoinedRank | None) -> None:
    """A job goes on from a checkpoint only where it is told to.

    Raises ConfigError: in the second round of a job that torchrun or Slurm has restarted.
    """
    if restart_problem(os.environ, resume=config.checkpoint.resume, earlier=None) is None:
        if joined is not None and joined.rank == 0:
            refuse_later_round(config, out, [agent_of(os.environ)])
        return
    if joined is not None and joined.rank:
        sys.exit(2)  # rank 0 tells
    earlier = _earlier_run(config, out)
    problem = restart_problem(os.environ, resume=config.checkpoint.resume, earlier=earlier)
    assert problem is not None
    raise ConfigError([problem])


def refuse_later_round(
    config: TrainConfig, out: Path | None, agents: Sequence[Mapping[str, Any] | None]
) -> None:
    """Raises ConfigError: where one of `agents` has started a run of this config before."""
    found = earlier_round(_earlier_runs(config, out), agents)
    if found is not None:
        run_dir, agent = found
        resume = short_path(run_dir.absolute()) if _has_checkpoint(run_dir) else None
        raise ConfigError([round_problem(agent, short_path(run_dir.absolute()), resume=resume)])


def _earlier_run(config: TrainConfig, out: Path | None) -> str | None:
    """The newest run of this config that has a whole checkpoint."""
    folder = next(filter(_has_checkpoint, _earlier_runs(config, out)), None)
    return None if folder is None else short_path(folder.absolute())


def _earlier_runs(config: TrainConfig, out: Path | None) -> list[Path]:
    """The runs of this config, the newest first."""
    if out is not None:
        return [out]
    runs_dir = Path(config.launcher.runs_dir).expanduser()
    return sorted(runs_dir.glob(f"*-{config_hash(config)[:8]}*"), key=lambda path: path.name, reverse=True)


def _has_checkpoint(run_dir: Path) -> bool:
    from counterflow.framework.trainer.resume_source import checkpoints_of

    return newest(checkpoints_of(run_dir))[0] is not None


def check_environment(config: TrainConfig, joined: JoinedRank | None) -> None:
    """Checkpoint, logger, devices and folders of this host.

    Raises ConfigError: naming every mistake.
    """
    problems: list[str] = []
    if config.checkpoint.resume is not None and not Path(config.checkpoint.resume).is_dir():
        problems.append(_no_folder(config.checkpoint.resume))
    elif config.checkpoint.resume is not None:
        problems += _resume_problems(config, config.checkpoint.resume)
    try:
        check_logger(config.logger)
    except ValueError as error:
        problems.append(str(error))
    ranks_here = config.parallel.world_size
    if joined is not None:
        ranks_here = joined.ranks_on_node or joined.local_rank + 1
    problems += device_problems(config, ranks_here, joined=joined is not None)
    problems += _folder_problems(config)
    if problems:
        raise ConfigError(problems)


def _no_folder(source: str) -> str:
    path = Path(source)
    if not path.exists():
        return (
            f"checkpoint.resume={source}: no such folder; name the folder of a run, as in {A_RUN}, or of one of its "
            "checkpoints"
        )
    within = next((parent for parent in path.absolute().parents if has_checkpoint_name(parent)), None)
    where = (
        f"the folder that it is in, checkpoint.resume={short_path(within)}"
        if within is not None
        else f"the folder of a run, as in {A_RUN}, or of one of its checkpoints"
    )
    return f"checkpoint.resume={source}: it is a file, and a checkpoint is a folder; name {where}"


def _folder_problems(config: TrainConfig) -> list[str]:
    """Folders of this host that ranks are to write files to while they run."""
    wanted = {
        "offload.folder": config.offload.folder
        if config.offload.is_active and config.offload.tier == "disk"
        else None,
        "optimizer.offload.folder": config.optimizer.offload.folder
        if config.optimizer.offload.tier == "disk"
        else None,
    }
    problems: list[str] = []
    for key, folder in wanted.items():
        if folder is None:
            continue
        try:
            ScratchFile(Path(folder), setting=key, what="", remedy="")
        except OSError as error:
            problems.append(str(error.strerror))
    return problems


def _resume_problems(config: TrainConfig, source: str) -> list[str]:
    """What can be known without the data; whether the tensors fit shows when they are loaded."""
    from counterflow.framework.checkpoint.manifest import CheckpointError, read_metadata
    from counterflow.framework.trainer.resume import resume_problems
    from counterflow.framework.trainer.resume_source import checkpoint_to_resume

    try:
        folder = checkpoint_to_resume(source)
        metadata = read_metadata(folder)
    except (ValueError, CheckpointError) as error:
        return [str(error)]
    return resume_problems(config, folder, metadata)
