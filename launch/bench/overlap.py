"""Steps with overlapped pairs and without by turns, on four ranks over a slow network (namespaces where they
are allowed, else a wait per byte): the share of the exchange that is hidden, and what a step gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from counterflow.framework.bench.config import OverlapBenchConfig
from counterflow.launch.bench.bench import Bench
from counterflow.launch.printing import new_table, pyplot, save_picture, values_of

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.bench.overlap import Row, Workload
    from counterflow.parallel.pipeline.ir.trace import Trace

TARGET_HIDDEN, TARGET_SPEEDUP = 0.85, 1.25


def measure(config: OverlapBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Measure, print a table, draw the last steps; what --json prints.

    Raises ValueError: where namespaces are asked for and cannot be made. RunFailedError: where a rank fails.
    """
    from counterflow.framework.bench.network import why_not
    from counterflow.framework.bench.overlap import NUM_RANKS, Workload, measure_overlap, sleeping_workload
    from counterflow.launch.bench.ranks import run_ranks

    reason = None if config.network == "injected" else why_not()
    if config.network == "namespaces" and reason is not None:
        raise ValueError(
            f"network=namespaces: {reason}; set network=injected, which waits per byte in the exchange instead"
        )
    is_injected = config.network == "injected" or reason is not None
    bytes_per_s = config.mbit_per_s * 1e6 / 8
    if is_injected:
        network = (
            f"injected: tokens wait {1e9 / bytes_per_s:.1f} ns a byte for {config.mbit_per_s:g} Mbit/s; messages "
            "between stages do not"
        )
    else:
        network = f"namespaces: every rank sends at most {config.mbit_per_s:g} Mbit/s, whatever it sends"
    if reason is not None:
        network += f" (no emulated link: {reason})"
    workloads: list[Workload] = []
    if config.mode in ("sleep", "both"):
        workloads.append(sleeping_workload(config.phase_ms / 1e3, config.alltoall_share, bytes_per_s))
    if config.mode in ("compute", "both"):
        workloads.append(Workload(phase_s=0.0, tokens=config.tokens))
    console.print(
        f"{NUM_RANKS} ranks, 2 of the pipeline by 2 that exchange tokens; {network}\n{config.repeats} steps with "
        "overlap and as many without are counted, in turn",
        highlight=False,
        soft_wrap=True,
    )
    rows: list[Row] = []
    for workload in workloads:
        rows += run_ranks(
            partial(measure_overlap, injected_bytes_per_s=bytes_per_s if is_injected else None, report=_say),
            (config.schedules, config.num_microbatches, config.repeats, workload),
            num_ranks=NUM_RANKS,
            folder=folder,
            mbit_per_s=None if is_injected else config.mbit_per_s,
        )
    mappings = [_mapping(row) for row in rows]
    _print(mappings, console)
    pictures = [str(draw(row, folder / f"overlap_{row.schedule}_{row.compute}.png", network)) for row in rows]
    return {"network": network, "rows": mappings, "png": pictures}


def _say(row: Row) -> None:
    print(
        f"  {row.schedule}, {row.compute}: {row.hidden_share:.1%} of the all-to-all hidden, "
        f"{row.speedup:.2f} x as fast",
        flush=True,
    )


def _mapping(row: Row) -> dict[str, Any]:
    return {
        **values_of(row, "schedule", "compute", "num_stages", "num_microbatches", "alltoall_share"),
        **values_of(row, "hidden_share", "hidden_share_of_step", "speedup", "speedup_of_minima"),
        "hidden_share_least": min(row.hidden_shares),
        "step_s": [each.step_s for each in row.with_overlap],
        "step_s_without": [each.step_s for each in row.without],
        "num_handovers": row.with_overlap[0].num_handovers,
    }


