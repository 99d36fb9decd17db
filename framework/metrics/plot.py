"""The loss curve of a run as a picture, from its own records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from counterflow.framework.metrics.sinks import METRICS_FILE, iterate_records

_INK, _MUTED, _GRID = "#222222", "#666666", "#dddddd"
_TRAIN, _VALIDATION = "#3b6fb6", "#d1662a"


def plot_loss(run_dir: Path) -> tuple[Path, ...]:
    """Write `loss.png` and `loss.svg` into `run_dir` from its metrics.jsonl, and return their paths.

    Training loss of each step, with a running mean once there are enough, and validation loss where it was
    evaluated. Returns () where no step has a finite loss.
    Raises ValueError: where the records are damaged.
    """
    path = run_dir / METRICS_FILE
    steps: list[int] = []
    losses: list[float] = []
    held_out: list[tuple[int, float]] = []
    for record in iterate_records(path) if path.exists() else ():
        if math.isfinite(record.loss):
            steps.append(record.step + 1)
            losses.append(record.loss)
            if record.validation_loss is not None:
                held_out.append((record.step + 1, record.validation_loss))
    if not steps:
        return ()

    # Not above: of all ranks one draws, once.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.5, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    window = max(1, len(losses) // 40)
    if window > 1:
        axes.plot(steps, losses, color=_TRAIN, alpha=0.3, linewidth=0.8)
        axes.plot(
            steps,
            running_mean(losses, window),
            color=_TRAIN,
            linewidth=1.8,
            label=f"train (mean of {window} steps)",
        )
    else:
        axes.plot(
            steps,
            losses,
            color=_TRAIN,
            linewidth=1.8,
            marker="o" if len(steps) == 1 else "",
            label="train",
        )
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True),
            color=_VALIDATION,
            linewidth=1.2,
            marker="o",
            markersize=5,
            linestyle="-" if len(held_out) > 1 else "",
            label="validation",
            clip_on=False,
        )
    last = [f"train {losses[-1]:.3f}"] + ([f"validation {held_out[-1][1]:.3f}"] if held_out else [])
    axes.set_title(f"{run_dir.name}: {', '.join(last)}", loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("step", color=_MUTED)
    axes.set_ylabel("loss (nats per token)", color=_MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=_MUTED)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GRID)
    axes.legend(frameon=False, labelcolor=_INK)

    paths = (run_dir / "loss.png", run_dir / "loss.svg")
    # Text stays text in the SVG, and the same run gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "counterflow"}):
        figure.savefig(paths[0])
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def running_mean(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """The mean of `window` values around each point, of fewer at both ends."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    points = np.arange(len(values))
    begin = np.maximum(points - (window - 1) // 2, 0)
    end = np.minimum(points + window // 2 + 1, len(values))
    return (sums[end] - sums[begin]) / (end - begin)
