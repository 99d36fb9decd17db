"""`counterflow reproduce`: a table as JSON, and mistakes."""

from __future__ import annotations

import json

import pytest

from counterflow.launch.cli import main


def test_a_table_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--json", "table=megatron_b200_node"]) == 0
    (table,) = json.loads(capfd.readouterr().out.splitlines()[-1])["tables"]
    assert (table["table"], table["num_rows"], table["calibrated"]) == ("megatron_b200_node", 18, False)
    errors = [abs(row["predicted"] / row["published"] - 1) for row in table["rows"]]
    assert table["mean_error"] == pytest.approx(sum(errors) / len(errors))
    assert table["max_error"] == pytest.approx(max(errors))


@pytest.mark.parametrize("words", [[], ["ptdp_table1"], ["table=ptdp"]])
def test_a_mistake_is_told_with_an_example(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words]) == 2
    assert "ptdp_table1" in capfd.readouterr().err
