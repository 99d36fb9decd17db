"""Runs that go on: what a second start finds, when ranks are started again, and when not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counterflow.framework.checkpoint.storage import save
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError, RunFailedError
from counterflow.framework.trainer.resume_source import checkpoints_of
from counterflow.launch.continuing import (
    RESTARTS_FILE,
    finished,
    goes_on_in,
    next_delay,
    steps_done,
    with_restarts,
)
from tests.tiny import tiny_config


def asked(**nodes: Any) -> TrainConfig:
    checkpoint = {"resume": "auto", "enabled": True, **nodes.pop("checkpoint", {})}
    return tiny_config(checkpoint=checkpoint, **nodes)


def save_step(run_dir: Path, step: int) -> None:
    save(checkpoints_of(run_dir) / f"step-{step:08d}", [], {"num_steps": step}, group=None)


def begun(run_dir: Path) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text("seed: 0\n")
    return run_dir


def log_steps(run_dir: Path, *steps: int) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in steps]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 99, "lo')


def test_a_run_begins_in_a_new_folder_and_goes_on_in_its_own(tmp_path: Path) -> None:
    assert goes_on_in(asked(), tmp_path / "new").checkpoint.resume is None
    run_dir = begun(tmp_path / "run")
    assert goes_on_in(asked(), run_dir).checkpoint.resume is None
    save_step(run_dir, 3)
    assert goes_on_in(asked(), run_dir).checkpoint.resume == str(run_dir)
    elsewhere = tiny_config(checkpoint={"resume": str(run_dir)})
    assert goes_on_in(elsewhere, None) is elsewhere


@pytest.mark.parametrize(
    ("config", "has_out", "message"),
    [
        (asked(), False, "name one with --out"),
        (asked(checkpoint={"enabled": False}), True, "nothing to go on from"),
        (asked(), True, "it has no config.yaml"),
    ],
)
def test_what_it_cannot_go_on_in_is_refused(
    tmp_path: Path, config: TrainConfig, has_out: bool, message: str
) -> None:
    (tmp_path / "somebody's notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match=message):
        goes_on_in(config, tmp_path if has_out else None)


def test_a_run_that_has_done_all_is_not_begun_again(tmp_path: Path) -> None:
    run_dir = begun(tmp_path)
    config = asked(training={"num_steps": 4})
    save_step(run_dir, 3)
    assert finished(config, run_dir) is None
    save_step(run_dir, 4)
    (run_dir / "summary.json").write_text('{"final_loss": 2.5}')
    assert finished(config, run_dir) == {"final_loss": 2.5, "run_dir": str(run_dir)}


def test_steps_done_are_those_of_the_last_whole_record_or_the_newest_checkpoint(tmp_path: Path) -> None:
    assert steps_done(tmp_path) == 0
    log_steps(tmp_path, 0, 1, 2)
    assert steps_done(tmp_path) == 3
    save_step(tmp_path, 7)
    assert steps_done(tmp_path) == 7


class Ranks:
    """A run whose ranks fail as told: after so many steps, with a cause; then it ends."""

    def __init__(self, run_dir: Path, *failures: tuple[int, str]) -> None:
        self._run_dir, self._failures = run_dir, list(failures)
        self.resumed_from: list[str | None] = []

    def __call__(self, config: TrainConfig) -> str:
        self.resumed_from.append(config.checkpoint.resume)
        if not self._failures:
            return "done"
        step, cause = self._failures.pop(0)
        log_steps(self._run_dir, *range(step))
        if step >= 2:
            save_step(self._run_dir, step // 2 * 2)
        raise RunFailedError(cause, rank=1)


def restarted(
    run_dir: Path, ranks: Callable[[TrainConfig], str], *, max_restarts: int = 3
) -> tuple[str, list[int], list[float]]:
    config = asked(checkpoint={"resume": None}, launcher={"max_restarts": max_restarts})
    slept: list[float] = []
    result, restarts = with_restarts(config, run_dir, ranks, say=lambda _: None, sleep=slept.append)
    return result, [each.from_step for each in restarts], slept


def test_ranks_are_started_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    (checkpoints_of(tmp_path) / "step-00000006.tmp-0badcafe").mkdir(parents=True)
    ranks = Ranks(tmp_path, (1, "rank 1 was killed"), (5, "rank 1 was killed"), (5, "no space left"))
    assert restarted(tmp_path, ranks) == ("done", [0, 4, 4], [1.0, 2.0, 4.0])
    assert ranks.resumed_from == [None, None, str(tmp_path), str(tmp_path)]
    kept = [json.loads(line) for line in (tmp_path / RESTARTS_FILE).read_text().splitlines()]
    assert [(each["number"], each["rank"], each["at_step"]) for each in kept] == [
        (1, 1, 1),
        (2, 1, 5),
        (3, 1, 5),
    ]
    assert not list(checkpoints_of(tmp_path).glob("*.tmp-*"))


def test_what_fails_at_one_step_for_one_reason_twice_ends_the_run(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, (3, "process 17 was killed"), (3, "process 23 was killed"), (4, "never come to"))
    with pytest.raises(RunFailedError, match="failed after step 3 for the same reason, so there is no other"):
        restarted(tmp_path, ranks)
    assert len(ranks.resumed_from) == 2


def test_there_are_no_more_restarts_than_are_asked_for(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, (1, "one"), (2, "two"), (3, "three"))
    with pytest.raises(RunFailedError, match="three"):
        restarted(tmp_path, ranks, max_restarts=2)
    assert [next_delay(1.0, number) for number in (1, 2, 3, 7, 99)] == [1.0, 2.0, 4.0, 60.0, 60.0]
    assert next_delay(300.0, 4) == 300.0
