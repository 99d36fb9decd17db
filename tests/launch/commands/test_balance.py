"""`counterflow balance`: a run's loads are read, placed and drawn; a mistake is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from counterflow.framework.metrics.record import BalanceRecord, MoERecord, RoutingRecord, StepRecord
from counterflow.framework.metrics.sinks import METRICS_FILE
from counterflow.launch.cli import main
from tests.framework.metrics.records import record as make_record

SKEWED = (0.5, 0.2, 0.1, 0.05, 0.05, 0.05, 0.03, 0.02)


def record_of(step: int, loads: list[tuple[float, ...]]) -> StepRecord:
    layers = tuple(
        RoutingRecord(layer=index + 1, load=load, imbalance=1.0, entropy=1.0, num_dropped=0, sent_bytes=0)
        for index, load in enumerate(loads)
    )
    balance = BalanceRecord(rank_imbalance=(1.5,) * len(loads))
    return replace(make_record(step), moe=MoERecord(layers=layers, link_bytes=((0,),)), balance=balance)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    even = (0.125,) * 8
    steps = [record_of(0, [even, even]), record_of(1, [SKEWED, even])]
    (tmp_path / METRICS_FILE).write_text("".join(step.to_json() + "\n" for step in steps))
    return tmp_path


def test_placements_of_a_recorded_run(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["num_ranks=4", "num_redundant_experts=[0,2]", "last_steps=1"]
    assert main(["balance", str(run_dir), *words, "--json"]) == 0
    out, err = capfd.readouterr()
    assert "largest load of a rank" in err
    result = json.loads(out)
    assert (result["layers"], result["num_steps"]) == ([1, 2], 1)
    assert result["before"] == pytest.approx([0.7 * 4, 1])
    assert result["after"]["0"] == pytest.approx([0.52 * 4, 1])
    assert max(result["after"]["2"]) < 1.1
    placed = result["placements"]["2"][0]
    assert [len(experts) for experts in placed] == [4] * 4
    assert sum(experts.count(0) for experts in placed) > 2
    assert (run_dir / "balance.png").stat().st_size > 1000
    assert Path(result["png"]) == run_dir / "balance.png"


def test_all_steps_are_summed_without_a_number(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["balance", str(run_dir), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["num_steps"] == 2
    assert result["before"] == pytest.approx([(0.7 + 0.25) / 2 * 4, 1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "takes the folder of a run first"),
        (["num_ranks=4"], "takes the folder of a run first"),
        (["RUN", "num_ranks=3"], "must divide"),
        (["RUN", "num_ranks=1"], "2 ranks or more"),
        (["RUN", "num_redundant_experts=[-1]"], "each 0 or more"),
        (["RUN", "ranks=4"], "no such key"),
        (["RUN/elsewhere"], "no such folder"),
        (["RUN/dense"], "no loads of experts"),
    ],
)
def test_mistakes(run_dir: Path, words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    (run_dir / "dense").mkdir()
    argv = [word.replace("RUN", str(run_dir)) for word in words]
    assert main(["balance", *argv]) == 2
    assert message in capfd.readouterr().err
