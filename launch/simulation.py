"""What `counterflow simulate` finds out of a config's schedule, and the files that it writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
# What is written, and what it is.
FILES = {
    "svg": "timeline",
    "png": "timeline",
    "csv": "compute actions",
    "executable_csv": "all actions, with zero.stage=3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A schedule, proven and simulated. executable: as the runtime executes it, and executed: what becomes of that;
    None: the schedule is too large. copies: of activations that are offloaded.
    """

    schedule: Schedule
    executable: Schedule | None
    report: Report
    simulation: Simulation
    executed: Simulation | None
    formula: FormulaBubble | None
    copies: CopyModel | None
    volume: Volume
    notes: tuple[str, ...]


def simulate_config(config: TrainConfig) -> Simulated:
    """The configured schedule on the mesh's pipeline axis.

    Raises ValueError: sizes that the schedule does not fit, costs or a file that do not fit the schedule.
    """
    source = schedule_from(config.schedule, config.parallel.pipeline_parallel_size)
    schedule, notes = source.schedule, [source.note] if source.note else []
    workload = Workload.of(config)
    num_actions = sum(map(len, schedule.actions))
    report = verify(schedule)
    executable = copies = None
    if num_actions <= MAX_DRAWN:
        overlap = config.overlaps_experts
        executable = workload.offloaded(
            lower(schedule, zero_stage=3, early_sends=config.schedule.early_sends, overlap=overlap)
        )
        copies = copy_model(config, workload.activation_budget)
        report = verify(executable)
        if overlap and (reason := why_not_overlapped(executable)):
            notes.append(reason)
    else:
        notes.append(
            f"{num_actions} actions: proven and simulated as compute actions; above {MAX_DRAWN} the communication is "
            "not added and nothing is drawn (train adds and proves it); choose fewer ranks or micro-batches to see it"
        )
    costs = schedule_costs(workload, schedule)
    simulation = simulate(schedule, costs)
    formula = bubble_formula(schedule, costs)
    volume = _volume(config, schedule, executable, costs)
    if volume.data is None and config.parallel.data_parallel_size > 1:
        notes.append(
            f"bytes on the data axis are not counted: {_why_uncounted(config, schedule, num_actions)}"
        )
    return Simulated(
        schedule=schedule,
        executable=executable,
        report=report,
        simulation=simulation,
        executed=None if executable is None else simulate(executable, costs, copies),
        formula=formula,
        copies=copies,
        volume=volume,
        notes=tuple(notes),
    )


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
        executable = lower(
            schedule,
            zero_stage=zero.stage,
            reshard_after=[zero.reshard_after_of(rank) for rank in range(schedule.num_ranks)],
        )
    data = data_volume(
        executable,
        parameter_bytes=sizes.parameters,
        gradient_bytes=sizes.gradients,
        data_parallel_size=config.parallel.data_parallel_size,
        zero_stage=zero.stage,
        gathered_bytes=sizes.gathered(zero),
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


def write_files(found: Simulated, folder: Path) -> dict[str, Path | None]:
    """The files that the schedule is small enough for, under the names of `FILES`."""
    schedule, executable, simulation = found.schedule, found.executable, found.simulation
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{schedule.name}_p{schedule.num_ranks}_m{schedule.num_microbatches}"
    paths: dict[str, Path | None] = dict.fromkeys(FILES)
    if sum(map(len, schedule.actions)) <= MAX_WRITTEN:
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


def to_mapping(found: Simulated) -> dict[str, Any]:
    """What `--json` prints, but for the paths: schedule, num_stages, num_microbatches, makespan, idle and
    peak_activations per rank, bubble_makespan, bubble_span, bubble_formula (a share, or None), executed (makespan and
    bubbles of the schedule as the runtime executes it), offload, volume (bytes) and notes.
    """
    schedule, simulation, executed, copies = found.schedule, found.simulation, found.executed, found.copies
    volume, data = found.volume, found.volume.data
    return {
        "schedule": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "makespan": simulation.makespan,
        "idle": list(simulation.idle),
        "peak_activations": list(simulation.peak_activations),
        "bubble_makespan": simulation.bubble_makespan,
        "bubble_span": simulation.bubble_span,
        "bubble_formula": None if found.formula is None else found.formula.fraction,
        "executed": None
        if executed is None
        else {name: getattr(executed, name) for name in ("makespan", "bubble_makespan", "bubble_span")},
        "offload": None
        if executed is None or copies is None
        else {
            "budget_bytes": copies.budget_bytes,
            "peak_bytes": list(executed.peak_bytes),
            "num_moves": [len(of_rank) for of_rank in executed.copies],
            "stall": list(executed.stall),
        },
        "volume": {
            "forward_bytes": volume.forward_bytes,
            "backward_bytes": volume.backward_bytes,
            "total_bytes": sum(volume.by_axis.values()),
            "by_axis": volume.by_axis,
            "links": [asdict(link) for link in volume.links],
            "unshard_bytes": None if data is None else list(data.unshard_bytes),
            "reduce_bytes": None if data is None else list(data.reduce_bytes),
        },
        "notes": list(found.notes),
    }
