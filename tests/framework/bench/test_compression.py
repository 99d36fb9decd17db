"""The bench of compressed gradients: its rows are of a model's gradient, bytes are the meter's, values are refused."""

from __future__ import annotations

import math

import pytest
import torch

from counterflow.framework.bench.compression import (
    NONE,
    Row,
    measure_compression,
    model_gradient,
    predicted_s,
)
from counterflow.framework.bench.config import CompressionBenchConfig
from counterflow.models.config import ModelConfig
from counterflow.parallel.compress.config import CompressionConfig
from tests.rank_pool import RankPool

MODEL = ModelConfig(
    name="bench", hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2
)
METHODS = {
    NONE: CompressionConfig(),
    "onebit": CompressionConfig(method="onebit"),
    "int8": CompressionConfig(method="int8"),
    "powersgd": CompressionConfig(method="powersgd"),
}


def measured(is_everywhere: bool) -> list[Row]:
    return measure_compression(MODEL, METHODS, is_everywhere=is_everywhere, compute_s=0.0, repeats=1)


@pytest.mark.parametrize("is_everywhere", [True, False])
def test_bytes_and_errors_of_a_models_gradient(ranks: RankPool, is_everywhere: bool) -> None:
    rows = {row.method: row for row in ranks.run(measured, 2, is_everywhere)[0]}
    assert (
        rows[NONE].sent_bytes
        == rows[NONE].fp32_bytes
        == (2 if is_everywhere else 1) * 2 * rows[NONE].num_elements
    )
    assert rows[NONE].sum_error < 1e-6
    assert rows["onebit"].ratio > 25
    assert rows["int8"].ratio > 3.7
    assert rows["powersgd"].ratio > (12 if is_everywhere else 6)
    assert rows["int8"].sum_error < 0.02 < rows["onebit"].sum_error < 1
    assert all(len(row.step_s) == 1 for row in rows.values())


def in_turn() -> tuple[list[Row], list[float | None]]:
    asked: list[float | None] = []
    rows = measure_compression(
        MODEL,
        {NONE: CompressionConfig()},
        rates=(None, 50.0),
        set_rate=asked.append,
        is_everywhere=True,
        compute_s=0.0,
        repeats=2,
    )
    return rows, asked


def test_links_are_limited_and_freed_in_turn(ranks: RankPool) -> None:
    for rows, asked in ranks.run(in_turn, 2):
        assert [row.mbit_per_s for row in rows] == [None, 50.0]
        assert all(len(row.step_s) == 2 for row in rows)
        assert asked == [50.0, None, None, 50.0, 50.0, None]


def test_the_gradient_is_the_models() -> None:
    shapes, gradient = model_gradient(MODEL, 4, seed=0)
    assert gradient.numel() % 4 == 0
    size = sum(map(math.prod, shapes))
    assert 0 <= gradient.numel() - size < 4
    assert gradient.isfinite().all()
    assert not gradient[size:].any()
    assert gradient.norm() > 0
    assert not torch.equal(gradient, model_gradient(MODEL, 4, seed=1)[1])


def test_a_slow_link_adds_its_bytes() -> None:
    row = Row(
        method="int8",
        mbit_per_s=None,
        num_elements=1,
        sent_bytes=1_000_000,
        fp32_bytes=4_000_000,
        message_error=0.0,
        sum_error=0.0,
        step_s=(0.3, 0.2, 0.5),
    )
    assert predicted_s(row, 8.0) == pytest.approx(1.2)
    assert row.ratio == 4


@pytest.mark.parametrize(
    ("key", "value"), [("num_ranks", 1), ("repeats", 0), ("compute_ms", -1.0), ("mbit_per_s", 0.5)]
)
def test_senseless_values_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        CompressionBenchConfig(**{key: value})  # type: ignore[arg-type]
