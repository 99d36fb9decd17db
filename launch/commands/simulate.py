"""`counterflow simulate`: generate a schedule, prove it, simulate it, draw it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.memory.offload import copy_model
from counterflow.framework.planning.costs import message_bytes, schedule_costs, stage_bytes
from counterflow.framework.planning.workload import Workload
from counterflow.models.partition import partition
from counterflow.parallel.pipeline.analysis.copy_timing import CopyModel
from counterflow.parallel.pipeline.analysis.costs import Costs
from counterflow.parallel.pipeline.analysis.draw import timeline_png, timeline_svg
from counterflow.parallel.pipeline.analysis.passes import lower, why_not_overlapped
from counterflow.parallel.pipeline.analysis.simulate import Simulation, simulate
from counterflow.parallel.pipeline.analysis.verify import Report, verify
from counterflow.parallel.pipeline.analysis.volume import Volume, data_volume, pipeline_volume
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.ir.text import to_csv
from counterflow.parallel.pipeline.schedules.definition import FormulaBubble
from counterflow.parallel.pipeline.schedules.registry import bubble_formula, schedule_from

# Compute actions up to which the executable form is made and proven as well, and the timeline drawn; and up to which
# the compute actions are written. Larger schedules are proven and simulated in a second or a few without them.
MAX_DRAWN, MAX_WRITTEN = 40_000, 400_000
_MAX_LINKS_SHOWN = 16


def run(config: TrainConfig, output_dir: Path, *, console: Console) -> dict[str, Any]:
    """Simulate the configured schedule on the mesh's pipeline axis; write its pictures and CSV to `output_dir`.

    Returns what `--json` prints: schedule, num_stages, num_microbatches, makespan, idle and peak_activations
    per rank, bubble_makespan, bubble_span, bubble_formula (a share, or None), executed (makespan and bubbles of the
    schedule as the runtime executes it), volume (bytes), notes, and the paths
    svg, png, csv and executable_csv (None for what was too large).

    Raises ValueError: sizes that the schedule does not fit, costs or a file that do not fit the schedule.
    """
    num_ranks = config.parallel.pipeline_parallel_size
    source = schedule_from(config.schedule, num_ranks)
    schedule, notes = source.schedule, [source.note] if source.note else []
    workload = Workload.of(config)
    num_actions = sum(map(len, schedule.actions))
    report = verify(schedule)
    executable = (
        lower(
            schedule,
            zero_stage=3,
            early_sends=config.schedule.early_sends,
            overlap=config.overlaps_experts,
        )
        if num_actions <= MAX_DRAWN
        else None
    )
    copies = None
    if executable is not None:
        executable = workload.offloaded(executable)
        copies = copy_model(config, workload.activation_budget)
        report = verify(executable)

    costs = schedule_costs(workload, schedule)
    simulation = simulate(schedule, costs)
    formula = bubble_formula(schedule, costs)
    volume = _volume(config, schedule, executable, costs)
    if config.overlaps_experts and executable is not None and (reason := why_not_overlapped(executable)):
        notes.append(reason)
    if executable is None:
        notes.append(
            f"{num_actions} actions: proven and simulated as compute actions; above {MAX_DRAWN} the communication is "
            "not added and nothing is drawn (train adds and proves it); choose fewer ranks or micro-batches to see it"
        )
    if volume.data is None and config.parallel.data_parallel_size > 1:
        notes.append(
            f"bytes on the data axis are not counted: {_why_uncounted(config, schedule, num_actions)}"
        )
    executed = None if executable is None else simulate(executable, costs, copies)
    _print(console, schedule, report, simulation, formula)
    if executed is not None and executed.makespan < simulation.makespan:
        console.print(
            f"as executed       makespan {executed.makespan:g}, bubble {executed.bubble_makespan:.4f}: results leave "
            "as soon as they are there (schedule.early_sends)",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if executed is not None and copies is not None:
        _print_offload(console, executed, copies)
    _print_volume(console, volume)
    for note in notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    paths = _write(output_dir, schedule, executable, simulation, num_actions)
    for what, path in paths.items():
        if path is not None:
            console.print(f"{path}  ({_FILES[what]})", soft_wrap=True, highlight=False, markup=False)
    return {
        "schedule": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "makespan": simulation.makespan,
        "idle": list(simulation.idle),
        "peak_activations": list(simulation.peak_activations),
        "bubble_makespan": simulation.bubble_makespan,
        "bubble_span": simulation.bubble_span,
        "bubble_formula": None if formula is None else formula.fraction,
        "executed": None
        if executed is None
        else {
            "makespan": executed.makespan,
            "bubble_makespan": executed.bubble_makespan,
            "bubble_span": executed.bubble_span,
        },
        "offload": None
        if executed is None or copies is None
        else {
            "budget_bytes": copies.budget_bytes,
            "peak_bytes": list(executed.peak_bytes),
            "num_moves": [len(of_rank) for of_rank in executed.copies],
            "stall": list(executed.stall),
        },
        "volume": _volume_mapping(volume),
        "notes": notes,
        **{what: None if path is None else str(path) for what, path in paths.items()},
    }


_FILES = {
    "svg": "timeline",
    "png": "timeline",
    "csv": "compute actions",
    "executable_csv": "all actions, with zero.stage=3",
}


def _write(
    output_dir: Path,
    schedule: Schedule,
    executable: Schedule | None,
    simulation: Simulation,
    num_actions: int,
) -> dict[str, Path | None]:
    """The files that the schedule is small enough for, under the names of `_FILES`."""
    output_dir.mkdir(parents=True, exist_ok=True)
    stem = output_dir / f"{schedule.name}_p{schedule.num_ranks}_m{schedule.num_microbatches}"
    paths: dict[str, Path | None] = dict.fromkeys(_FILES)
    if num_actions <= MAX_WRITTEN:
        paths["csv"] = csv = Path(f"{stem}.csv")
        csv.write_text(to_csv(schedule, compute_only=True), encoding="utf-8")
    if executable is None:
        return paths
    paths["executable_csv"] = executable_csv = Path(f"{stem}.executable.csv")
    executable_csv.write_text(to_csv(executable, compute_only=False), encoding="utf-8")
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} micro-batches, "
        f"makespan {simulation.makespan:g}, bubble {simulation.bubble_makespan:.1%}"
    )
    intervals = simulation.intervals
    paths["svg"], paths["png"] = svg, png = Path(f"{stem}.svg"), Path(f"{stem}.png")
    svg.write_text(timeline_svg(intervals, schedule=schedule, title=title, unit="time"), encoding="utf-8")
    timeline_png(intervals, png, schedule=schedule, title=title, unit="time")
    return paths


def _volume(config: TrainConfig, schedule: Schedule, executable: Schedule | None, costs: Costs) -> Volume:
    """Messages of the size that the costs give or, where they give none, of the model's; data axis where known."""
    if not costs.message_bytes:
        costs = replace(costs, message_bytes=float(message_bytes(config)))
    links = pipeline_volume(schedule, costs)
    sizes = stage_bytes(config, schedule.num_stages)
    if executable is None or sizes is None:
        return Volume(links=links)
    zero = config.zero
    if zero.stage != 3 or zero.reshard_after != "use":
        executable = lower(schedule, zero_stage=zero.stage, reshard_after=zero.reshard_after)
    data = data_volume(
        executable,
        parameter_bytes=sizes.parameters,
        gradient_bytes=sizes.gradients,
        data_parallel_size=config.parallel.data_parallel_size,
        zero_stage=zero.stage,
    )
    return Volume(links=links, data=data)