def _print(rows: Sequence[dict[str, Any]], console: Console) -> None:
    import statistics

    names = ("schedule", "compute")
    columns = (*names, "share", "hidden", "step s", "without", "ratio", "minima")
    table = new_table("all-to-all under computation, and what it gains", columns, left=names, no_wrap=True)
    for row in rows:
        table.add_row(
            row["schedule"],
            row["compute"],
            *(f"{row[name]:.1%}" for name in ("alltoall_share", "hidden_share")),
            f"{statistics.median(row['step_s']):.3f}",
            f"{statistics.median(row['step_s_without']):.3f}",
            f"{row['speedup']:.2f}",
            f"{row['speedup_of_minima']:.2f}",
        )
    table.caption = (
        "share: of the all-to-all in a layer's time without overlap; hidden: of it, in the steady state; medians\n"
        f"aims in dualpipe: hidden at least {TARGET_HIDDEN:.0%}, ratio at least {TARGET_SPEEDUP}"
    )
    console.print(table)


def draw(row: Row, path: Path, network: str) -> Path:
    """The last step without overlap above the one with it, on one scale; one rank of each pipeline rank."""
    from matplotlib.patches import Patch

    from counterflow.framework.bench.overlap import EXPERT_RANKS
    from counterflow.framework.metrics.timeline_scene import WAIT_COLOURS
    from counterflow.parallel.pipeline.analysis.draw import COLOURS
    from counterflow.parallel.pipeline.ir.action import Kind
    from counterflow.parallel.pipeline.ir.trace import COMPUTE_ACTIVITIES, Activity, exclusive

    colours: dict[Activity, str] = {
        activity: COLOURS[Kind(activity.value)] for activity in COMPUTE_ACTIVITIES
    } | WAIT_COLOURS
    panels: tuple[tuple[str, tuple[Trace, ...]], ...] = (
        ("without overlap", row.traces_without),
        ("with overlap", row.traces_with),
    )
    length = max(trace.step_s for _, traces in panels for trace in traces)
    middle = min(trace.step_s for trace in row.traces_with) / 2
    figure, grid = pyplot().subplots(2, 2, figsize=(15, 4.6), layout="constrained", sharex="col")
    seen: set[Activity] = set()
    for (title, traces), of_panel in zip(panels, grid, strict=True):
        for axes, limits in zip(of_panel, ((0, length), (middle, middle + length / 12)), strict=True):
            for place, trace in enumerate(traces[::EXPERT_RANKS]):
                for interval in exclusive(trace.intervals):
                    seen.add(interval.activity)
                    axes.broken_barh(
                        [(interval.start_s, interval.duration_s)],
                        (-place - 0.4, 0.8),
                        facecolors=colours[interval.activity],
                    )
            axes.set_xlim(limits)
            ranks = range(len(traces[::EXPERT_RANKS]))
            axes.set_yticks([-float(place) for place in ranks], [f"pipeline rank {place}" for place in ranks])
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(title if axes is of_panel[0] else f"{title}, a part", loc="left", fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("s")
    figure.legend(
        handles=[
            Patch(color=colours[activity], label=activity.category.replace("_", " "))
            for activity in Activity
            if activity in seen
        ],
        loc="outside lower center",
        ncols=8,
        frameon=False,
    )
    figure.suptitle(
        f"{row.schedule}, {row.num_microbatches} micro-batches, {row.compute} compute: {row.hidden_share:.0%} of the "
        f"all-to-all hidden in the steady state, step {row.speedup:.2f} x as fast\n{network}",
        fontsize=11,
    )
    return save_picture(figure, path, dpi=130)


BENCH = Bench(
    name="overlap",
    summary="how much of the experts' exchange of tokens the pairs of a schedule hide",
    about=__doc__ or "",
    examples="""
        counterflow bench overlap  dualpipe; about two minutes
        counterflow bench overlap schedules=[dualpipe_v,interleaved_1f1b]  two others""",
    output="""
        rows.json, overlap_*.png and .svg: a step with overlap above one without.
        --json: rows [{schedule, alltoall_share, hidden_share, speedup, step_s, step_s_without, ...}].""",
    keys=OverlapBenchConfig,
    measure=measure,
)
