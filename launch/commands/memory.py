"""Trains one step and prints, for each rank, the bytes of parameters, gradients and optimizer state that
stay between steps, and the activations that were live at once beside what cost model and simulator say.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from counterflow.launch.command import LAYOUT_KEYS, Command, Help, LaunchOptions
from counterflow.launch.printing import new_table, print_lines, say

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig

_HELP = Help(
    about=__doc__ or "",
    keys=LAYOUT_KEYS
    + """
    zero.stage=3  0, 1, 2, 3
    recompute.mode=full  none, full, selective, auto: what is run again instead of kept
    model=small  the model's shape""",
    examples="""
        counterflow memory  the main job
        counterflow memory --multirun schedule=1f1b,dualpipe  does the second copy cost memory?
        counterflow memory --multirun zero.stage=0,1,2,3  what each ZeRO stage saves
        counterflow memory --multirun recompute.mode=none,full  what recomputation saves""",
    output="""
        runs/<date-time>-memory-<config hash>/config.yaml (or --out).
        --json: persistent_max, persistent_mean (bytes), ranks [{parameters, gradients, optimizer, ...}].""",
)


def check(config: TrainConfig) -> None:
    """Raises ConfigError: for what cannot run, and for what holds an unknown number of bytes."""
    from counterflow.framework.checks import rules

    rules.check(config, "memory")


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """The bytes that stay between steps, rank by rank, and the activations that were live at once.

    Raises ConfigError: before any rank starts. Raises RunFailedError, RunInterruptedError: see `run_local`.
    """
    from counterflow.framework.checks.memory import run_memory_rank, to_mapping
    from counterflow.framework.devices import check_devices
    from counterflow.launch.runs import layout_text, prepare_run, start_ranks, without_records

    config = without_records(config)
    check(config)
    check_devices(config, config.parallel.world_size)
    context = prepare_run(config, options, time.time(), kind="memory")
    say(f"one step of {layout_text(config)} on {config.parallel.world_size} ranks")
    of_ranks = start_ranks(config, context.run_dir, run_memory_rank, config, context, hidden=context.hidden)
    rows = to_mapping(of_ranks)
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

    has_experts = any(row["experts"] for row in result["ranks"])
    elsewhere = [name for name in ("host", "disk") if any(row[name] for row in result["ranks"])]
    columns = ("parameters", "gradients", "optimizer", "persistent", *(["experts"] * has_experts), *elsewhere)
    titles = ["together" if column == "persistent" else column for column in columns]
    table = new_table(
        f"{result['layout']}: memory of each rank after one step, in MiB",
        ("rank", *titles, "activations", "live"),
    )
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
        print_lines(console, f"recomputed: {'; '.join(result['recomputed'])} ({again:.1%} more FLOPs)")


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


COMMAND = Command(
    name="memory",
    summary="what each rank holds between steps, in bytes",
    help=_HELP,
    run=run,
    print_result=print_result,
    check=check,
    columns=("persistent_max", "persistent_mean", "activations_max"),
)
