"""`counterflow train`: prepare the data, make the run's folder, start the ranks, return what rank 0 measured.

Where torchrun, srun or Kubernetes started this process as one rank among others (launch/ranks/environment.py) it joins
them, once all are found to be started alike (launch/ranks/agreement.py); else it starts every rank of the config's
layout on this machine.

    counterflow train schedule=1f1b
    torchrun --nnodes=2 --nproc-per-node=8 -m counterflow train parallel.data_parallel_size=4 ...
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterflow.framework.checkpoint.manifest import has_checkpoint_name, newest
from counterflow.framework.checks.rules import check, check_workload, warnings_of
from counterflow.framework.config.mapping import config_hash, to_mapping
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.devices import device_identity, device_problems, shared_devices
from counterflow.framework.errors import ConfigError, RunFailedError, RunInterruptedError, StoppedError
from counterflow.framework.metrics.sinks import check_logger
from counterflow.framework.redaction import hidden_values, without_secrets
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.run_lock import LOCK_FILE, LockedError, RunLock, holder_of
from counterflow.launch.compose import config_file_text
from counterflow.launch.ranks.agreement import Council, differences, facts_of, open_store
from counterflow.launch.ranks.environment import JoinedRank, joined_rank, restart_problem, socket_environment
from counterflow.launch.ranks.failure import describe, error_path, keep
from counterflow.launch.ranks.rounds import agent_of, earlier_round, keep_agents, round_problem
from counterflow.parallel.scratch_file import ScratchFile

if TYPE_CHECKING:
    from counterflow.framework.data.prepare import PreparedData

_HOLD_SECONDARY_S = 2.0
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
    Raises RunFailedError, RunInterruptedError: see `counterflow.launch.ranks.elastic.run_local`.
    """
    started_at = time.time()
    joined = joined_rank(os.environ)
    _refuse_restart(config, options, joined)
    check(config)
    if joined is None or joined.rank == 0:
        for sentence in warnings_of(config):
            _say(f"warning: {sentence}")
    _check_environment(config, joined)
    if joined is not None:
        with ExitStack() as held:
            return _join(config, options, joined, started_at, held)

    from counterflow.launch.ranks.elastic import run_local

    with ExitStack() as held:
        context = prepare_run(config, options, started_at, held=held)
        num_ranks = config.parallel.world_size
        _say(f"run folder {short_path(context.run_dir)}, {num_ranks} local rank{'s' * (num_ranks > 1)}")
        from counterflow.framework.trainer.loop import (
            run_rank,  # what the ranks need is imported once, before they are forked
        )

        _import_what_ends_a_run(config)
        results = run_local(
            run_rank,
            (config, context),
            num_ranks=num_ranks,
            run_dir=context.run_dir,
            hidden=context.hidden,
            threads_per_rank=config.launcher.threads_per_rank,
            grace_s=config.launcher.grace_s,
        )
        return _summary(results[0], context)


def _import_what_ends_a_run(config: TrainConfig) -> None:
    """What ranks import only where they save or draw; the time to end in order is too short for it."""
    if config.checkpoint.enabled or config.checkpoint.resume is not None:
        import_module("counterflow.framework.checkpoint.storage")
    if config.logger.name != "none":
        import_module("matplotlib.backends.backend_agg")


def make_run_dir(runs_dir: Path, label: str, out: Path | None = None, now: datetime | None = None) -> Path:
    """A new folder `<runs_dir>/<date-time>-<label>`, or `out` itself; absolute, and no other run's.

    Raises ConfigError: where `out` holds something already, or no folder can be made.
    """
    try:
        if out is not None:
            if out.exists():
                _check_empty(out)
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


def check_out(out: Path | None) -> None:
    """Look at --out before the data are prepared, which may take hours; it is looked at again when it is taken.

    Raises ConfigError: where it holds something, or another run writes there.
    """
    if out is None or not out.exists():
        return
    holder = holder_of(out)
    if holder is not None and holder.state != "gone":
        raise ConfigError([f"--out {out}: {holder} writes a run there; name a new folder"])
    _check_empty(out)


def _check_empty(out: Path) -> None:
    """Raises ConfigError: where `out` holds anything but the lock of a run that got no further."""
    if out.is_dir() and all(path.name == LOCK_FILE for path in out.iterdir()):
        return
    holder = holder_of(out)
    if holder is not None and holder.state != "gone":
        raise ConfigError([f"--out {out}: {holder} writes a run there; name a new folder"])
    raise ConfigError(
        [
            f"--out {out}: it is there already and not empty; name a new folder (a run that was saved there goes on "
            f"in another one with checkpoint.resume={out})"
        ]
    )


