"""Where records go: a JSONL file, Weights & Biases, TensorBoard.

Opened by global rank 0 only. A sink never decides what is measured, and it never stops a run: what is known not to
work is refused by `check_logger` before the first rank starts, and what fails later is said once (guarded.py).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from counterflow.framework.metrics.config import LoggerConfig
from counterflow.framework.metrics.guarded import BackgroundSink, GuardedSink
from counterflow.framework.metrics.record import RunSummary, StepRecord
from counterflow.framework.metrics.status import Status
from counterflow.framework.redaction import without_secrets

_log = logging.getLogger(__name__)
_FINISH_TIMEOUT_S = 60
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
WANDB = "W&B"


class Sink(Protocol):
    """Takes the records of a run; `folder` is where it keeps them, None where it keeps none."""

    @property
    def folder(self) -> Path | None: ...

    def log(self, record: StepRecord) -> None: ...

    def summary(self, summary: RunSummary) -> None: ...

    def close(self, status: Status) -> None: ...


def check_logger(config: LoggerConfig) -> None:
    """Refuse, before a process starts, a logger that cannot work here.

    Raises ValueError: where TensorBoard is not installed, or online W&B has no API key.
    """
    if config.name == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "logger=tensorboard: the package tensorboard is not installed; "
            "pip install 'counterflow[tensorboard]', or take logger=jsonl"
        )
    if config.name == "wandb" and _wandb_mode(config) == "online" and not _may_log_in():
        raise ValueError(
            "logger.mode=online: W&B has no API key here; run `wandb login` or set WANDB_API_KEY, or take "
            "logger.mode=offline and `wandb sync` later"
        )


def open_sinks(
    config: LoggerConfig,
    run_dir: Path,
    run_config: Mapping[str, Any],
    resume_step: int | None = None,
    *,
    hidden: Mapping[str, str] | None = None,
) -> list[GuardedSink]:
    """The sinks of `config.name`, writing under `run_dir`; one that cannot be opened says so and takes nothing.

    run_config: the composed config as plain values; whatever looks like a secret is not passed on.
    resume_step: the first step this run will do; records from it on, left by an earlier run, are dropped.
    hidden: what to write for values of the config where a failure names them.
    """
    if config.name == "none":
        return []
    run_dir.mkdir(parents=True, exist_ok=True)
    sinks = [GuardedSink(METRICS_FILE, lambda: JsonlSink(run_dir, resume_step), hidden=hidden)]
    if config.name == "wandb":
        values = without_secrets(run_config)
        sinks.append(
            BackgroundSink(
                WANDB,
                lambda: WandbSink(config, run_dir, values),
                timeout_s=config.timeout_s,
                hidden=hidden,
            )
        )
    elif config.name == "tensorboard":
        sinks.append(
            BackgroundSink(
                "TensorBoard",
                lambda: TensorBoardSink(run_dir, resume_step),
                timeout_s=config.timeout_s,
                hidden=hidden,
            )
        )
    return sinks


def log_picture(sinks: Sequence[GuardedSink], name: str, path: Path, step: int) -> None:
    """Hand the PNG at `path` to those of `sinks` that show pictures; `step` is the record's it belongs to."""
    for sink in sinks:
        sink.picture(name, path, step)


def close_sinks(sinks: Sequence[GuardedSink], status: Status, timeout_s: float) -> None:
    """Close all, each behind what it was handed, within `timeout_s` altogether."""
    until = time.monotonic() + timeout_s
    for sink in sinks:
        sink.begin_close(status)
    for sink in sinks:
        sink.wait_closed(until)


def failures_of(sinks: Sequence[GuardedSink]) -> dict[str, str]:
    """Why sinks take no more records, by name."""
    return {sink.name: sink.failure for sink in sinks if sink.failure is not None}


def wandb_dir(sinks: Sequence[GuardedSink]) -> str | None:
    """The offline folder of the W&B sink among `sinks`, if there is one."""
    for sink in sinks:
        if sink.name == WANDB and sink.folder is not None:
            return str(sink.folder)
    return None


