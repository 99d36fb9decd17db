"""`counterflow bench deepspeed` on local ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from counterflow.framework.bench.config import DeepSpeedBenchConfig
from counterflow.framework.checks.rules import check
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.deepspeed.start import why_not
from counterflow.framework.errors import ConfigError
from counterflow.launch.bench.ranks import run_ranks
from counterflow.launch.compose import compose_config

if TYPE_CHECKING:
    from counterflow.framework.bench.deepspeed import EngineRow
    from counterflow.framework.data.prepare import PreparedData


def bench_deepspeed(config: DeepSpeedBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Train, compare and print a table; what --json prints.

    Raises ConfigError: without DeepSpeed, or where it cannot train this. RunFailedError: where a rank fails.
    """
    from counterflow.framework.bench.deepspeed import LOSS_TOLERANCE
    from counterflow.launch.commands.train import prepare_data

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
        _rank, (training, data, config.stages), num_ranks=parallel.world_size, folder=folder
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


def _rank(config: TrainConfig, data: PreparedData, stages: tuple[int, ...]) -> list[EngineRow]:
    from counterflow.framework.bench.deepspeed import compare_engines

    return compare_engines(config, data, stages, _say)


def _say(row: EngineRow) -> None:
    print(f"  zero.stage={row.stage}: losses differ by at most {row.loss_difference:.1e}", flush=True)


def _mapping(row: EngineRow) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "loss_difference": row.loss_difference,
        "norm_difference": row.norm_difference,
        "holds": row.holds,
        "time_ratio": row.time_ratio,
        "native": dataclasses.asdict(row.native),
        "deepspeed": dataclasses.asdict(row.deepspeed),
    }


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        title="DeepSpeed's engine beside our own sharding", title_justify="left", caption_justify="left"
    )
    table.add_column("ZeRO", no_wrap=True)
    for title in ("last loss", "loss", "norm", "validation", "step time"):
        table.add_column(title, justify="right", no_wrap=True)
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