def lock_run_dir(run_dir: Path, out: Path | None) -> RunLock:
    """The lock of a folder that `make_run_dir` gave, held until it is released.

    Raises ConfigError: where another run holds it, or had it since and left its files.
    """
    try:
        lock = RunLock(run_dir)
    except LockedError as error:
        raise ConfigError([str(error)]) from None
    except OSError as error:
        raise ConfigError(
            [f"{run_dir}: no lock can be written there: {error}; name a folder that you may write to"]
        ) from error
    try:
        if out is not None:
            _check_empty(out)
    except BaseException:
        lock.release()
        raise
    if lock.taken_over is not None:
        _say(f"{run_dir}: taken over from {lock.taken_over}, which has ended without giving it free")
    return lock


def _refuse_restart(config: TrainConfig, options: LaunchOptions, joined: JoinedRank | None) -> None:
    """A job goes on from a checkpoint only where it is told to.

    Raises ConfigError: in the second round of a job that torchrun or Slurm has restarted.
    """
    if restart_problem(os.environ, resume=config.checkpoint.resume, earlier=None) is None:
        if joined is not None and joined.rank == 0:
            _refuse_later_round(config, options, [agent_of(os.environ)])
        return
    if joined is not None and joined.rank:
        sys.exit(2)  # rank 0 tells
    earlier = _earlier_run(config, options)
    problem = restart_problem(os.environ, resume=config.checkpoint.resume, earlier=earlier)
    assert problem is not None
    raise ConfigError([problem])


def _refuse_later_round(
    config: TrainConfig, options: LaunchOptions, agents: Sequence[Mapping[str, Any] | None]
) -> None:
    """Raises ConfigError: where one of `agents` has started a run of this config before."""
    found = earlier_round(_earlier_runs(config, options), agents)
    if found is not None:
        run_dir, agent = found
        resume = short_path(run_dir.absolute()) if _has_checkpoint(run_dir) else None
        raise ConfigError([round_problem(agent, short_path(run_dir.absolute()), resume=resume)])


def _earlier_run(config: TrainConfig, options: LaunchOptions) -> str | None:
    """The newest run of this config that has a whole checkpoint."""
    folder = next(filter(_has_checkpoint, _earlier_runs(config, options)), None)
    return None if folder is None else short_path(folder.absolute())


def _earlier_runs(config: TrainConfig, options: LaunchOptions) -> list[Path]:
    """The runs of this config, the newest first."""
    if options.out is not None:
        return [options.out]
    runs_dir = Path(config.launcher.runs_dir).expanduser()
    return sorted(runs_dir.glob(f"*-{config_hash(config)[:8]}*"), key=lambda path: path.name, reverse=True)


def _has_checkpoint(run_dir: Path) -> bool:
    from counterflow.framework.trainer.resume_source import checkpoints_of

    return newest(checkpoints_of(run_dir))[0] is not None


