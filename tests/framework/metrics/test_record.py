"""Records as JSON and as flat numbers."""

from __future__ import annotations

import json
import math

import pytest

from counterflow.framework.metrics.record import StepRecord
from tests.framework.metrics.records import RECORD, SUMMARY, record


def test_a_record_is_one_line_of_json_and_comes_back() -> None:
    line = RECORD.to_json()
    assert "\n" not in line
    values = json.loads(line)
    assert values["busy_s"] == [0.4, 0.3]
    assert values["mfu"] is None
    assert values["bytes_by_axis"] == {"tensor": 100, "pipeline": 20}
    assert StepRecord.from_json(line) == RECORD


def test_a_diverged_run_still_writes_json() -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    line = record(3, loss=math.nan, grad_norm=math.inf, busy_s=(-math.inf, 1.0)).to_json()
    json.loads(line, parse_constant=refuse)
    back = StepRecord.from_json(line)
    assert math.isnan(back.loss)
    assert back.grad_norm == math.inf
    assert back.busy_s == (-math.inf, 1.0)


@pytest.mark.parametrize("line", ["", "{", '{"step": 1}', "[1, 2]", '{"step": 1, "unknown": 2}', "3"])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a step record"):
        StepRecord.from_json(line)


def test_scalars_name_ranks_and_axes() -> None:
    found = record(7, validation_loss=2.0).scalars()
    assert found["idle_s/rank_1"] == 0.2
    assert found["bytes_by_axis/pipeline"] == 20
    assert found["peak_live_activations/rank_0"] == 2
    assert found["validation_loss"] == 2.0
    assert not {"mfu", "bubble_formula", "step"} & set(found)
    assert all(isinstance(value, (int, float)) for value in found.values())


def test_a_summary_has_the_keys_of_the_command_line() -> None:
    values = json.loads(SUMMARY.to_json())
    assert values["bubble"] == {"measured": 0.3, "simulated": 0.25, "formula": None}
    assert {"run_dir", "final_loss", "validation_loss", "tokens_per_s", "wandb_dir"} <= set(values)
