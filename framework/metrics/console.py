"""What a person sees while a run goes: a progress line, and a table at the end.

On a terminal one line is redrawn; elsewhere a line is written now and then, so that logs stay readable.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from counterflow.framework.metrics.record import RunSummary, StepRecord
from counterflow.framework.metrics.sinks import Status

_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS = "_.-~=*#@"
_SPARKLINE_WIDTH = 40
_LINES_PER_RUN = 20


class ConsoleSink:
    """A sink that draws. `stream` is where to: standard output, or standard error where that carries JSON.

    every: steps between two lines where the stream is no terminal; by default about twenty lines a run.
    first_step: the step a resumed run begins with.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        stream: TextIO | None = None,
        every: int | None = None,
    ) -> None:
        # Soft wrapping: a path cut in two lines cannot be copied, and a log has no width.
        self._console = Console(file=stream or sys.stdout, soft_wrap=True, highlight=False)
        self._total_steps = total_steps
        self._every = every or max(1, total_steps // _LINES_PER_RUN)
        self._losses: list[float] = []
        self._elapsed_s = 0.0
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=first_step, status="")
            self._progress.start()

    @property
    def folder(self) -> Path | None:
        return None

    def log(self, record: StepRecord) -> None:
        if record.skipped is not None:
            self._console.print(f"step {record.step + 1} skipped: {record.skipped}", markup=False)
        self._losses.append(record.loss)
        self._elapsed_s += record.step_s
        if self._progress is not None:
            if record.validation_loss is not None:
                self._progress.console.print(
                    f"step {record.step + 1}: validation loss {number(record.validation_loss)}"
                )
            self._progress.update(self._task, completed=record.step + 1, status=status_text(record))
        elif self._is_due(record):
            line = f"step {record.step + 1}/{self._total_steps}  {status_text(record)}"
            if record.validation_loss is not None:
                line += f"  validation {number(record.validation_loss)}"
            eta_s = self._elapsed_s / len(self._losses) * (self._total_steps - record.step - 1)
            self._console.print(f"{line}  eta {duration(eta_s)}", markup=False)

    def summary(self, summary: RunSummary) -> None:
        """Print the table of the finished run."""
        self._stop()
        sparks = _SPARKS if "utf" in (self._console.encoding or "").lower() else _ASCII_SPARKS
        curve = sparkline(self._losses, _SPARKLINE_WIDTH, sparks)
        bubble = summary.bubble
        rows = [
            ("loss", f"{number(summary.final_loss)}   {curve}"),
            ("validation loss", number(summary.validation_loss)),
            ("tokens/s", f"{summary.tokens_per_s:,.0f}"),
            ("steps", f"{summary.steps} in {duration(summary.seconds)}"),
            ("bubble, measured", percent(bubble.measured)),
            ("bubble, simulated", percent(bubble.simulated)),
            ("bubble, formula", percent(bubble.formula)),
            ("run folder", summary.run_dir),
            ("W&B folder", summary.wandb_dir or "none"),
        ]
        if summary.num_skipped:
            rows.insert(4, ("steps skipped", str(summary.num_skipped)))
        for name, value in rows:
            self._console.print(f"[bold]{name:<18}[/bold] {escape(value)}")

    def close(self, status: Status) -> None:
        self._stop()

    def _is_due(self, record: StepRecord) -> bool:
        step = record.step + 1
        first = len(self._losses) == 1
        return (
            first
            or step % self._every == 0
            or step == self._total_steps
            or record.validation_loss is not None
        )

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def status_text(record: StepRecord) -> str:
    """Loss, speed and bubble of a step, on one line."""
    bubble = percent(record.bubble_measured)
    host = "  bound by the host" if record.is_host_bound else ""
    return f"loss {number(record.loss)}  {record.tokens_per_s:,.0f} tokens/s  bubble {bubble}{host}"


def sparkline(values: Sequence[float], width: int, sparks: str = _SPARKS) -> str:
    """The curve of `values` in at most `width` characters, each the mean of its share; `!` where not finite."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(sparks) - 1) / (high - low) if high > low else 0.0
    return "".join(sparks[round((mean - low) * scale)] if abs(mean) < float("inf") else "!" for mean in means)


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{seconds:.1f} s" if seconds < 10 else f"{rest} s"
