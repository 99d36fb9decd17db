"""The loss picture of a run."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from counterflow.framework.metrics.plot import plot_loss, running_mean
from counterflow.framework.metrics.sinks import JsonlSink
from tests.framework.metrics.records import record


def write(folder: Path, losses: list[float], every: int = 10) -> None:
    sink = JsonlSink(folder)
    for step, loss in enumerate(losses):
        held_out = loss + 0.1 if step % every == every - 1 else None
        sink.log(record(step, loss=loss, validation_loss=held_out))
    sink.close("finished")


@pytest.mark.parametrize("steps", [1, 12, 200])
def test_both_curves_are_drawn(tmp_path: Path, steps: int) -> None:
    write(tmp_path, [2 + 6 * math.exp(-step / 30) for step in range(steps)])
    png, svg = plot_loss(tmp_path)
    pixels = matplotlib.image.imread(png)[..., :3]
    assert pixels.shape == (630, 1125, 3)

    def coloured(colour: str) -> int:
        target = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        return int((np.abs(pixels - target).max(axis=-1) < 0.02).sum())

    assert coloured("#3b6fb6") > 40
    assert (coloured("#d1662a") > 40) == (steps >= 10)
    text = svg.read_text()
    assert "loss (nats per token)" in text
    assert ("validation" in text) == (steps >= 10)


def test_the_same_run_gives_the_same_svg(tmp_path: Path) -> None:
    write(tmp_path, [3.0, 2.0, 1.0])
    first = plot_loss(tmp_path)[1].read_bytes()
    assert plot_loss(tmp_path)[1].read_bytes() == first


def test_losses_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, [3.0, math.nan, math.inf, 2.0])
    assert len(plot_loss(tmp_path)) == 2
    (tmp_path / "all-nan").mkdir()
    write(tmp_path / "all-nan", [math.nan])
    assert plot_loss(tmp_path / "all-nan") == ()
    (tmp_path / "empty").mkdir()
    assert plot_loss(tmp_path / "empty") == ()


def test_running_mean() -> None:
    assert running_mean([1, 2, 3, 4, 5], 1).tolist() == [1, 2, 3, 4, 5]
    assert running_mean([1, 2, 3, 4, 5], 3).tolist() == [1.5, 2, 3, 4, 4.5]
    assert running_mean([2, 4, 6, 8], 2).tolist() == [3, 5, 7, 8]
