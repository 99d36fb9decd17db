"""Kills a rank or the launcher of a training run at a random moment, a hundred times, and looks at what comes of it:
whether the run that went on by itself, or that the same command went on with, ends with every loss of the undisturbed
run to the bit, and what it leaves behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from counterflow.framework.bench.config import FaultBenchConfig
from counterflow.launch.bench.bench import Bench
from counterflow.launch.printing import new_table

if TYPE_CHECKING:
    from rich.console import Console

Victim = Literal["a rank", "the launcher"]
# When: at any time, or once a checkpoint is being written.
Moment = Literal["any", "saving"]
_POLL_S = 0.002
_MAX_STARTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a trial does. delay: of the undisturbed run's time, from 0 to 1. restarts_itself: launcher.max_restarts."""

    victim: Victim
    moment: Moment
    delay: float
    restarts_itself: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of a fault. starts: of the command, by hand; restarts: of ranks, in place.

    is_equal: every step is recorded once, with the loss of the undisturbed run. is_partial: a checkpoint that is not
    whole has the name of one. left: files and processes.
    """

    fault: Fault
    was_killed: bool
    starts: int
    restarts: int
    is_equal: bool
    is_partial: bool
    left: tuple[str, ...]


def faults_of(config: FaultBenchConfig) -> list[Fault]:
    """The faults of all trials, drawn by the seed: each kind as often as the others."""
    generator = random.Random(config.seed)
    kinds: list[tuple[Victim, Moment, bool]] = [
        ("a rank", "any", True),
        ("the launcher", "any", False),
        ("a rank", "saving", True),
        ("a rank", "any", False),
        ("the launcher", "saving", False),
    ]
    return [
        Fault(victim=victim, moment=moment, delay=generator.random(), restarts_itself=itself)
        for victim, moment, itself in (kinds[number % len(kinds)] for number in range(config.trials))
    ]


def measure(config: FaultBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Run all trials and print a table; what --json prints.

    Raises RunFailedError: where the undisturbed run fails, or a disturbed one does not come to its end.
    """
    folder = folder.absolute()
    expected, lasted = _undisturbed(config, folder / "undisturbed")
    trials: list[Trial] = []
    began = time.monotonic()
    for number, fault in enumerate(faults_of(config), start=1):
        trial = _trial(config, fault, folder / f"trial-{number}", expected, lasted_s=lasted)
        trials.append(trial)
        told = "equal" if trial.is_equal else "DIFFERS"
        when = "while it saved" if fault.moment == "saving" else f"at {fault.delay:.0%}"
        what = f"{fault.victim} killed {when}" if trial.was_killed else "had ended before"
        rest = (config.trials - number) * (time.monotonic() - began) / number
        print(f"[{number}/{config.trials}] {what}: {told}; {rest / 60:.0f} min left", flush=True)
    _print(trials, console)
    return {
        "trials": len(trials),
        "bitwise_equal": sum(trial.is_equal for trial in trials),
        "partial_taken": sum(trial.is_partial for trial in trials),
        "left_behind": sum(bool(trial.left) for trial in trials),
        "restarts": sum(trial.restarts + trial.starts - 1 for trial in trials),
        "killed": sum(trial.was_killed for trial in trials),
        "left": sorted({each for trial in trials for each in trial.left}),
    }


def command_of(config: FaultBenchConfig, out: Path, *, max_restarts: int) -> list[str]:
    """The run, as a user would start it, and start it again."""
    return [
        sys.executable,
        "-m",
        "counterflow",
        "train",
        f"model={config.model}",
        f"parallel.pipeline_parallel_size={config.pipeline_parallel_size}",
        f"parallel.data_parallel_size={config.data_parallel_size}",
        "parallel.tensor_parallel_size=1",
        f"schedule={config.schedule}",
        f"zero.stage={config.zero_stage}",
        "data.seq_length=32",
        f"training.num_steps={config.num_steps}",
        "training.eval_interval_steps=0",
        "data.validation_batches=0",
        "logger=jsonl",
        f"checkpoint.interval_steps={config.interval_steps}",
        "checkpoint.resume=auto",
        f"launcher.max_restarts={max_restarts}",
        "launcher.restart_delay_s=0",
        f"--out={out}",
    ]


def _undisturbed(config: FaultBenchConfig, out: Path) -> tuple[list[tuple[int, float]], float]:
    """Its losses, and its seconds from where there is something to be lost."""
    from counterflow.framework.errors import RunFailedError

    log = _log_of(out)
    with log.open("w") as stream:
        code = subprocess.call(command_of(config, out, max_restarts=0), stdout=stream, stderr=stream)
    if code:
        raise RunFailedError(f"bench faults: the undisturbed run ended with {code}; see {log}")
    return _losses(out), time.time() - (out / "config.yaml").stat().st_mtime


