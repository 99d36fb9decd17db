"""Generates the schedule, proves it (every micro-batch once, no deadlock), runs it on a simulated clock
with the costs you give, and draws the timeline. Looks at the pipeline's size and the schedule only:
the model need not fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterflow.launch.command import Command, Help, LaunchOptions
from counterflow.launch.printing import new_table, print_lines, print_paths, readable_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.config.tree import TrainConfig
    from counterflow.launch.simulation import Simulated
    from counterflow.parallel.pipeline.analysis.copy_timing import CopyModel
    from counterflow.parallel.pipeline.analysis.simulate import Simulation
    from counterflow.parallel.pipeline.analysis.volume import Volume

_MAX_LINKS_SHOWN = 16
_HELP = Help(
    about=__doc__ or "",
    keys="""
        schedule=dualpipe  1f1b, zbv, dualpipe, ..., auto, csv (a wrong name lists all)
        parallel.pipeline_parallel_size=8  pipeline ranks
        schedule.num_microbatches=20  micro-batches of a step, both directions
        schedule.costs.profile=FILE  costs that `counterflow profile` measured
        schedule.costs.forward=1  time of a forward; [1,2,1,1] gives one per stage
        schedule.costs.input_gradient=1  time of an input gradient
        schedule.costs.weight_gradient=1  time of a weight gradient
        schedule.costs.pair=2  time of an overlapped pair (null: nothing hidden)
        schedule.path=FILE  with schedule=csv: one row per rank, as torch.distributed.pipelining writes""",
    examples="""
        counterflow simulate schedule=dualpipe parallel.pipeline_parallel_size=8 schedule.num_microbatches=20  \
makespan 66, 6 idle
        counterflow simulate schedule=1f1b schedule.costs.weight_gradient=0.8  other costs
        counterflow simulate --json -m schedule=gpipe,1f1b,dualpipe schedule.num_microbatches=8,16,32  \
a table of nine""",
    output="""
        runs/simulate-<schedule>-p<ranks>-m<micro-batches>-<hash>/ (or --out): timeline as SVG and PNG, the
        actions as CSV. --json: makespan, idle, peak_activations, bubble_makespan, bubble_span, volume, ...""",
)


def check(config: TrainConfig) -> None:
    """Raises ValueError: for sizes that the schedule does not take."""
    from counterflow.framework.checks.rules import build_schedule

    build_schedule(config.schedule, config.parallel)


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """`simulate_to`, into the folder of this schedule and these costs, whose pictures are the same each time."""
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.config.mapping import config_hash

    schedule = config.schedule
    name = f"{schedule.name}-p{config.parallel.pipeline_parallel_size}-m{schedule.num_microbatches}"
    folder = Path(config.launcher.runs_dir) / f"simulate-{name}-{config_hash(schedule)[:8]}"
    return simulate_to(options.out or folder, config, console=Console())


def simulate_to(folder: Path, config: TrainConfig, *, console: Console) -> dict[str, Any]:
    """Simulate the configured schedule; print what was found, write its pictures and CSV to `folder`.

    Returns what `--json` prints: see `to_mapping`, and the paths svg, png, csv and executable_csv (None for what was
    too large).

    Raises ValueError: see `simulate_config`.
    """
    from counterflow.launch.simulation import FILES, simulate_config, to_mapping, write_files

    found = simulate_config(config)
    _print(console, found)
    paths = write_files(found, folder)
    print_paths(console, ((path, FILES[what]) for what, path in paths.items() if path is not None))
    return to_mapping(found) | {what: None if path is None else str(path) for what, path in paths.items()}


def _print(console: Console, found: Simulated) -> None:
    schedule, simulation, executed = found.schedule, found.simulation, found.executed
    table = new_table(
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} micro-batches",
        ("rank", "stages", "busy", "idle", "peak activations", "peak held weight gradients"),
        caption="times in the unit of schedule.costs (a profile's: seconds); peaks count micro-batches of a stage",
        caption_justify="left",
    )
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
    formula, report = found.formula, found.report
    print_lines(
        console,
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
    )
    if executed is not None and executed.makespan < simulation.makespan:
        print_lines(
            console,
            f"as executed       makespan {executed.makespan:g}, bubble {executed.bubble_makespan:.4f}: results leave "
            "as soon as they are there (schedule.early_sends)",
        )
    if executed is not None and found.copies is not None:
        _print_offload(console, executed, found.copies)
    _print_volume(console, found.volume)
    print_lines(console, *(f"note: {note}" for note in found.notes))


def _print_offload(console: Console, executed: Simulation, copies: CopyModel) -> None:
    """Of each rank, what the budget leaves it and costs it."""
    title = f"activations offloaded, at most {readable_bytes(copies.budget_bytes)} on a rank"
    table = new_table(title, ("rank", "peak", "moves", "stall"))
    for rank, (peak, moves, stall) in enumerate(
        zip(executed.peak_bytes, executed.copies, executed.stall, strict=True)
    ):
        table.add_row(str(rank), readable_bytes(peak), str(len(moves)), f"{stall:g}")
    table.caption = "moves: OFFLOAD and RELOAD; stall: time that actions wait for them"
    console.print(table)


def _print_volume(console: Console, volume: Volume) -> None:
    """Bytes by link, then by axis: of one pipeline and one step."""
    if volume.links:
        columns = ("link", "messages", "forward", "backward", "together")
        table = new_table("bytes sent in a step, one pipeline", columns)
        for link in volume.links[:_MAX_LINKS_SHOWN]:
            sizes = (link.forward_bytes, link.backward_bytes, link.forward_bytes + link.backward_bytes)
            table.add_row(
                f"{link.source} -> {link.target}", str(link.num_messages), *map(readable_bytes, sizes)
            )
        if len(volume.links) > _MAX_LINKS_SHOWN:
            table.add_row(f"... {len(volume.links) - _MAX_LINKS_SHOWN} more", "", "", "", "")
        console.print(table)
    print_lines(
        console,
        f"bytes, pipeline    forward {readable_bytes(volume.forward_bytes)}, backward "
        f"{readable_bytes(volume.backward_bytes)}, in all {readable_bytes(volume.by_axis['pipeline'])}",
    )
    if (data := volume.data) is not None:
        print_lines(
            console,
            f"bytes, data        unshard {readable_bytes(sum(data.unshard_bytes))}, reduce "
            f"{readable_bytes(sum(data.reduce_bytes))}, in all {readable_bytes(volume.by_axis['data'])}",
        )


COMMAND = Command(
    name="simulate",
    summary="prove, simulate and draw a pipeline schedule; starts no rank",
    help=_HELP,
    run=run,
    check=check,
    columns=("makespan", "idle", "peak_activations", "bubble_makespan", "bubble_span"),
)
