"""Both train one model in fp32 on gloo ranks, step by step in turn: how far losses and gradient norms differ,
and how long a step takes. It holds where no loss differs by more than 1e-4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterflow.framework.bench.config import DeepSpeedBenchConfig
from counterflow.launch.bench.bench import Bench
from counterflow.launch.printing import new_table, values_of

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.bench.deepspeed import EngineRow


def measure(config: DeepSpeedBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Train, compare and print a table; what --json prints.

    Raises ConfigError: without DeepSpeed, or where it cannot train this. RunFailedError: where a rank fails.
    """
    from dataclasses import replace

    from counterflow.framework.bench.deepspeed import LOSS_TOLERANCE, compare_engines
    from counterflow.framework.checks.rules import check
    from counterflow.framework.deepspeed.start import why_not
    from counterflow.framework.errors import ConfigError
    from counterflow.launch.bench.ranks import run_ranks
    from counterflow.launch.compose import compose_config
    from counterflow.launch.runs import prepare_data

    if (reason := why_not()) is not None:
        raise ConfigError([f"bench deepspeed: {reason}"])
    training = compose_config(overrides(config))
    for stage in config.stages:
        check(replace(training, zero=replace(training.zero, stage=stage)))
    data = prepare_data(training, show=True)
    parallel = training.parallel
    console.print(
        f"model={config.model} on {parallel.world_size} ranks (tp{parallel.tensor_parallel_size} "
        f"dp{parallel.data_parallel_size}), fp32: {config.num_steps} steps of each engine in turn",
        highlight=False,
    )
    rows: list[EngineRow] = run_ranks(
        compare_engines, (training, data, config.stages, _say), num_ranks=parallel.world_size, folder=folder
    )
    mapped = [_mapping(row) for row in rows]
    _print(mapped, console)
    verdict = "hold" if all(row.holds for row in rows) else "DO NOT HOLD"
    console.print(f"losses {verdict} the bound of {LOSS_TOLERANCE:g}", highlight=False)
    return {"rows": mapped, "tolerance": LOSS_TOLERANCE, "holds": all(row.holds for row in rows)}


def overrides(config: DeepSpeedBenchConfig) -> list[str]:
    """The config of the runs, as a user would write it."""
    return [
        f"model={config.model}",
        f"parallel.data_parallel_size={config.data_parallel_size}",
        f"parallel.tensor_parallel_size={config.tensor_parallel_size}",
        "parallel.pipeline_parallel_size=1",
        "schedule=1f1b",
        f"schedule.num_microbatches={config.num_microbatches}",
        f"training.num_steps={config.num_steps}",
        "zero.engine=deepspeed",
        "checkpoint=none",
        "logger=none",
    ]


def _say(row: EngineRow) -> None:
    print(f"  zero.stage={row.stage}: losses differ by at most {row.loss_difference:.1e}", flush=True)


def _mapping(row: EngineRow) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **values_of(row, "stage", "loss_difference", "norm_difference", "holds", "time_ratio"),
        "native": asdict(row.native),
        "deepspeed": asdict(row.deepspeed),
    }


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    columns = ("ZeRO", "last loss", "loss", "norm", "validation", "step time")
    title = "DeepSpeed's engine beside our own sharding"
    table = new_table(title, columns, left=("ZeRO",), no_wrap=True, caption_justify="left")
    for row in rows:
        native, deepspeed = row["native"], row["deepspeed"]
        has_validation = native["validation_loss"] is not None
        table.add_row(
            str(row["stage"]),
            f"{deepspeed['loss'][-1]:.5f}",
            f"{row['loss_difference']:.1e}",
            f"{row['norm_difference']:.1e}",
            f"{abs(deepspeed['validation_loss'] - native['validation_loss']):.1e}" if has_validation else "-",
            f"{row['time_ratio']:.2f}",
        )
    table.caption = (
        "loss, norm (relative): largest differences of all steps; validation: that of its loss at the end\n"
        "step time: DeepSpeed's over ours, median of pairs"
    )
    console.print(table)


BENCH = Bench(
    name="deepspeed",
    summary="DeepSpeed's engine (zero.engine=deepspeed) beside our own sharding",
    about=__doc__ or "",
    examples="""
        counterflow bench deepspeed  four stages on two ranks; about five minutes
        counterflow bench deepspeed tensor_parallel_size=2 stages=[3]  on four ranks""",
    output="""
        rows.json, a table.
        --json: rows [{stage, loss_difference, norm_difference, holds, time_ratio, native, deepspeed}], holds.""",
    keys=DeepSpeedBenchConfig,
    measure=measure,
)