def _check_environment(config: TrainConfig, joined: JoinedRank | None) -> None:
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
            f"checkpoint.resume={source}: no such folder; name the folder of a run, as in "
            "runs/20260131-120000-1a2b3c4d, or of one of its checkpoints"
        )
    within = next((parent for parent in path.absolute().parents if has_checkpoint_name(parent)), None)
    where = (
        f"the folder that it is in, checkpoint.resume={short_path(within)}"
        if within is not None
        else "the folder of a run, as in runs/20260131-120000-1a2b3c4d, or of one of its checkpoints"
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


def prepare_data(config: TrainConfig, *, show: bool) -> PreparedData:
    from counterflow.framework.data.prepare import prepare

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
    if data.vocab_size != config.expected_vocab_size:
        # What was checked before the data was known is of another vocabulary.
        check_workload(config, data.vocab_size)
    return data


def prepare_run(
    config: TrainConfig,
    options: LaunchOptions,
    started_at: float,
    *,
    kind: str = "",
    held: ExitStack | None = None,
) -> RunContext:
    """Prepare the data, then make the run's folder with its config.yaml: a mistake in the data leaves no folder.

    kind: what the folder's name says beside time and hash, for commands other than train. held: what keeps the
    folder's lock until it is closed; None gives it free once config.yaml is there.

    Raises ConfigError, ValueError: for what the data or the folder refuses.
    """
    check_out(options.out)
    return _new_run(config, options, prepare_data(config, show=True), started_at, kind, held=held)


def _new_run(
    config: TrainConfig,
    options: LaunchOptions,
    data: PreparedData,
    started_at: float,
    kind: str = "",
    *,
    held: ExitStack | None,
) -> RunContext:
    digest = config_hash(config)
    label = "-".join(filter(None, (kind, digest[:8])))
    run_dir = make_run_dir(Path(config.launcher.runs_dir).expanduser(), label, options.out)
    with ExitStack() as briefly:
        (held or briefly).enter_context(lock_run_dir(run_dir, options.out))
        (run_dir / "config.yaml").write_text(config_file_text(config, options.command, options.config_values))
    return RunContext(
        run_dir=run_dir,
        data=data,
        config_hash=digest,
        started_at=started_at,
        show_progress=True,
        json_output=options.json_output,
        config_values=_as_written(config, options),
        hidden=hidden_in(config, options),
    )


def _as_written(config: TrainConfig, options: LaunchOptions) -> Mapping[str, Any]:
    return options.config_values or without_secrets(to_mapping(config))


def hidden_in(config: TrainConfig, options: LaunchOptions) -> dict[str, str]:
    """Values of the config that must not be written down, and what is written for each."""
    return hidden_values(to_mapping(config), _as_written(config, options))


def _join(
    config: TrainConfig, options: LaunchOptions, joined: JoinedRank, started_at: float, held: ExitStack
) -> dict[str, Any] | None:
    """Be one rank of an environment that somebody else started; rank 0 makes, locks and shares the run's folder."""
    rank = joined.rank
    if joined.world_size != config.parallel.world_size:
        problem = (
            f"{joined.size_name}={joined.world_size} in the environment: this layout has "
            f"{config.parallel.world_size} rank(s) (pipeline x data x context x tensor); start that many, or change "
            "the parallel.*_size values"
        )
        if rank:
            # Where rank 0 finds the same, it tells, and who started the ranks ends this one meanwhile.
            time.sleep(_HOLD_SECONDARY_S)
        raise ConfigError([f"rank {rank}: {problem}"])
    import torch

    os.environ.update(joined.variables)
    if joined.is_on_loopback:
        os.environ.update(socket_environment())
    if rank == 0 and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        _say(
            "a job that torchrun restarts is not resumed: its second round is refused (see checkpoint.resume)"
        )
    # Kept until the ranks are done: without torchrun's own store, rank 0 serves it from this process.
    store = open_store(joined, config.comm.timeout_s)
    council = Council(store, rank=rank, world_size=joined.world_size, where=joined.meeting)
    if rank == 0:
        context = _lead(config, options, council, joined, started_at, held)
    else:
        context = _follow(config, options, council, joined, started_at)
    from counterflow.framework.trainer.loop import run_rank

    if config.launcher.threads_per_rank is not None:
        torch.set_num_threads(config.launcher.threads_per_rank)
    try:
        result = run_rank(config, context)
    except StoppedError as error:
        raise RunInterruptedError(str(error), signal_number=signal.SIGTERM) from error
    except Exception as error:
        raise _rank_failure(rank, error, context) from error
    return _summary(result, context) if rank == 0 else None


def _lead(
    config: TrainConfig,
    options: LaunchOptions,
    council: Council,
    joined: JoinedRank,
    started_at: float,
    held: ExitStack,
) -> RunContext:
    """Rank 0: compare what all ranks say, first their configs and then their data, and make the run's folder."""
    try:
        council.arrive(facts_of(config, hidden_in(config, options)))
        council.agree("configs", timedelta(seconds=config.comm.timeout_s), differences)
        council.say("agents", {"agent": agent_of(os.environ)})
        agents = [said["agent"] for said in council.hear("agents", timedelta(seconds=config.comm.timeout_s))]
        _refuse_later_round(config, options, agents)
        check_out(options.out)
        data = prepare_data(config, show=True)
        council.answer("prepared", {})
        council.say("data", _data_facts(config, data, joined))
        council.agree("data", _PREPARE_TIMEOUT, _data_problems)
        context = _new_run(config, options, data, started_at, held=held)
        keep_agents(context.run_dir, agents)
    except BaseException as error:
        council.dismiss(error, ("prepared", "run"))
        raise
    council.answer("run", {"run_dir": str(context.run_dir)})
    return context


def _follow(
    config: TrainConfig, options: LaunchOptions, council: Council, joined: JoinedRank, started_at: float
) -> RunContext:
    """Any other rank. Exits with 2 where rank 0 ends the run; it tells why."""
    council.arrive(facts_of(config, hidden_in(config, options)))
    council.say("agents", {"agent": agent_of(os.environ)})
    if council.wait_for("prepared", _PREPARE_TIMEOUT) is None:
        sys.exit(2)
    data: PreparedData | None = None
    try:
        data = prepare_data(config, show=False)
        council.say("data", _data_facts(config, data, joined))
    except Exception as error:
        council.say("data", {"problem": str(error)})
    told = council.wait_for("run", _PREPARE_TIMEOUT)
    if told is None or data is None:
        sys.exit(2)
    return RunContext(
        run_dir=Path(told["run_dir"]),
        data=data,
        config_hash=config_hash(config),
        started_at=started_at,
        show_progress=False,
        json_output=options.json_output,
        hidden=hidden_in(config, options),
    )


def _data_facts(config: TrainConfig, data: PreparedData, joined: JoinedRank) -> dict[str, Any]:
    tokens = {"data: hash of the tokens": data.content_hash, "data: size of the vocabulary": data.vocab_size}
    return {"tokens": tokens, "device": device_identity(config.device, joined.local_rank)}


def _data_problems(said: list[Mapping[str, Any]]) -> list[str]:
    return differences([rank["tokens"] for rank in said]) + shared_devices([rank["device"] for rank in said])


def _rank_failure(rank: int, error: Exception, context: RunContext) -> RunFailedError:
    record = describe(rank, error, context.hidden)
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
