"""`counterflow train`: prepare the data, make the run's folder, start the ranks, return what rank 0 measured.

Where RANK and WORLD_SIZE are set (torchrun, Slurm, Kubernetes) this process is one rank among others and joins
them; else it starts every rank of the config's layout on this machine.

    counterflow train schedule=1f1b
    torchrun --nnodes=2 --nproc-per-node=8 -m launch.train parallel.data_parallel_size=4 ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.config import TrainConfig
from framework.config_mapping import config_hash, to_mapping
from framework.config_rules import check
from framework.device_rules import device_problems
from framework.errors import ConfigError, RunFailedError, RunInterruptedError, StoppedError
from framework.metrics.sinks import check_logger
from framework.redaction import without_secrets
from framework.run import RunContext
from launch.compose import config_file_text
from launch.failure import describe, error_path, keep
from parallel.scratch_file import ScratchFile

if TYPE_CHECKING:
    from framework.data.prepare import PreparedData

_HOLD_SECONDARY_S = 2.0
_STORE_KEY = "counterflow/run"
_READ_KEY = "counterflow/read"
# Preparing a large corpus on rank 0 takes a while, and the other ranks wait for it.
_PREPARE_TIMEOUT = timedelta(hours=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the command line says beside the config.

    out: the run's folder; None makes a new one under `launcher.runs_dir`. command: as the user wrote it.
    config_values: the config as it may be written down; None: what was given, without passwords.
    """

    out: Path | None = None
    json_output: bool = False
    command: Sequence[str] = field(default_factory=tuple)
    config_values: Mapping[str, Any] | None = None


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any] | None:
    """Train; the summary of rank 0, or None on the other ranks of an environment that was joined.

    Raises ConfigError: for a mistake in the config, before any rank starts.
    Raises RunFailedError, RunInterruptedError: see `launch.elastic.run_local`.
    """
    started_at = time.time()
    check(config)
    _check_environment(config)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _join(config, options, started_at)

    from launch.elastic import run_local

    context = prepare_run(config, options, started_at)
    num_ranks = config.parallel.world_size
    _say(f"run folder {short_path(context.run_dir)}, {num_ranks} local rank{'s' * (num_ranks > 1)}")
    from framework.train import run_rank  # what the ranks need is imported once, before they are forked

    results = run_local(
        run_rank,
        (config, context),
        num_ranks=num_ranks,
        run_dir=context.run_dir,
        threads_per_rank=config.launcher.threads_per_rank,
        grace_s=config.launcher.grace_s,
    )
    return _summary(results[0], context)


def make_run_dir(runs_dir: Path, label: str, out: Path | None = None, now: datetime | None = None) -> Path:
    """A new folder `<runs_dir>/<date-time>-<label>`, or `out` itself; absolute, and no other run's.

    Raises ConfigError: where `out` holds something already, or no folder can be made.
    """
    try:
        if out is not None:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise ConfigError([f"--out {out}: it is there already and not empty; name a new folder"])
            out.mkdir(parents=True, exist_ok=True)
            return out.resolve()
        runs_dir.mkdir(parents=True, exist_ok=True)
        name = f"{(now or datetime.now()):%Y%m%d-%H%M%S}-{label}"
        number = 1
        while True:
            path = runs_dir / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
                return path.resolve()
            except FileExistsError:
                number += 1
    except OSError as error:
        where = f"--out {out}" if out is not None else f"launcher.runs_dir={runs_dir}"
        raise ConfigError(
            [f"{where}: no folder can be made there: {error}; name one that you may write to"]
        ) from error


def _check_environment(config: TrainConfig) -> None:
    problems: list[str] = []
    if config.checkpoint.resume is not None and not Path(config.checkpoint.resume).is_dir():
        problems.append(
            f"checkpoint.resume={config.checkpoint.resume}: no such folder; name the folder of a run, as in "
            "runs/20260131-120000-1a2b3c4d"
        )
    elif config.checkpoint.resume is not None:
        problems += _resume_problems(config, config.checkpoint.resume)
    try:
        check_logger(config.logger)
    except ValueError as error:
        problems.append(str(error))
    problems += device_problems(config)
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
    from framework.checkpoint.manifest import read_metadata
    from framework.resume import checkpoint_to_resume, resume_problems

    try:
        folder = checkpoint_to_resume(source)
    except ValueError as error:
        return [str(error)]
    return resume_problems(config, folder, read_metadata(folder))


def prepare_data(config: TrainConfig, *, show: bool) -> PreparedData:
    from framework.data.prepare import prepare

    progress = _PrepareProgress() if show else None
    try:
        data = prepare(
            config.data, config.tokenizer, global_batch_size=config.global_batch_size, progress=progress
        )
    finally:
        if progress is not None:
            progress.end()
    if config.model.vocab_size is not None and config.model.vocab_size < data.vocab_size:
        raise ConfigError(
            [
                f"model.vocab_size={config.model.vocab_size}: the tokenizer has {data.vocab_size} tokens, so some "
                "would have no embedding; set model.vocab_size=null to take its size"
            ]
        )
    return data


