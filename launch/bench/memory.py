"""Steps of one small Llama that keeps everything, recomputes its attention or all of it, and offloads by lru
and by schedule within budgets, in turn: the most activations of each rank beside what is predicted, the
time of a step, and what copies make it wait. Copies are held to a rate at which they matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from counterflow.framework.bench.config import MemoryBenchConfig
from counterflow.launch.bench.bench import Bench
from counterflow.launch.printing import new_table, pyplot, save_picture, values_of

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.bench.memory import Row

_COLOURS = {"none": "#66707c", "lru": "#d9772b", "schedule": "#2f6db5"}


def measure(config: MemoryBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Measure, print a table and draw; what --json prints.

    Raises ValueError: for sizes that the schedule does not take, or a budget that a rank cannot keep within.
    RunFailedError: where a rank fails.
    """
    import shutil

    from counterflow.framework.bench.memory import base_config, cases_of, measure_memory
    from counterflow.framework.data.prepare import prepare
    from counterflow.launch.bench.ranks import run_ranks

    base = base_config(config, folder)
    cases = cases_of(config, base, folder)
    data = prepare(base.data, base.tokenizer, global_batch_size=base.global_batch_size)
    console.print(
        f"{config.schedule} on {config.num_ranks} ranks, {config.num_microbatches} micro-batches of {config.tokens} "
        f"tokens; {len(cases)} cases, {config.repeats} steps of each are counted, in turn; copies to the {config.tier} "
        f"take {config.copy_share:g} of the forward that they are of",
        highlight=False,
        soft_wrap=True,
    )
    try:
        measured: tuple[list[Row], float] = run_ranks(
            measure_memory, (config, cases, data, _say), num_ranks=config.num_ranks, folder=folder
        )
    finally:
        shutil.rmtree(folder / "data", ignore_errors=True)
    rows, rate = measured
    mapped = [_mapping(row, rows[0]) for row in rows]
    _print(mapped, console)
    return {"rows": mapped, "copy_bytes_per_s": rate, "png": str(_draw(mapped, folder / "memory.png"))}


def _say(row: Row) -> None:
    print(f"  {row.name}: {max(row.peak_bytes) / 2**20:.1f} MiB of activations at most", flush=True)


def _mapping(row: Row, none: Row) -> dict[str, Any]:
    import statistics

    from counterflow.framework.bench.memory import step_ratio

    return {
        **values_of(
            row, "name", "policy", "budget_share", "budget_bytes", "peak_bytes", "simulated_peak_bytes"
        ),
        **values_of(row, "prediction_error", "simulated_stall_s", "moved_bytes", "hit_rate", "step_s"),
        "step_ratio": step_ratio(row, none),
        "median_step_s": statistics.median(row.step_s),
        "stall_s": statistics.median(row.stall_s),
    }


def _print(rows: Sequence[dict[str, Any]], console: Console) -> None:
    of_activations = ("MiB by rank", "predicted", "budget")
    of_time = ("step", "stall, ms", "predicted", "moved, MiB", "hits")
    title = "activations of a rank, and the time of a step"
    table = new_table(title, ("case", *of_activations, *of_time), left=("case",))
    for row in rows:
        is_moved = row["budget_bytes"] is not None
        table.add_row(
            row["name"],
            " ".join(f"{size / 2**20:.1f}" for size in row["peak_bytes"]),
            " ".join(f"{size / 2**20:.1f}" for size in row["simulated_peak_bytes"]),
            f"{row['budget_bytes'] / 2**20:.1f}" if is_moved else "",
            f"{row['step_ratio']:.3f}",
            f"{1e3 * row['stall_s']:.0f}" if is_moved else "",
            f"{1e3 * row['simulated_stall_s']:.0f}" if is_moved else "",
            f"{row['moved_bytes'] / 2**20:.0f}" if is_moved else "",
            f"{row['hit_rate']:.2f}" if is_moved else "",
        )
    table.caption = (
        "step: its time over that of the first case, the median over turns; stall: what all ranks wait for copies in a "
        "step; hits: backwards that found everything there"
    )
    console.print(table)


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """The most a rank holds against the time of a step; the offloaded ones of a policy are joined."""
    figure, axes = pyplot().subplots(figsize=(7.5, 4.5), layout="constrained")
    for policy in ("none", "lru", "schedule"):
        of_policy = [
            row for row in rows if row["policy"] == policy and (policy == "none" or row["budget_share"])
        ]
        places = [(max(row["peak_bytes"]) / 2**20, row["step_ratio"]) for row in of_policy]
        axes.plot(
            [place[0] for place in places],
            [place[1] for place in places],
            marker="o",
            linestyle="" if policy == "none" else "-",
            color=_COLOURS[policy],
            label="kept or recomputed" if policy == "none" else f"offloaded, {policy}",
        )
        for row, place in zip(of_policy, places, strict=True):
            name = row["name"] if policy == "none" else f"{row['budget_share']:.0%}"
            axes.annotate(name, place, textcoords="offset points", xytext=(6, 5), fontsize=8)
    axes.set_xlabel("most activations that a rank holds, MiB")
    axes.set_ylabel("time of a step, over everything kept")
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return save_picture(figure, path)


BENCH = Bench(
    name="memory",
    summary="the activations a rank holds, recomputed or offloaded, and what that costs in time",
    about=__doc__ or "",
    examples="""
        counterflow bench memory  twelve cases; about three minutes
        counterflow bench memory schedule=zbv budgets=[0.5]  another schedule""",
    output="""
        rows.json, memory.png and .svg: the time of a step over the most that a rank holds.
        --json: rows [{name, budget_bytes, peak_bytes, simulated_peak_bytes, step_ratio, stall_s,
        simulated_stall_s, moved_bytes, hit_rate, ...}], copy_bytes_per_s.""",
    keys=MemoryBenchConfig,
    measure=measure,
)
