"""`counterflow memory`: train one step and report what each rank holds between steps."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from counterflow.framework.checks.rules import check
from counterflow.framework.config.tree import CheckpointConfig, LoggerConfig, TrainConfig
from counterflow.framework.devices import check_devices
from counterflow.framework.trainer.run import RunContext
from counterflow.launch.commands.parity import layout_text
from counterflow.launch.commands.train import LaunchOptions, prepare_run


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """The bytes that stay between steps, rank by rank, and the activations that were live at once.

    Raises ConfigError: before any rank starts. Raises RunFailedError, RunInterruptedError: see `run_local`.
    """
    config = replace(config, logger=LoggerConfig(name="none"), checkpoint=CheckpointConfig(enabled=False))
    check(config, "memory")
    check_devices(config, config.parallel.world_size)
    from counterflow.framework.checks.memory import to_mapping
    from counterflow.launch.ranks.elastic import run_local

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
        hidden=context.hidden,
        threads_per_rank=config.launcher.threads_per_rank,
        grace_s=config.launcher.grace_s,
    )
    rows = to_mapping(ranks)
    return {
        "layout": layout_text(config),
        "run_dir": str(context.run_dir),
        "persistent_max": max(row["persistent"] for row in rows),
        "persistent_mean": sum(row["persistent"] for row in rows) / len(rows),
        "activations_max": max(row["activations"] for row in rows),
        **_recomputed(config, context.data.vocab_size),
        "ranks": rows,
    }


def print_result(result: dict[str, Any]) -> None:
    """A table, one line a rank."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result['layout']}: memory of each rank after one step, in MiB", title_justify="left"
    )
    has_experts = any(row["experts"] for row in result["ranks"])
    elsewhere = [name for name in ("host", "disk") if any(row[name] for row in result["ranks"])]
    columns = ("parameters", "gradients", "optimizer", "persistent", *(["experts"] * has_experts), *elsewhere)
    titles = ["together" if column == "persistent" else column for column in columns]
    for title in ("rank", *titles, "activations", "live"):
        table.add_column(title, justify="right")
    for rank, row in enumerate(result["ranks"]):
        sizes = [f"{row[name] / 2**20:.2f}" for name in columns]
        kept = f"{row['activations'] / 2**20:.2f} ({row['expected_activations'] / 2**20:.2f})"
        live = f"{row['peak_live_activations']} ({row['simulated_peak_activations']})"
        table.add_row(str(rank), *sizes, kept, live)
    table.caption = (
        "activations: the most kept for backwards at once; live: of how many micro-batches; (predicted)"
    )
    if has_experts:
        table.caption += "; experts: their part of together"
    if elsewhere:
        table.caption += f"; {', '.join(elsewhere)}: of the optimizer, not in together"
    console = Console()
    console.print(table)
    if result["recomputed"]:
        again = result["hardware_flops_per_token"] / result["training_flops_per_token"] - 1
        console.print(
            f"recomputed: {'; '.join(result['recomputed'])} ({again:.1%} more FLOPs)", soft_wrap=True
        )


def _recomputed(config: TrainConfig, data_vocab_size: int) -> dict[str, Any]:
    """What is run again, and the FLOPs per token of the model and with that."""
    from counterflow.framework.memory.recompute import as_text
    from counterflow.framework.planning.workload import Workload
    from counterflow.models.cost import hardware_flops_per_token

    workload = Workload.of(config, data_vocab_size=data_vocab_size)
    plan = workload.recompute_plan
    model, hardware = (
        hardware_flops_per_token(
            config.model, each, seq_length=config.data.seq_length, vocab_size=workload.vocab_size
        )
        for each in ({}, plan)
    )
    return {
        "recomputed": as_text(plan),
        "training_flops_per_token": model,
        "hardware_flops_per_token": hardware,
    }


def _rank(config: TrainConfig, context: RunContext) -> Any:
    from counterflow.framework.checks.memory import run_memory_rank

    return run_memory_rank(config, context, int(os.environ["LOCAL_RANK"]))