class JsonlSink:
    """`metrics.jsonl`, one flushed line a step, so a killed run keeps all it did; `summary.json` at the end."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        self._run_dir = run_dir
        path = run_dir / METRICS_FILE
        if path.exists():
            rewritten = path.with_suffix(".rewritten")
            with rewritten.open("w") as stream:
                for record in iterate_records(path):
                    if record.step < (resume_step or 0):
                        stream.write(record.to_json() + "\n")
            rewritten.replace(path)
        self._stream = path.open("a")

    @property
    def folder(self) -> Path | None:
        return self._run_dir

    def log(self, record: StepRecord) -> None:
        self._stream.write(record.to_json() + "\n")
        self._stream.flush()

    def summary(self, summary: RunSummary) -> None:
        (self._run_dir / SUMMARY_FILE).write_text(summary.to_json() + "\n")

    def close(self, status: Status) -> None:
        self._stream.close()


def iterate_records(path: Path) -> Iterator[StepRecord]:
    """The step records of a `metrics.jsonl`, one in memory at a time, however long the run was.

    A last line that a killed run left unfinished is passed over.

    Raises ValueError: where any other line is not a record.
    """
    damaged: str | None = None
    with path.open() as stream:
        for number, line in enumerate(stream, start=1):
            if damaged is not None:
                raise ValueError(damaged)
            try:
                record = StepRecord.from_json(line)
            except ValueError as error:
                damaged = f"{path}:{number}: {error}; remove the line to read the rest"
                continue
            yield record


def read_records(path: Path) -> list[StepRecord]:
    """All of `iterate_records`."""
    return list(iterate_records(path))


class WandbSink:
    """One W&B run, kept below the run's folder; WANDB_MODE overrides `config.mode`.

    A resumed run keeps its W&B id, so that syncing both offline folders gives one run. Where W&B fails once
    training goes on, that is said in the log, once, and the run goes on without it.
    """

    def __init__(self, config: LoggerConfig, run_dir: Path, run_config: dict[str, Any]) -> None:
        """Raises wandb.Error or OSError: where W&B cannot start the run, for example without its server."""
        os.environ.update(_home_for_wandb(run_dir))
        import wandb

        mode = _wandb_mode(config)
        id_file = run_dir / "wandb" / "run-id.txt"
        known_id = id_file.read_text().strip() if id_file.exists() else None
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_save_requirements=False,
            # Its system monitor is one more process, which outlives a killed trainer by up to five seconds
            # (seen in 0.31); without a GPU to watch it is not worth that.
            x_disable_stats=not torch.cuda.is_available(),
            init_timeout=config.timeout_s,
        )
        self._run = wandb.init(
            project=config.project,
            name=run_dir.name,
            dir=str(run_dir),
            id=known_id,
            mode=mode,
            resume="allow" if known_id and mode == "online" else None,
            config=run_config,
            settings=settings,
        )
        self._folder = None if mode == "disabled" else Path(self._run.settings.sync_dir)
        if self._folder is not None and known_id is None:
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(self._run.id + "\n")

    @property
    def folder(self) -> Path | None:
        return self._folder

    def log(self, record: StepRecord) -> None:
        self._run.log(record.scalars(), step=record.step)

    def picture(self, name: str, path: Path, step: int) -> None:
        """Show the PNG at `path` beside the values of `step`, before or after they are logged."""
        import wandb

        self._run.log({name: wandb.Image(str(path))}, step=step)

    def summary(self, summary: RunSummary) -> None:
        values = {
            "final_loss": summary.final_loss,
            "final_validation_loss": summary.validation_loss,
            "median_tokens_per_s": summary.tokens_per_s,
            "seconds": summary.seconds,
            "num_skipped": summary.num_skipped,
            **{f"kernel/{use}": name for use, name in summary.kernels.items()},
        }
        self._run.summary.update(values)

    def close(self, status: Status) -> None:
        """Finish the W&B run; an upload that does not end in a minute is left to `wandb sync`."""
        exit_code = 0 if status == "finished" else 1
        errors: list[Exception] = []

        def finish() -> None:
            try:
                self._run.finish(exit_code=exit_code)
            except Exception as error:
                errors.append(error)

        finishing = threading.Thread(target=finish, daemon=True)
        finishing.start()
        finishing.join(_FINISH_TIMEOUT_S)
        if errors:
            raise errors[0]
        if finishing.is_alive():
            _log.warning(
                "W&B has not finished after %d s; run `wandb sync %s` later", _FINISH_TIMEOUT_S, self._folder
            )


class TensorBoardSink:
    """Event files in `tensorboard/` below the run's folder."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder = run_dir / "tensorboard"
        self._writer = SummaryWriter(str(self._folder), purge_step=resume_step)

    @property
    def folder(self) -> Path | None:
        return self._folder

    def log(self, record: StepRecord) -> None:
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, record.step)

    def picture(self, name: str, path: Path, step: int) -> None:
        """Show the PNG at `path`."""
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path)[..., :3], step, dataformats="HWC")

    def summary(self, summary: RunSummary) -> None:
        self._writer.add_text("summary", f"```\n{summary.to_json()}\n```", summary.steps)

    def close(self, status: Status) -> None:
        self._writer.close()


def _may_log_in() -> bool:
    """False where W&B certainly has no credentials; `wandb login` keeps them in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if "NETRC" not in os.environ and not _has_home():
        return False
    netrc = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    return netrc.is_file() and netrc.stat().st_size > 0


def _home_for_wandb(run_dir: Path) -> dict[str, str]:
    """Variables without which W&B does not start, or its service prints its log at the end of ours.

    W&B keeps settings and caches at home, and its service knows home by HOME alone.
    """
    if not _has_home():
        names = (f"WANDB_{name}_DIR" for name in ("CONFIG", "CACHE", "DATA"))
        return {
            name: os.environ.get(name) or str(run_dir / "wandb" / name.split("_")[1].lower())
            for name in names
        }
    return {} if os.environ.get("HOME") else {"HOME": str(Path.home())}


def _has_home() -> bool:
    """Whether there is a home folder that can be written to; a container's user may have none."""
    if os.environ.get("HOME") == "":
        return False  # the root of the file system would be taken for it
    try:
        home = Path.home()
    except RuntimeError:
        return False
    return home.is_dir() and os.access(home, os.W_OK)


def _wandb_mode(config: LoggerConfig) -> Literal["online", "offline", "disabled"]:
    mode = os.environ.get("WANDB_MODE") or config.mode
    if mode == "dryrun":
        return "offline"
    if mode in ("online", "run"):
        return "online"
    if mode in ("offline", "disabled"):
        return mode
    raise ValueError(
        f"WANDB_MODE={mode}: W&B knows online, offline and disabled; set one of them or unset it"
    )
