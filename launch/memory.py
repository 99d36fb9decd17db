"""`counterflow memory`: train one step and report what each rank holds between steps."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from framework.config import CheckpointConfig, LoggerConfig, TrainConfig, check
from framework.run import RunContext
from launch.parity import layout_text
from launch.train import LaunchOptions, prepare_run


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """The bytes that stay between steps, rank by rank, and the activations that were live at once.

    Raises ConfigError: before any rank starts. Raises RunFailedError, RunInterruptedError: see `run_local`.
    """
    config = replace(config, logger=LoggerConfig(name="none"), checkpoint=CheckpointConfig(enabled=False))
    check(config)

    from framework.memory import to_mapping
    from launch.elastic import run_local

    context = prepare_run(config, options, time.time(), kind="memory")
    print(
        f"one step of {layout_text(config)} on {config.parallel.world_size} ranks",
        file=sys.stderr,
        flush=True,
    )
    ranks = run_local(
        _rank,
        (config, context),
        num_ranks=config.parallel.world_size,
        run_dir=context.run_dir,
        threads_per_rank=config.launcher.threads_per_rank,
        grace_s=config.launcher.grace_s,
    )
    rows = to_mapping(ranks)
    return {
        "layout": layout_text(config),
        "run_dir": str(context.run_dir),
        "persistent_max": max(row["persistent"] for row in rows),
        "persistent_mean": sum(row["persistent"] for row in rows) / len(rows),
        "ranks": rows,
    }


def print_result(result: dict[str, Any]) -> None:
    """A table, one line a rank."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['layout']}: memory of each rank after one step", title_justify="left")
    for column in ("rank", "parameters", "gradients", "optimizer", "together", "live", "simulated"):
        table.add_column(column, justify="right")
    for rank, row in enumerate(result["ranks"]):
        sizes = [
            f"{row[name] / 2**20:.2f} MiB" for name in ("parameters", "gradients", "optimizer", "persistent")
        ]
        live = (row["peak_live_activations"], row["simulated_peak_activations"])
        table.add_row(str(rank), *sizes, *map(str, live))
    table.caption = "live: micro-batches whose activations were held at once; simulated: the same, foretold"
    Console().print(table)


def _rank(config: TrainConfig, context: RunContext) -> Any:
    from framework.memory import run_memory_rank

    return run_memory_rank(config, context, int(os.environ["LOCAL_RANK"]))
