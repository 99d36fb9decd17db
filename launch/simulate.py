"""`counterflow simulate`: generate a schedule, prove it, simulate it, draw it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parallel.mesh import MeshConfig
from parallel.pipeline.action import Schedule
from parallel.pipeline.config import ScheduleConfig
from parallel.pipeline.draw import timeline_png, timeline_svg
from parallel.pipeline.generate import generate
from parallel.pipeline.passes import lower
from parallel.pipeline.simulate import FormulaBubble, Simulation, bubble_formula, costs_from, simulate
from parallel.pipeline.text import to_csv
from parallel.pipeline.verify import Report, verify


def run(
    schedule_config: ScheduleConfig, mesh: MeshConfig, output_dir: Path, *, console: Console
) -> dict[str, Any]:
    """Simulate the configured schedule on the mesh's pipeline axis; write its pictures and CSV to `output_dir`.

    Returns what `--json` prints: schedule, num_stages, num_microbatches, makespan, idle and peak_activations
    per rank, bubble_makespan, bubble_span, bubble_formula (a share, or None), and the paths svg, png, csv and
    executable_csv.

    Raises ValueError: sizes that the schedule does not fit.
    """
    num_ranks, num_microbatches = mesh.pipeline_parallel_size, schedule_config.num_microbatches
    schedule = generate(
        schedule_config.name, num_ranks, num_microbatches, num_chunks=schedule_config.num_chunks
    )
    verify(schedule)
    executable = lower(schedule, zero_stage=3)
    report = verify(executable)

    costs = costs_from(schedule_config.costs, schedule.num_stages)
    simulation = simulate(schedule, costs)
    formula = bubble_formula(schedule.name, num_ranks, num_microbatches, costs)
    _print(console, schedule, report, simulation, formula)

    output_dir.mkdir(parents=True, exist_ok=True)
    stem = output_dir / f"{schedule.name}_p{num_ranks}_m{num_microbatches}"
    svg, png, csv = (Path(f"{stem}.{suffix}") for suffix in ("svg", "png", "csv"))
    executable_csv = Path(f"{stem}.executable.csv")
    title = (
        f"{schedule.name}: {num_ranks} ranks, {num_microbatches} micro-batches, "
        f"makespan {simulation.makespan:g}, bubble {simulation.bubble_makespan:.1%}"
    )
    svg.write_text(
        timeline_svg(simulation.intervals, schedule=schedule, title=title, unit="time"), encoding="utf-8"
    )
    timeline_png(simulation.intervals, png, schedule=schedule, title=title, unit="time")
    csv.write_text(to_csv(schedule, compute_only=True), encoding="utf-8")
    executable_csv.write_text(to_csv(executable, compute_only=False), encoding="utf-8")
    for what, path in (
        ("timeline", svg),
        ("timeline", png),
        ("compute actions", csv),
        ("all actions, with zero.stage=3", executable_csv),
    ):
        console.print(f"{path}  ({what})", soft_wrap=True, highlight=False, markup=False)
    return {
        "schedule": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": num_microbatches,
        "makespan": simulation.makespan,
        "idle": list(simulation.idle),
        "peak_activations": list(simulation.peak_activations),
        "bubble_makespan": simulation.bubble_makespan,
        "bubble_span": simulation.bubble_span,
        "bubble_formula": None if formula is None else formula.fraction,
        "svg": str(svg),
        "png": str(png),
        "csv": str(csv),
        "executable_csv": str(executable_csv),
    }


def _print(
    console: Console,
    schedule: Schedule,
    report: Report,
    simulation: Simulation,
    formula: FormulaBubble | None,
) -> None:
    table = Table(
        title=f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} micro-batches",
        title_justify="left",
    )
    for column in ("rank", "stages", "busy", "idle", "peak activations", "peak held weight gradients"):
        table.add_column(column, justify="right")
    for rank in range(schedule.num_ranks):
        table.add_row(
            str(rank),
            ", ".join(map(str, schedule.stages_of(rank))),
            f"{simulation.busy[rank]:g}",
            f"{simulation.idle[rank]:g}",
            str(simulation.peak_activations[rank]),
            str(simulation.peak_held_weight_gradients[rank]),
        )
    console.print(table)
    lines = [
        f"makespan          {simulation.makespan:g}",
        f"bubble, makespan  {simulation.bubble_makespan:.4f}  1 - mean busy / makespan",
        f"bubble, span      {simulation.bubble_span:.4f}  1 - mean busy / longest time from a rank's first action "
        "to its last",
        "bubble, formula   none is published for this schedule"
        if formula is None
        else f"bubble, formula   {formula.fraction:.4f}  {formula.text} = {formula.idle:g} idle per rank; "
        "exact for equal stages in the balanced case only",
        f"verified          every micro-batch, {report.num_messages} messages between ranks, no deadlock with "
        "buffered or blocking sends",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