def _trial(
    config: FaultBenchConfig,
    fault: Fault,
    out: Path,
    expected: Sequence[tuple[int, float]],
    *,
    lasted_s: float,
) -> Trial:
    from counterflow.framework.checkpoint.manifest import leftovers, whole_problem
    from counterflow.framework.errors import RunFailedError
    from counterflow.framework.trainer.resume_source import checkpoints_of
    from counterflow.launch.continuing import RESTARTS_FILE

    log = _log_of(out)
    command = command_of(config, out, max_restarts=3 if fault.restarts_itself else 0)
    starts, was_killed, code = 0, False, 1
    sessions: list[int] = []
    while code and starts < _MAX_STARTS:
        with log.open("a") as stream:
            launcher = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
        starts += 1
        sessions.append(launcher.pid)
        if starts == 1:
            was_killed = _strike(launcher, fault, out, lasted_s)
        code = launcher.wait()
    if code:
        raise RunFailedError(f"bench faults: a run did not end after {starts} starts; see {log}")
    checkpoints = checkpoints_of(out)
    left = [f"file {path.name.split('-')[0]}" for path in (*leftovers(checkpoints), *out.glob(".ranks-*"))]
    left += [f"process of {out.name}" for session in sessions for _ in _processes_of(session)]
    restarts = out / RESTARTS_FILE
    return Trial(
        fault=fault,
        was_killed=was_killed,
        starts=starts,
        restarts=len(restarts.read_text().splitlines()) if restarts.exists() else 0,
        is_equal=_losses(out) == list(expected),
        is_partial=any(
            whole_problem(path) is not None
            for path in checkpoints.iterdir()
            if path not in leftovers(checkpoints)
        ),
        left=tuple(left),
    )


def _strike(launcher: subprocess.Popen[Any], fault: Fault, out: Path, lasted_s: float) -> bool:
    """SIGKILL, at the moment of `fault`; False where the run had ended before."""
    from counterflow.framework.checkpoint.manifest import leftovers
    from counterflow.framework.trainer.resume_source import checkpoints_of

    # While it starts there is nothing yet to be lost.
    _wait(launcher, lambda: (out / "config.yaml").exists())
    began = time.monotonic()
    until = fault.delay * lasted_s
    if fault.moment == "saving":
        _wait(launcher, lambda: bool(leftovers(checkpoints_of(out))))
    else:
        _wait(launcher, lambda: time.monotonic() - began >= until)
    ranks = _children_of(launcher.pid)
    victim = launcher.pid if fault.victim == "the launcher" or not ranks else random.choice(ranks)
    if launcher.poll() is not None:
        return False
    os.kill(victim, signal.SIGKILL)
    return True


def _wait(launcher: subprocess.Popen[Any], is_time: Callable[[], bool]) -> None:
    while launcher.poll() is None and not is_time():
        time.sleep(_POLL_S)


def _children_of(pid: int) -> list[int]:
    return [child for child, parent, _ in _processes() if parent == pid]


def _processes_of(session: int) -> list[int]:
    return [pid for pid, _, of in _processes() if of == session]


def _processes() -> list[tuple[int, int, int]]:
    """Each process with its parent and its session (proc(5))."""
    found: list[tuple[int, int, int]] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if fields[0] != "Z":
            found.append((int(path.parent.name), int(fields[1]), int(fields[3])))
    return found


def _losses(out: Path) -> list[tuple[int, float]]:
    """Step and loss of each record, in the order of the file."""
    from counterflow.framework.metrics.sinks import METRICS_FILE

    records = map(json.loads, (out / METRICS_FILE).read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]


def _log_of(out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.with_name(f"{out.name}.log")


def _print(trials: Sequence[Trial], console: Console) -> None:
    table = new_table(
        "runs that were killed once",
        ("killed", "when", "goes on", "trials", "equal", "partial", "left behind"),
        left=("killed", "when", "goes on"),
    )
    kinds = dict.fromkeys(
        (trial.fault.victim, trial.fault.moment, trial.fault.restarts_itself) for trial in trials
    )
    for kind in kinds:
        of = [
            trial
            for trial in trials
            if (trial.fault.victim, trial.fault.moment, trial.fault.restarts_itself) == kind
        ]
        victim, moment, itself = kind
        table.add_row(
            victim,
            "at any time" if moment == "any" else "while it saves",
            "by itself" if itself else "by hand",
            str(len(of)),
            str(sum(trial.is_equal for trial in of)),
            str(sum(trial.is_partial for trial in of)),
            str(sum(bool(trial.left) for trial in of)),
        )
    console.print(table)


BENCH = Bench(
    name="faults",
    summary="runs that are killed at random moments and go on: equal to the bit, nothing left behind",
    about=__doc__ or "",
    examples="""
        counterflow bench faults trials=10  two minutes
        counterflow bench faults schedule=dualpipe pipeline_parallel_size=2 zero_stage=3  another layout""",
    output="""
        rows.json, the folder and the log of each trial, a table.
        --json: trials, bitwise_equal, partial_taken, left_behind, restarts.""",
    keys=FaultBenchConfig,
    measure=measure,
)
