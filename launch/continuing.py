"""Runs that go on: in their own folder when the same command is started again (`checkpoint.resume=auto`), and in place
when a rank was lost (`launcher.max_restarts`).

Note [What a restart goes on from]
Ranks are started again on the newest whole checkpoint of the run or, before its first, as the run began. Steps that
were done since are done again: records from there on are dropped first (framework/metrics/sinks.py), so the curve has
each step once. A rank that fails at the same step for the same reason twice would fail there for ever: the run ends.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from counterflow.framework.checkpoint.manifest import newest, read_metadata, remove_leftovers, step_of
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError, RunFailedError
from counterflow.framework.metrics.sinks import METRICS_FILE, SUMMARY_FILE
from counterflow.framework.trainer.resume_source import checkpoints_of

AUTO = "auto"
RESTARTS_FILE = "restarts.jsonl"
_MAX_DELAY_S = 60.0
# Of the end of metrics.jsonl, which holds the last whole line.
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Ranks that were started again. number: from 1. cause: of what ended them, and `rank` which failed first.

    at_step: how many steps had been done; from_step: of the checkpoint that the ranks went on from; 0: none.
    """

    number: int
    time_s: float
    rank: int | None
    cause: str
    at_step: int
    from_step: int

    def is_like(self, other: Restart) -> bool:
        """Whether both ended at the same step, and for the same reason but for numbers (of processes, of ports)."""
        return self.at_step == other.at_step and _without_numbers(self.cause) == _without_numbers(other.cause)


def goes_on_in(config: TrainConfig, out: Path | None) -> TrainConfig:
    """`config` with `checkpoint.resume=auto` decided: the newest whole checkpoint of the run in `out`, or none yet.

    Raises ConfigError: where no folder is named, no checkpoints are written, or the folder is not a run's.
    """
    if config.checkpoint.resume != AUTO:
        return config
    if out is None:
        raise ConfigError(
            [
                "checkpoint.resume=auto: the run needs a folder that a second start finds; name one with --out, as in "
                "--out runs/mine"
            ]
        )
    if not config.checkpoint.enabled:
        raise ConfigError(
            [
                "checkpoint.resume=auto with checkpoint.enabled=false: there would be nothing to go on from; set "
                "checkpoint.enabled=true and checkpoint.interval_steps=N"
            ]
        )
    if out.is_dir() and any(out.iterdir()) and not is_run(out):
        raise ConfigError(
            [f"--out {out}: it is not the folder of a run, for it has no config.yaml; name a new folder"]
        )
    return from_newest(config, out, else_from=None)


def from_newest(config: TrainConfig, run_dir: Path, *, else_from: str | None) -> TrainConfig:
    """`config`, resumed from the run in `run_dir` where that has a whole checkpoint, else from `else_from`."""
    has_one = newest(checkpoints_of(run_dir))[0] is not None
    source = str(run_dir) if has_one else else_from
    return replace(config, checkpoint=replace(config.checkpoint, resume=source))


def is_run(folder: Path) -> bool:
    """Whether a run has been begun in `folder`: `train` goes on there where it is told to."""
    return (folder / "config.yaml").is_file()


def finished(config: TrainConfig, run_dir: Path) -> dict[str, Any] | None:
    """The summary of the run in `run_dir` where it has done all steps of `config`; None: there are some left."""
    folder = newest(checkpoints_of(run_dir))[0]
    if folder is None or read_metadata(folder).get("num_steps") != config.training.num_steps:
        return None
    try:
        summary = json.loads((run_dir / SUMMARY_FILE).read_text())
    except (OSError, ValueError):
        summary = {}
    return {**(summary if isinstance(summary, dict) else {}), "run_dir": str(run_dir.resolve())}


def with_restarts(
    config: TrainConfig,
    run_dir: Path,
    start: Callable[[TrainConfig], Any],
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Any, tuple[Restart, ...]]:
    """What `start` returned, and how often it was called again after a RunFailedError, with a config that goes on.

    Raises RunFailedError: the last one, once there are no restarts left, or where the next would fail alike.
    """
    restarts: list[Restart] = []
    now = config
    while True:
        remove_leftovers(checkpoints_of(run_dir))  # half written by ranks that are gone
        try:
            return start(now), tuple(restarts)
        except RunFailedError as error:
            if len(restarts) == config.launcher.max_restarts:
                raise
            now = from_newest(config, run_dir, else_from=config.checkpoint.resume)
            restart = Restart(
                number=len(restarts) + 1,
                time_s=time.time(),
                rank=error.rank,
                cause=str(error),
                at_step=steps_done(run_dir),
                from_step=_step_of_newest(run_dir),
            )
            if restarts and restart.is_like(restarts[-1]):
                raise RunFailedError(
                    f"{error}; a restart has failed after step {restart.at_step} for the same reason, so there is no "
                    "other",
                    rank=error.rank,
                    details=error.details,
                ) from error
            restarts.append(restart)
            _keep(run_dir, restart)
            delay = next_delay(config.launcher.restart_delay_s, restart.number)
            where = f"step {restart.from_step}" if restart.from_step else "its beginning"
            say(
                f"{error}; restart {restart.number} of {config.launcher.max_restarts} from {where} in {delay:g} s"
            )
            sleep(delay)


def next_delay(first_s: float, number: int) -> float:
    """Seconds before restart `number`, from 1."""
    return min(max(first_s, _MAX_DELAY_S), first_s * 2.0 ** (number - 1))


def steps_done(run_dir: Path) -> int:
    """How many steps the run has done, by its last record or its newest checkpoint."""
    of_record = next((step + 1 for step in _steps_backwards(run_dir / METRICS_FILE)), 0)
    return max(of_record, _step_of_newest(run_dir))


def _steps_backwards(path: Path) -> Iterator[int]:
    """The steps of the last records of a metrics.jsonl, the last first."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL_BYTES))
            lines: Sequence[bytes] = stream.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # cut off at either end
        yield int(step)


def _step_of_newest(run_dir: Path) -> int:
    folder = newest(checkpoints_of(run_dir))[0]
    return 0 if folder is None else step_of(folder)


def _keep(run_dir: Path, restart: Restart) -> None:
    with (run_dir / RESTARTS_FILE).open("a") as stream:
        stream.write(json.dumps(asdict(restart)) + "\n")


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)
