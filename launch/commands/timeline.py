"""Draws what each pipeline rank of a run did in one step: forward, backward, input and weight gradient,
and idle time by its cause (waiting to receive, to send, for parameters, for the reduction of gradients).
Below it stands the simulation of the same schedule at this step's mean costs. Prints seconds and share
of every cause on every rank; they add up to the step.
A run keeps the timeline of its last step; logger.timeline_interval_steps=50 keeps every fiftieth too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from counterflow.launch.command import A_RUN, Command, Help, LaunchOptions, Option, UsageError
from counterflow.launch.printing import new_table, print_lines, print_paths

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.metrics.timeline import Timeline

_HELP = Help(
    argument="RUN",
    about=__doc__ or "",
    examples=f"""
        counterflow timeline {A_RUN}  the last step of this run
        counterflow timeline {A_RUN} --step 50  an earlier one
        counterflow timeline {A_RUN} --json  the account as JSON""",
    output="""
        RUN/timeline/step-<n>: .svg, .png, .html (one page, zooms, needs no network), .trace.json (for
        ui.perfetto.dev), .json (the data).
        --json: step, step_s, makespan_s, bubble {measured, measured_span, simulated, simulated_span},
        work_inflation, account {category: seconds of each pipeline rank}, paths, ...""",
)
_FILES = {
    "json": "data",
    "trace": "for ui.perfetto.dev",
    "svg": "picture",
    "png": "picture",
    "html": "page with zoom, opens in any browser",
}


def read(words: Sequence[str]) -> Path:
    """The folder of the run."""
    from pathlib import Path

    if len(words) != 1:
        raise UsageError(
            f"timeline takes the folder of one run, not {len(words)} words, as in counterflow timeline {A_RUN}"
        )
    return Path(words[0])


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, as in --step 100")
    return int(text)


def run(run_dir: Path, options: LaunchOptions) -> dict[str, Any]:
    """Draw the timeline of --step (counted from 1; without it the last one recorded) of the run in `run_dir`.

    Writes SVG, PNG and HTML beside the step's JSON and Perfetto trace in `run_dir`/timeline; what `--json` prints.

    Raises ValueError: where the run has no timeline of that step, or its file is damaged.
    """
    from rich.console import Console

    from counterflow.framework.metrics.timeline import FOLDER, read_timeline, recorded_steps, step_name
    from counterflow.framework.metrics.timeline_render import write_files
    from counterflow.parallel.pipeline.ir.trace import CATEGORIES

    step: int | None = options.own["step"]
    recorded = [recorded + 1 for recorded in recorded_steps(run_dir)]
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such folder; name the folder of a run, as in {A_RUN}")
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
    paths = {"json": source} | write_files(
        timeline, run_dir.resolve(), [kind for kind in _FILES if kind != "json"]
    )
    accounts = timeline.accounts()
    console = Console()
    _print(console, timeline, accounts)
    print_paths(console, ((path, _FILES[kind]) for kind, path in paths.items()))
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
    from counterflow.parallel.pipeline.ir.trace import CATEGORIES

    table = new_table(
        f"step {timeline.step + 1}, {1e3 * timeline.step_s:.2f} ms: {timeline.schedule.name}, "
        f"{timeline.schedule.num_microbatches} micro-batches"
        + (f", {timeline.which_pipeline}" if timeline.which_pipeline else "")
        + "; milliseconds and share of the step",
        ("", *map(timeline.rank_name, range(len(timeline.traces)))),
        left=("",),
    )
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
    print_lines(
        console,
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
    )


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:10]))
    return shown if len(steps) <= 10 else f"{shown}, ... {steps[-1]}"


COMMAND = Command(
    name="timeline",
    summary="draw a step of a run, measured above simulated, and where its time went",
    help=_HELP,
    read=read,
    run=run,
    options=(
        Option(
            "--step",
            "timeline: which step, counted from 1; without it the last one kept",
            metavar="N",
            example="100",
            read=_step,
        ),
    ),
    takes_out=False,
)
