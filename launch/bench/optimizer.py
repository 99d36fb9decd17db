"""Rows of steps of sleeping stages that wait for the gradient norm of all ranks, that do not, and of which
every other one has to be undone and made again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterflow.framework.bench.config import OptimizerBenchConfig
from counterflow.launch.bench.bench import Bench
from counterflow.launch.printing import new_table, values_of

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.bench.optimizer import OptimizerRow


def measure(config: OptimizerBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Measure and print a table; what --json prints.

    Raises ValueError: where a schedule does not take the sizes. RunFailedError: where a rank fails.
    """
    from counterflow.framework.bench.optimizer import measure_optimizer
    from counterflow.launch.bench.ranks import run_ranks
    from counterflow.parallel.pipeline.schedules.registry import generate

    for name in config.schedules:
        generate(name, config.num_ranks, config.num_microbatches)
    console.print(
        f"{len(config.schedules)} schedules on {config.num_ranks} ranks, {config.num_microbatches} micro-batches, F, I "
        f"and W sleep {config.action_ms:g} ms each: {config.repeats} rows of {config.num_steps} steps that wait for "
        "the norm, that do not, and of which every other one has to be made again",
        highlight=False,
    )
    sizes = (config.schedules, config.num_ranks, config.num_microbatches)
    times = (config.action_ms / 1e3, config.num_steps, config.repeats)
    rows: list[OptimizerRow] = run_ranks(
        measure_optimizer, (*sizes, *times, _say), num_ranks=config.num_ranks, folder=folder
    )
    mapped = [_mapping(row) for row in rows]
    _print(mapped, console)
    return {"rows": mapped}


def _say(row: OptimizerRow) -> None:
    from counterflow.framework.bench.optimizer import Mode

    print(f"  {row.schedule}: without waiting {row.ratio(Mode.AHEAD):.3f} of the time", flush=True)


def _mapping(row: OptimizerRow) -> dict[str, Any]:
    from counterflow.framework.bench.optimizer import Mode

    return {
        **values_of(row, "schedule", "num_ranks", "num_microbatches", "theory_makespan_s", "theory_span_s"),
        "theory_ratio": row.theory_span_s / row.theory_makespan_s,
        "waits_s": row.median_s(Mode.WAITS),
        "ahead_s": row.median_s(Mode.AHEAD),
        "redone_s": row.median_s(Mode.REDONE),
        "ahead_ratio": row.ratio(Mode.AHEAD),
        "redone_ratio": row.ratio(Mode.REDONE),
        "step_s": {mode: list(times) for mode, times in row.step_s.items()},
    }


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    title = "a step with post-validation, over one that waits for the norm of all ranks"
    columns = ("schedule", "theory", "measured", "every other one redone", "waiting, ms", "theory, ms")
    table = new_table(title, columns, left=("schedule",))
    for row in rows:
        ratios = [f"{row[name]:.3f}" for name in ("theory_ratio", "ahead_ratio", "redone_ratio")]
        times = [f"{1e3 * row[name]:.0f}" for name in ("waits_s", "theory_makespan_s")]
        table.add_row(row["schedule"], *ratios, *times)
    table.caption = "theory: the longest time a rank has work, over the time from the first work to the last"
    console.print(table)


BENCH = Bench(
    name="optimizer",
    summary="what optimizer.post_validation gains",
    about=__doc__ or "",
    examples="""
        counterflow bench optimizer  five schedules; about five minutes""",
    output="""
        rows.json, a table.""",
    keys=OptimizerBenchConfig,
    measure=measure,
)