def _why_uncounted(config: TrainConfig, schedule: Schedule, num_actions: int) -> str:
    if num_actions > MAX_DRAWN:
        return (
            f"the schedule has {num_actions} actions, above the {MAX_DRAWN} to which the data axis is added"
        )
    try:
        partition(
            config.model,
            schedule.num_stages,
            seq_length=config.data.seq_length,
            vocab_size=config.expected_vocab_size,
        )
    except ValueError as error:
        return f"the model does not divide into the schedule's {schedule.num_stages} stages ({error})"
    raise AssertionError("the bytes of this schedule are counted")


def _print_offload(console: Console, executed: Simulation, copies: CopyModel) -> None:
    """Of each rank, what the budget leaves it and costs it."""
    table = Table(
        title=f"activations offloaded, at most {readable_bytes(copies.budget_bytes)} on a rank",
        title_justify="left",
    )
    for column in ("rank", "peak", "moves", "stall"):
        table.add_column(column, justify="right")
    for rank, (peak, moves, stall) in enumerate(
        zip(executed.peak_bytes, executed.copies, executed.stall, strict=True)
    ):
        table.add_row(str(rank), readable_bytes(peak), str(len(moves)), f"{stall:g}")
    table.caption = "moves: OFFLOAD and RELOAD; stall: time that actions wait for them"
    console.print(table)


def _volume_mapping(volume: Volume) -> dict[str, Any]:
    data = volume.data
    return {
        "forward_bytes": volume.forward_bytes,
        "backward_bytes": volume.backward_bytes,
        "total_bytes": sum(volume.by_axis.values()),
        "by_axis": volume.by_axis,
        "links": [asdict(link) for link in volume.links],
        "unshard_bytes": None if data is None else list(data.unshard_bytes),
        "reduce_bytes": None if data is None else list(data.reduce_bytes),
    }


def _print_volume(console: Console, volume: Volume) -> None:
    """Bytes by link, then by axis: of one pipeline and one step."""
    if volume.links:
        table = Table(title="bytes sent in a step, one pipeline", title_justify="left")
        for column in ("link", "messages", "forward", "backward", "together"):
            table.add_column(column, justify="right")
        for link in volume.links[:_MAX_LINKS_SHOWN]:
            sizes = (link.forward_bytes, link.backward_bytes, link.forward_bytes + link.backward_bytes)
            table.add_row(
                f"{link.source} -> {link.target}", str(link.num_messages), *map(readable_bytes, sizes)
            )
        if len(volume.links) > _MAX_LINKS_SHOWN:
            table.add_row(f"... {len(volume.links) - _MAX_LINKS_SHOWN} more", "", "", "", "")
        console.print(table)
    lines = [
        f"bytes, pipeline    forward {readable_bytes(volume.forward_bytes)}, backward "
        f"{readable_bytes(volume.backward_bytes)}, in all {readable_bytes(volume.by_axis['pipeline'])}"
    ]
    if (data := volume.data) is not None:
        lines.append(
            f"bytes, data        unshard {readable_bytes(sum(data.unshard_bytes))}, reduce "
            f"{readable_bytes(sum(data.reduce_bytes))}, in all {readable_bytes(volume.by_axis['data'])}"
        )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def readable_bytes(count: float) -> str:
    """As `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes any count")


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
        caption="times in the unit of schedule.costs (a profile's: seconds); peaks count micro-batches of a stage",
        caption_justify="left",
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
        "buffered or blocking sends"
        if report.executable
        else "verified          every micro-batch, every order",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
