"""`counterflow timeline` on a run that really trained."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.metrics.config import LoggerConfig
from counterflow.framework.metrics.record import StepRecord
from counterflow.framework.metrics.timeline import recorded_steps
from counterflow.framework.metrics.timeline_render import write_files
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import train
from counterflow.framework.trainer.measure import timeline_is_due
from counterflow.framework.trainer.run import RunContext
from counterflow.launch.cli import main
from counterflow.parallel.pipeline.ir.trace import CATEGORIES
from tests.rank_pool import RankPool
from tests.tiny import run_context, tiny_config


def train_tiny(config: TrainConfig, run: RunContext) -> list[StepRecord]:
    assembly = build(config, run.data, torch.device("cpu"))

    def keep(timeline: object) -> None:
        write_files(timeline, run.run_dir, ("json", "trace", "png"))  # type: ignore[arg-type]

    return list(train(assembly, 0, keep))


@pytest.fixture(scope="module")
def trained(
    ranks: RankPool, tiny_data: PreparedData, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[StepRecord]]:
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    config = tiny_config(
        pp=2,
        tp=2,
        dp=2,
        schedule="dualpipe",
        zero=3,
        training={"num_steps": 5},
        logger={"timeline_interval_steps": 2},
    )
    records = ranks.run(train_tiny, 8, config, run_context(tiny_data, run_dir))
    assert all(rank == records[0] for rank in records)
    return run_dir, records[0]


def test_timelines_are_kept_when_they_are_due(trained: tuple[Path, list[StepRecord]]) -> None:
    run_dir, _ = trained
    assert recorded_steps(run_dir) == [1, 3, 4]
    assert len(list((run_dir / "timeline").glob("*.png"))) == 3


@pytest.mark.parametrize(
    ("interval", "due"), [(None, [4]), (0, []), (1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (9, [4])]
)
def test_due_steps(interval: int | None, due: list[int]) -> None:
    config = LoggerConfig(name="jsonl", timeline_interval_steps=interval)
    assert [step for step in range(5) if timeline_is_due(config, step, 5)] == due
    silent = LoggerConfig(name="none", timeline_interval_steps=1)
    assert not timeline_is_due(silent, 4, 5)


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logger\.timeline_interval_steps=-1"):
        LoggerConfig(timeline_interval_steps=-1)


def test_accounts_of_a_run_add_up(trained: tuple[Path, list[StepRecord]]) -> None:
    for record in trained[1]:
        assert tuple(record.time_s) == CATEGORIES
        for rank in range(2):
            seconds = [record.time_s[category][rank] for category in CATEGORIES]
            assert min(seconds) >= 0
            assert sum(seconds) == pytest.approx(record.step_s, abs=1e-6)
            busy = sum(
                record.time_s[name][rank]
                for name in ("forward", "backward", "input_gradient", "weight_gradient")
            )
            assert busy == pytest.approx(record.busy_s[rank], abs=1e-6)
            for category in ("forward", "backward", "collective_wait", "optimizer", "reduce"):
                assert record.time_s[category][rank] > 0
        assert 0 < record.bubble_measured_span <= record.bubble_measured < 1
        assert record.work_inflation is None or record.work_inflation > 0
        assert len(record.peak_held_weight_grad_bytes) == 2
        assert StepRecord.from_json(record.to_json()) == record
        scalars = record.scalars()
        assert sum(scalars[f"time_share/{category}"] for category in CATEGORIES) == pytest.approx(1, abs=1e-4)
        assert scalars["time_s/receive_wait/rank_1"] == record.time_s["receive_wait"][1]


def test_the_command_draws_the_last_step(
    trained: tuple[Path, list[StepRecord]], capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, records = trained
    assert main(["timeline", str(run_dir), "--json"]) == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    assert result["step"] == 5
    assert result["schedule"] == "dualpipe"
    assert result["alignment"] == "one clock for all ranks"
    # The pipeline drawn is one of four; its step is no longer than the slowest.
    assert 0 < result["step_s"] <= records[4].step_s + 1e-6
    for rank in range(2):
        total = sum(result["account"][category][rank] for category in CATEGORIES)
        assert total == pytest.approx(result["step_s"], abs=1e-6)
    assert 0 <= result["bubble"]["simulated"] < 1
    for kind in ("json", "trace", "svg", "png", "html"):
        path = Path(result[kind])
        assert path.parent == run_dir / "timeline"
        assert path.stat().st_size > 1000
        assert str(path) in err
    ElementTree.parse(result["svg"])
    assert json.loads(Path(result["trace"]).read_text())["traceEvents"]
    assert "receive wait" in err
    assert "rank 4" in err  # the second pipeline rank's global rank


def test_the_command_draws_an_earlier_step(
    trained: tuple[Path, list[StepRecord]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(trained[0]), "--step", "2"]) == 0
    assert "step-00000002.html" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--step", "3"], "--step 3: the run has timelines of step 2, 4, 5"),
        (["extra"], "timeline takes the folder of one run, not 2 words"),
    ],
)
def test_a_slip_is_told(
    trained: tuple[Path, list[StepRecord]],
    argv: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["timeline", str(trained[0]), *argv]) == 2
    assert message in capfd.readouterr().err


def test_a_folder_that_is_no_run_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(tmp_path)]) == 2
    assert "the run has no timelines" in capfd.readouterr().err
    assert main(["timeline", str(tmp_path / "none")]) == 2
    assert "no such folder" in capfd.readouterr().err