def prepare_run(
    config: TrainConfig, options: LaunchOptions, started_at: float, *, kind: str = ""
) -> RunContext:
    """Prepare the data, then make the run's folder with its config.yaml: a mistake in the data leaves no folder.

    kind: what the folder's name says beside time and hash, for commands other than train.

    Raises ConfigError, ValueError: for what the data or the folder refuses.
    """
    data = prepare_data(config, show=True)
    digest = config_hash(config)
    label = "-".join(filter(None, (kind, digest[:8])))
    run_dir = make_run_dir(Path(config.launcher.runs_dir).expanduser(), label, options.out)
    (run_dir / "config.yaml").write_text(config_file_text(config, options.command, options.config_values))
    return RunContext(
        run_dir=run_dir,
        data=data,
        config_hash=digest,
        started_at=started_at,
        show_progress=True,
        json_output=options.json_output,
        config_values=options.config_values or without_secrets(to_mapping(config)),
    )


def _join(config: TrainConfig, options: LaunchOptions, started_at: float) -> dict[str, Any] | None:
    """Be one rank of an environment that somebody else started; rank 0 makes the run's folder and shares it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != config.parallel.world_size:
        problem = (
            f"WORLD_SIZE={world_size} in the environment: this layout has {config.parallel.world_size} rank(s) "
            "(pipeline x data x context x tensor); start that many, or change the parallel.*_size values"
        )
        if rank:
            sys.exit(2)  # rank 0 tells
        raise ConfigError([problem])
    import torch
    from torch.distributed.rendezvous import rendezvous

    # Kept until the ranks are done: without torchrun's own store, rank 0 serves it from this process.
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=config.comm.timeout_s)))
    if rank == 0:
        try:
            context = prepare_run(config, options, started_at)
        except BaseException as error:
            store.set(_STORE_KEY, json.dumps({"error": str(error)}))
            # The store may live in this process: let the others read before it goes.
            deadline = time.monotonic() + _HOLD_SECONDARY_S
            while store.add(_READ_KEY, 0) < world_size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            raise
        store.set(_STORE_KEY, json.dumps({"run_dir": str(context.run_dir)}))
    else:
        store.wait([_STORE_KEY], _PREPARE_TIMEOUT)
        told = json.loads(store.get(_STORE_KEY))
        if "error" in told:
            store.add(_READ_KEY, 1)
            sys.exit(2)
        context = RunContext(
            run_dir=Path(told["run_dir"]),
            data=prepare_data(config, show=False),
            config_hash=config_hash(config),
            started_at=started_at,
            show_progress=False,
            json_output=options.json_output,
        )
    from framework.train import run_rank

    if config.launcher.threads_per_rank is not None:
        torch.set_num_threads(config.launcher.threads_per_rank)
    try:
        result = run_rank(config, context)
    except StoppedError as error:
        raise RunInterruptedError(str(error), signal_number=signal.SIGTERM) from error
    except Exception as error:
        raise _rank_failure(rank, error, context) from error
    return _summary(result, context) if rank == 0 else None


def _rank_failure(rank: int, error: Exception, context: RunContext) -> RunFailedError:
    record = describe(rank, error)
    path = error_path(context.run_dir, rank)
    not_kept = keep(path, record.traceback)
    if record.secondary:
        time.sleep(
            _HOLD_SECONDARY_S
        )  # so that whoever started the ranks sees first the one that failed first
    kept = f"is in {path}" if not_kept is None else f"could not be written to {path} ({not_kept})"
    message = f"rank {rank} failed: {record.kind}: {record.message}; its traceback {kept}"
    return RunFailedError(message, rank=rank, details=record.traceback)


def _summary(result: Mapping[str, Any] | None, context: RunContext) -> dict[str, Any]:
    return {
        "run_dir": str(context.run_dir),
        "config_hash": context.config_hash,
        **(result or {}),
        "total_s": round(time.time() - context.started_at, 3),
    }


class _PrepareProgress:
    """Progress of the data on stderr: one line that is rewritten on a terminal, else a line for each part."""

    def __init__(self) -> None:
        self._part = ""
        self._tty = sys.stderr.isatty()

    def __call__(self, part: str, share: float) -> None:
        if self._tty:
            print(f"\r\033[Kpreparing the data: {part} {share:4.0%}", end="", file=sys.stderr, flush=True)
        elif part != self._part:
            print(f"preparing the data: {part}", file=sys.stderr, flush=True)
        self._part = part

    def end(self) -> None:
        if self._tty and self._part:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def short_path(path: Path) -> str:
    """`path` as seen from the working directory, where that is shorter."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    from launch.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
