"""What would keep a run from starting on this host: found, and told at once, before the first rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from counterflow.framework.config.mapping import config_hash
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.devices import device_problems
from counterflow.framework.errors import ConfigError
from counterflow.framework.metrics.sinks import check_logger
from counterflow.launch.ranks.environment import JoinedRank, restart_problem
from counterflow.launch.runs import short_path
from counterflow.parallel.scratch_file import ScratchFile


def refuse_restart(config: TrainConfig, out: Path | None, joined: JoinedRank | None) -> None:
    """A job goes on from a checkpoint only where it is told to.

    Raises ConfigError: in the second round of a job that torchrun or Slurm has restarted.
    """
    if restart_problem(os.environ, resume=config.checkpoint.resume, earlier=None) is None:
        return
    if joined is not None and joined.rank:
        sys.exit(2)  # rank 0 tells
    earlier = _earlier_run(config, out)
    problem = restart_problem(os.environ, resume=config.checkpoint.resume, earlier=earlier)
    assert problem is not None
    raise ConfigError([problem])


def _earlier_run(config: TrainConfig, out: Path | None) -> str | None:
    """The newest run of this config that has a whole checkpoint."""
    from counterflow.framework.trainer.resume_source import checkpoint_to_resume

    runs_dir = Path(config.launcher.runs_dir).expanduser()
    named = sorted(runs_dir.glob(f"*-{config_hash(config)[:8]}*"), key=lambda path: path.name, reverse=True)
    for folder in [out] if out is not None else named:
        try:
            checkpoint_to_resume(str(folder))
        except (OSError, ValueError):
            continue
        return short_path(folder.absolute())
    return None


def check_environment(config: TrainConfig, joined: JoinedRank | None) -> None:
    """Checkpoint, logger, devices and folders of this host.

    Raises ConfigError: naming every mistake.
    """
    problems: list[str] = []
    if config.checkpoint.resume is not None and not Path(config.checkpoint.resume).is_dir():
        problems.append(
            f"checkpoint.resume={config.checkpoint.resume}: no such folder; name the folder of a run, as in "
            "runs/20260131-120000-1a2b3c4d, or of one of its checkpoints"
        )
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
