"""With sleeping stages (every F, I and W sleeps, transfers are real) the ranks run side by side on any
number of cores, and what a step takes beyond the simulation is the runtime's own; then a small Llama
computes for real on two ranks. torch.distributed.pipelining runs the same stages, step by step in turn.
On a busy machine every figure rises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from counterflow.framework.bench.config import ScheduleBenchConfig
from counterflow.launch.bench.bench import Bench
from counterflow.launch.printing import new_table, pyplot, save_picture, values_of

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.bench.compute import ComputeRow
    from counterflow.framework.bench.schedules import Case, Row

_COMPUTE_RANKS, _COMPUTE_MICROBATCHES = 2, 8
_COMPUTE_SCHEDULES = ("1f1b", "zb1p", "zbv", "dualpipe_v", "dualpipe")


def measure(config: ScheduleBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Measure sleeping stages, real compute or both; print the tables and draw the picture.

    Raises ValueError: where a schedule that was asked for does not take the sizes.
    """
    from counterflow.framework.bench.compute import measure_compute
    from counterflow.framework.bench.schedules import measure_sleeping
    from counterflow.launch.bench.ranks import run_ranks

    result: dict[str, Any] = {}
    if config.mode in ("sleep", "both"):
        cases = _cases(config)
        console.print(
            f"{len(cases)} schedules on {config.num_ranks} ranks whose F, I and W sleep {config.action_ms:g} ms each; "
            f"{config.repeats} steps of each are counted"
        )
        rows = run_ranks(
            measure_sleeping,
            (cases, config.action_ms / 1e3, config.repeats, _say),
            num_ranks=config.num_ranks,
            folder=folder,
        )
        result["rows"] = [_sleep_mapping(row) for row in rows]
        _print_sleep(result["rows"], console)
        result["png"] = str(_draw(result["rows"], folder / "schedules.png", config))
    if config.mode in ("compute", "both"):
        wanted = [name for name in config.schedules or _COMPUTE_SCHEDULES if name in _COMPUTE_SCHEDULES]
        console.print(
            f"a Llama of 16 M parameters on {_COMPUTE_RANKS} ranks, one thread each, {_COMPUTE_MICROBATCHES} "
            f"micro-batches; {config.repeats} steps of each are counted"
        )
        compute = run_ranks(
            measure_compute,
            (wanted, _COMPUTE_MICROBATCHES, config.repeats),
            num_ranks=_COMPUTE_RANKS,
            folder=folder,
        )
        result["compute_rows"] = [_compute_mapping(row) for row in compute]
        _print_compute(result["compute_rows"], console)
    return result


def _cases(config: ScheduleBenchConfig) -> list[Case]:
    """Every schedule that takes these sizes; one asked for by name must.

    Raises ValueError: where it does not.
    """
    from counterflow.framework.bench.schedules import Case
    from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules

    cases: list[Case] = []
    for name in config.schedules or tuple(generated_schedules()):
        for num_microbatches in config.num_microbatches:
            try:
                generate(name, config.num_ranks, num_microbatches)
            except ValueError:
                if config.schedules:
                    raise
                continue
            case = Case(schedule=name, num_ranks=config.num_ranks, num_microbatches=num_microbatches)
            cases.append(case)
    return cases


def _sleep_mapping(row: Row) -> dict[str, Any]:
    return {
        **values_of(row, "schedule", "num_stages", "num_microbatches", "theory_idle", "executed_idle"),
        **values_of(row, "measured_idle", "best_idle", "torch_idle", "ratio_to_torch"),
        "step_s": [timing.step_s for timing in row.ours],
        "torch_step_s": [timing.step_s for timing in row.torch],
    }


def _compute_mapping(row: ComputeRow) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(row), "ratio_to_limit": row.ratio_to_limit}


def _print_sleep(rows: Sequence[dict[str, Any]], console: Console) -> None:
    columns = {
        "theory": "theory_idle",
        "executed": "executed_idle",
        "median": "measured_idle",
        "best": "best_idle",
        "torch": "torch_idle",
        "step / torch's": "ratio_to_torch",
    }
    title = "idle share of a step: theory, theory with early sends, measured"
    table = new_table(title, ("schedule", "stages", "m", *columns), left=("schedule",))
    for row in rows:
        figures = [row[name] for name in columns.values()]
        sizes = (str(row["num_stages"]), str(row["num_microbatches"]))
        table.add_row(
            row["schedule"], *sizes, *("" if figure is None else f"{figure:.3f}" for figure in figures)
        )
    console.print(table)


def _print_compute(rows: Sequence[dict[str, Any]], console: Console) -> None:
    title = "real compute: tokens/s, against torch's 1F1B and the limit"
    columns = ("schedule", "m", "tokens/s", "over torch's 1f1b", "of the limit", "theory idle")
    table = new_table(title, columns, left=("schedule",))
    for row in rows:
        figures = [f"{row[name]:.3f}" for name in ("ratio_to_torch_1f1b", "ratio_to_limit", "theory_idle")]
        table.add_row(row["schedule"], str(row["num_microbatches"]), f"{row['tokens_per_s']:,.0f}", *figures)
    table.caption = "limit: ranks x one process x (1 - theory idle)"
    console.print(table)


def _draw(rows: Sequence[dict[str, Any]], path: Path, config: ScheduleBenchConfig) -> Path:
    """Bars of idle share: what theory leaves, what we measured above it, and torch."""
    figure, axes = pyplot().subplots(figsize=(9, 0.6 * len(rows) + 1.6), layout="constrained")
    positions = [-float(index) for index in range(len(rows))]
    axes.barh(
        positions,
        [row["measured_idle"] for row in rows],
        height=0.5,
        color="#d9772b",
        label="measured, median",
    )
    axes.barh(positions, [row["theory_idle"] for row in rows], height=0.5, color="#2d6cb5", label="theory")
    torch_rows = [
        (place, row["torch_idle"]) for place, row in zip(positions, rows, strict=True) if row["torch_idle"]
    ]
    axes.plot(
        [idle for _, idle in torch_rows],
        [place for place, _ in torch_rows],
        linestyle="",
        marker="|",
        markersize=18,
        markeredgewidth=2.5,
        color="#333333",
        label="torch.distributed.pipelining, median",
    )
    axes.set_yticks(positions, [f"{row['schedule']}, m={row['num_microbatches']}" for row in rows])
    axes.set_xlabel("idle share of a step")
    axes.set_title(f"{config.num_ranks} ranks, F, I and W sleep {config.action_ms:g} ms each", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return save_picture(figure, path)


def _say(row: Row) -> None:
    print(
        f"  {row.schedule}, m={row.num_microbatches}: theory {row.theory_idle:.3f}, measured {row.measured_idle:.3f}",
        flush=True,
    )


BENCH = Bench(
    name="schedules",
    summary="how close the runtime comes to its schedules, beside torch's runtime",
    about=__doc__ or "",
    examples="""
        counterflow bench schedules  everything; about ten minutes
        counterflow bench schedules mode=sleep schedules=[dualpipe] num_microbatches=[20,32]  two rows
        counterflow bench schedules mode=compute repeats=3  real compute only""",
    output="""
        rows.json, schedules.png and .svg.
        --json: rows [{schedule, num_stages, num_microbatches, measured_idle, theory_idle, ratio_to_torch}],
        compute_rows [{schedule, tokens_per_s, ratio_to_torch_1f1b, ratio_to_limit}].""",
    keys=ScheduleBenchConfig,
    measure=measure,
)
