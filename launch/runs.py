"""The folder of a run and the data it trains on: what is there before the first rank starts."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterflow.framework.checks.rules import check_workload
from counterflow.framework.config.mapping import config_hash, to_mapping
from counterflow.framework.config.tree import CheckpointConfig, LoggerConfig, TrainConfig
from counterflow.framework.devices import device_kind
from counterflow.framework.errors import ConfigError
from counterflow.framework.redaction import hidden_values, without_secrets
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.run_lock import LOCK_FILE, LockedError, RunLock, holder_of
from counterflow.launch.command import LaunchOptions
from counterflow.launch.compose import config_file_text
from counterflow.launch.printing import say
from counterflow.launch.ranks.environment import cuda_environment, flight_recorder_environment

if TYPE_CHECKING:
    from counterflow.framework.data.prepare import PreparedData


def without_records(config: TrainConfig) -> TrainConfig:
    """`config` with neither records nor checkpoints, which may name what is not there yet: for a few steps that are
    compared or measured by files of their own.
    """
    return replace(config, logger=LoggerConfig(name="none"), checkpoint=CheckpointConfig(enabled=False))


def layout_text(config: TrainConfig) -> str:
    """A layout in a few characters, as `tp2 pp2 dp2 zero3 dualpipe`."""
    parallel = config.parallel
    experts = f"ep{parallel.expert_parallel_size} " if config.model.moe.num_experts else ""
    return (
        f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size} dp{parallel.data_parallel_size} "
        f"{experts}zero{config.zero.stage} {config.schedule.name}"
    )


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
    check_out(options.out, may_go_on=options.may_go_on)
    return new_run(config, options, prepare_data(config, show=True), started_at, kind, held=held)


def new_run(
    config: TrainConfig,
    options: LaunchOptions,
    data: PreparedData,
    started_at: float,
    kind: str = "",
    *,
    held: ExitStack | None,
) -> RunContext:
    """The run's folder, new and locked, with its config.yaml, for data that is there."""
    digest = config_hash(config)
    label = "-".join(filter(None, (kind, digest[:8])))
    runs_dir = Path(config.launcher.runs_dir).expanduser()
    run_dir = make_run_dir(runs_dir, label, options.out, may_go_on=options.may_go_on)
    with ExitStack() as briefly:
        (held or briefly).enter_context(lock_run_dir(run_dir, options.out, may_go_on=options.may_go_on))
        if options.may_go_on:
            for control_dir in run_dir.glob(".ranks-*"):  # of a launcher that was killed
                shutil.rmtree(control_dir, ignore_errors=True)
        _write_config(run_dir, config_file_text(config, options.command, options.config_values))
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


def _write_config(run_dir: Path, text: str) -> None:
    """config.yaml; that of an earlier start of the run is kept beside it where it says something else."""
    path = run_dir / "config.yaml"
    if path.is_file() and path.read_text() != text:
        number = next(n for n in count(1) if not (run_dir / f"config.{n}.yaml").exists())
        path.rename(run_dir / f"config.{number}.yaml")
    path.write_text(text)


def _as_written(config: TrainConfig, options: LaunchOptions) -> Mapping[str, Any]:
    return options.config_values or without_secrets(to_mapping(config))


def hidden_in(config: TrainConfig, options: LaunchOptions) -> dict[str, str]:
    """Values of the config that must not be written down, and what is written for each."""
    return hidden_values(to_mapping(config), _as_written(config, options))


def start_ranks(
    config: TrainConfig,
    run_dir: Path,
    entry: Callable[..., Any],
    *args: Any,
    hidden: Mapping[str, str],
    num_ranks: int | None = None,
) -> list[Any]:
    """`entry(*args, local_rank=...)` on local ranks, by default those of the layout; what each returned.

    hidden: what stands in messages and tracebacks in place of a value (`hidden_in`).

    Raises RunFailedError, RunInterruptedError: see `run_local`.
    """
    from counterflow.launch.ranks.elastic import run_local

    return run_local(
        _with_local_rank,
        (entry, args),
        num_ranks=num_ranks or config.parallel.world_size,
        run_dir=run_dir,
        hidden=hidden,
        threads_per_rank=config.launcher.threads_per_rank,
        grace_s=config.launcher.grace_s,
        environment=environment_of_ranks(config, run_dir),
    )


def environment_of_ranks(config: TrainConfig, run_dir: Path) -> dict[str, str]:
    """What local ranks need in their environment besides: nothing on a CPU."""
    if device_kind(config.device) == "cpu":
        return {}
    deterministic = config.is_deterministic("cuda")
    return {
        **cuda_environment(os.environ, deterministic=deterministic),
        **flight_recorder_environment(os.environ, run_dir),
    }


def _with_local_rank(entry: Callable[..., Any], args: Sequence[Any]) -> Any:
    return entry(*args, local_rank=int(os.environ["LOCAL_RANK"]))


def make_run_dir(
    runs_dir: Path,
    label: str,
    out: Path | None = None,
    now: datetime | None = None,
    *,
    may_go_on: bool = False,
) -> Path:
    """A new folder `<runs_dir>/<date-time>-<label>`, or `out` itself; absolute, and no other run's.

    may_go_on: `out` may be the folder of a run, which goes on there.

    Raises ConfigError: where `out` holds something already, or no folder can be made.
    """
    try:
        if out is not None:
            if out.exists() and not may_go_on:
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


def check_out(out: Path | None, *, may_go_on: bool = False) -> None:
    """Look at --out before the data are prepared, which may take hours; it is looked at again when it is taken.

    Raises ConfigError: where it holds something, or another run writes there.
    """
    if out is None or not out.exists():
        return
    holder = holder_of(out)
    if holder is not None and holder.state != "gone":
        raise ConfigError([f"--out {out}: {holder} writes a run there; name a new folder"])
    if not may_go_on:
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


def lock_run_dir(run_dir: Path, out: Path | None, *, may_go_on: bool = False) -> RunLock:
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
        if out is not None and not may_go_on:
            _check_empty(out)
    except BaseException:
        lock.release()
        raise
    if lock.taken_over is not None:
        say(f"{run_dir}: taken over from {lock.taken_over}, which has ended without giving it free")
    return lock


def prepare_data(config: TrainConfig, *, show: bool) -> PreparedData:
    """The tokens of `config`; show: with progress on stderr.

    Raises ConfigError, ValueError: for a text, a tokenizer or a vocabulary that does not do.
    """
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


def summary(result: Mapping[str, Any] | None, context: RunContext) -> dict[str, Any]:
    """What `--json` prints of a run that rank 0 has trained."""
    return {
        "run_dir": str(context.run_dir),
        "config_hash": context.config_hash,
        **(result or {}),
        "total_s": round(time.time() - context.started_at, 3),
    }


def short_path(path: Path) -> str:
    """`path` as seen from the working directory, where that is shorter."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
