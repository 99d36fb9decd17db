"""What `counterflow bench compression` refuses, and the gains it makes of steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from counterflow.framework.bench.compression import Row
from counterflow.framework.bench.config import CompressionBenchConfig
from counterflow.launch.bench.compression import _mappings, measure


def test_a_method_that_there_is_none_of_is_told_by_its_key(tmp_path: Path) -> None:
    config = CompressionBenchConfig(methods=("int8", "onbit"))
    with pytest.raises(ValueError, match=r"^methods=\[int8,onbit\]: .*did you mean onebit") as caught:
        measure(config, tmp_path, Console(quiet=True))
    assert "compression=" not in str(caught.value)


def row(method: str, rate: float | None, sent_bytes: int, *step_s: float) -> Row:
    return Row(
        method=method,
        mbit_per_s=rate,
        num_elements=1,
        sent_bytes=sent_bytes,
        fp32_bytes=4_000_000,
        message_error=0.0,
        sum_error=0.0,
        step_s=step_s,
    )


def test_the_gain_in_time_stands_beside_what_bytes_foretell() -> None:
    """At 8 Mbit/s a megabyte takes a second."""
    rows = _mappings(
        [
            row("none", None, 4_000_000, 0.7, 0.5),
            row("int8", None, 1_000_000, 1.0),
            row("none", 8.0, 4_000_000, 4.5, 4.9),
            row("int8", 8.0, 1_000_000, 2.5, 2.25),
        ]
    )
    assert [each["link"] for each in rows] == ["no limit", "no limit", "8 Mbit/s", "8 Mbit/s"]
    assert "off" not in rows[1]
    assert rows[1]["speedup"] == pytest.approx(0.5)
    assert rows[3]["predicted_s"] == pytest.approx(2.0)
    assert rows[3]["predicted_speedup"] == pytest.approx(4.5 / 2)
    assert rows[3]["speedup"] == pytest.approx(4.5 / 2.25)
    assert rows[3]["off"] == pytest.approx(2 / 2.25 - 1)
