"""`counterflow timeline RUN`: draw a step of a run, measured above simulated, and tell where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from counterflow.framework.metrics.timeline import FOLDER, Timeline, read_timeline, recorded_steps, step_name
from counterflow.framework.metrics.timeline_render import write_files
from counterflow.parallel.pipeline.ir.trace import CATEGORIES

_PICTURES = {"svg": "picture", "png": "picture", "html": "page with zoom, opens in any browser"}


def run(run_dir: Path, step: int | None = None, *, console: Console | None = None) -> dict[str, Any]:
    """Draw the timeline of `step` (counted from 1; None: the last one recorded) of the run in `run_dir`.

    Writes SVG, PNG and HTML beside the step's JSON and Perfetto trace in `run_dir`/timeline. Returns what
    `--json` prints: run_dir, step, schedule, alignment, step_s, makespan_s, bubble {measured, measured_span,
    simulated, simulated_span}, work_inflation, account {category: [seconds of each pipeline rank]}, global_ranks,
    num_pipelines, peak_live_activations and peak_held_weight_grad_bytes per rank, and the paths json, trace, svg,
    png, html.

    Raises ValueError: where the run has no timeline of that step, or its file is damaged.
    """
    recorded = [recorded + 1 for recorded in recorded_steps(run_dir)]
    if not run_dir.is_dir():
        raise ValueError(
            f"{run_dir}: no such folder; name the folder of a run, as in runs/20260131-120000-1a2b3c4d"
        )
    if not recorded:
        raise ValueError(
            f"{run_dir}: the run has no timelines; they are written at the last step, and every "
            "logger.timeline_interval_steps=N steps, unless that is 0 or logger=none"
        )
    step = recorded[-1] if step is None else step
    if step not in recorded:
        raise ValueError(
            f"--step {step}: the run has timelines of step {_listed(recorded)}; name one of them, or set "
            "logger.timeline_interval_steps=N to keep more"
        )
    stem = run_dir / FOLDER / step_name(step - 1)
    source = stem.parent / f"{stem.name}.json"
    timeline = read_timeline(source)
    paths = {"json": source} | write_files(timeline, run_dir.resolve(), ("trace", *_PICTURES))
    accounts = timeline.accounts()
    if console is not None:
        _print(console, timeline, accounts)
        for kind, path in paths.items():
            what = {"json": "data", "trace": "for ui.perfetto.dev", **_PICTURES}[kind]
            console.print(f"{path}  ({what})", soft_wrap=True, highlight=False, markup=False)
    simulation = timeline.simulation
    return {
        "run_dir": str(run_dir),
        "step": step,
        "schedule": timeline.schedule.name,
        "global_ranks": list(timeline.global_ranks),
        "num_pipelines": timeline.num_pipelines,
        "alignment": timeline.clock.alignment,
        "step_s": timeline.step_s,
        "makespan_s": timeline.makespan_s,
        "bubble": {
            "measured": timeline.bubble_makespan,
            "measured_span": timeline.bubble_span,
            "simulated": simulation.bubble_makespan,
            "simulated_span": simulation.bubble_span,
        },
        "work_inflation": timeline.work_inflation,
        "account": {category: [account[category] for account in accounts] for category in CATEGORIES},
        "peak_live_activations": [trace.peak_live_activations for trace in timeline.traces],
        "peak_held_weight_grad_bytes": [trace.peak_held_weight_grad_bytes for trace in timeline.traces],
        **{kind: str(path) for kind, path in paths.items()},
    }


def _print(console: Console, timeline: Timeline, accounts: Sequence[dict[str, float]]) -> None:
    table = Table(
        title=f"step {timeline.step + 1}, {1e3 * timeline.step_s:.2f} ms: {timeline.schedule.name}, "
        f"{timeline.schedule.num_microbatches} micro-batches"
        + (f", {timeline.which_pipeline}" if timeline.which_pipeline else "")
        + "; milliseconds and share of the step",
        title_justify="left",
    )
    table.add_column("")
    for rank in range(len(timeline.traces)):
        table.add_column(timeline.rank_name(rank), justify="right")
    for category in CATEGORIES:
        times = [account[category] for account in accounts]
        if any(times):
            cells = [f"{1e3 * time:.2f}  {time / timeline.step_s:4.0%}" for time in times]
            table.add_row(category.replace("_", " "), *cells)
    table.add_section()
    table.add_row("live activations, peak", *(str(trace.peak_live_activations) for trace in timeline.traces))
    if any(held := [trace.peak_held_weight_grad_bytes for trace in timeline.traces]):
        table.add_row("held for weight gradients, peak", *(f"{count / 2**20:.2f} MiB" for count in held))
    console.print(table)
    simulation, inflation = timeline.simulation, timeline.work_inflation
    lines = [
        f"bubble by makespan  measured {timeline.bubble_makespan:.1%}, simulated {simulation.bubble_makespan:.1%}   "
        "1 - mean busy / longest time from a rank's first action to its last gradient reduction",
        f"bubble by span      measured {timeline.bubble_span:.1%}, simulated {simulation.bubble_span:.1%}   "
        "1 - mean busy / longest time from a rank's first compute action to its last",
        "work inflation      "
        + (
            "not defined: no stage ran B as well as I and W"
            if inflation is None
            else f"{inflation:.3f}   (I + W) / B, means of the stages that ran all three"
        ),
        "simulated           the same schedule at this step's mean cost per stage and kind, no communication",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:10]))
    return shown if len(steps) <= 10 else f"{shown}, ... {steps[-1]}"
