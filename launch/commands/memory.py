"""Prints the peak of a step of each pipeline rank and what it is made of, from a dry run: no rank is started.
With --measure ranks train two steps, and it prints the peaks that they measured beside it, what stays between
steps, and the activations that were live at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from counterflow.launch.command import LAYOUT_KEYS, Command, Help, LaunchOptions, Option
from counterflow.launch.printing import new_table, print_lines, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from counterflow.framework.config.tree import TrainConfig

_HELP = Help(
    about=__doc__ or "",
    keys=LAYOUT_KEYS
    + """
    zero.stage=3  0, 1, 2, 3
    recompute.mode=full  none, full, selective, auto: what is run again instead of kept
    model=small  the model's shape""",
    examples="""
        counterflow memory  the main job, predicted
        counterflow memory --measure  and measured
        counterflow memory --multirun schedule=1f1b,dualpipe  does the second copy cost memory?
        counterflow memory --multirun zero.stage=0,1,2,3  what each ZeRO stage saves
        counterflow memory --multirun recompute.mode=none,full  what recomputation saves""",
    output="""
        --measure: runs/<date-time>-memory-<config hash>/config.yaml (or --out).
        --json: predicted_max or measured_max (bytes), ranks [{predicted_peak, measured_peak, peak_action, parts}],
        measured also persistent_max, ranks [{parameters, gradients, optimizer, ...}].""",
)


# Titles that leave room for the numbers on a narrow terminal.
_SHORT: dict[str, str] = {
    "parameters": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "messages": "sent",
}


def _program(text: str) -> str:
    from argparse import ArgumentTypeError

    if text != "megatron":
        raise ArgumentTypeError(f"{text}: no such program; it counts as megatron (Megatron-LM)")
    return text


def check(config: TrainConfig) -> None:
    """Raises ConfigError: for what cannot run, and for what holds an unknown number of bytes."""
    from counterflow.framework.checks import rules

    rules.check(config, "memory")


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """The peak of a step and what it is made of, rank by rank: predicted, or measured beside it.

    Raises ConfigError: before any rank starts. Raises RunFailedError, RunInterruptedError: see `run_local`.
    """
    from counterflow.framework.errors import ConfigError
    from counterflow.launch.runs import layout_text, without_records

    config = without_records(config)
    check(config)
    if options.own["measure"] and options.own["as"]:
        raise ConfigError(
            [
                f"--as={options.own['as']} with --measure: ranks measure what this program holds; "
                "leave one of the two out"
            ]
        )
    if options.own["measure"]:
        return _measured(config, options)
    say(f"a step of {layout_text(config)}, run dry")
    try:
        rows = _megatron(config) if options.own["as"] == "megatron" else _predicted(config, None)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    return {
        "layout": layout_text(config),
        "as": options.own["as"] or "counterflow",
        "predicted_max": max(row["predicted_peak"] for row in rows),
        **_recomputed(config, None),
        "ranks": rows,
    }


def _predicted(config: TrainConfig, data_vocab_size: int | None) -> list[dict[str, Any]]:
    """One entry a pipeline rank: ranks that differ in another axis alone do the same."""
    from counterflow.framework.checks.dry_run import dry_run

    return [
        _row(each.pipeline, each.peak.num_bytes, each.peak.action, each.peak.parts)
        for each in dry_run(config, vocab_size=data_vocab_size)
    ]


def _row(pipeline: int, peak: int, action: str, parts: Mapping[str, int]) -> dict[str, Any]:
    return {
        "pipeline": pipeline,
        "predicted_peak": peak,
        "measured_peak": None,
        "peak_action": action,
        "parts": dict(parts),
    }


def _megatron(config: TrainConfig) -> list[dict[str, Any]]:
    """As Megatron-LM would hold this layout, see framework/memory/megatron.py."""
    from dataclasses import asdict

    from counterflow.framework.memory.megatron import megatron_memory
    from counterflow.framework.memory.megatron_layers import MegatronLayout
    from counterflow.framework.planning.workload import Workload

    workload, parallel = Workload.of(config), config.parallel
    layout = MegatronLayout(
        seq_length=config.data.seq_length,
        vocab_size=workload.vocab_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        expert_parallel_size=parallel.expert_parallel_size,
        micro_batch_size=config.data.micro_batch_size,
    )
    rows: list[dict[str, Any]] = []
    for pipeline, each in enumerate(
        megatron_memory(config.model, layout, workload.named(workload.full_size))
    ):
        parts = asdict(each)
        action, moment = parts.pop("peak_action"), parts.pop("peak_moment")
        rows.append(_row(pipeline, each.peak, f"{action}, {moment}", parts))
    return rows


def _measured(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    from counterflow.framework.checks.memory import run_memory_rank, to_mapping
    from counterflow.framework.devices import check_devices
    from counterflow.launch.runs import layout_text, prepare_run, start_ranks

    check_devices(config, config.parallel.world_size)
    context = prepare_run(config, options, time.time(), kind="memory")
    say(f"two steps of {layout_text(config)} on {config.parallel.world_size} ranks")
    of_ranks = start_ranks(config, context.run_dir, run_memory_rank, config, context, hidden=context.hidden)
    rows = to_mapping(of_ranks)
    # When what is offloaded has left is not known before.
    predicted = None if config.offload.is_active else _predicted(config, context.data.vocab_size)
    for rank, row in enumerate(rows):
        peak = row.pop("peak")
        pipeline = config.parallel.coordinate_of(rank).pipeline
        row |= {
            "pipeline": pipeline,
            "predicted_peak": None if predicted is None else predicted[pipeline]["predicted_peak"],
            "measured_peak": peak["num_bytes"],
            "peak_action": peak["action"],
            "parts": peak["parts"],
        }
    return {
        "layout": layout_text(config),
        "run_dir": str(context.run_dir),
        "persistent_max": max(row["persistent"] for row in rows),
        "persistent_mean": sum(row["persistent"] for row in rows) / len(rows),
        "activations_max": max(row["activations"] for row in rows),
        "measured_max": max(row["measured_peak"] for row in rows),
        **_recomputed(config, context.data.vocab_size),
        "ranks": rows,
    }


def print_result(result: dict[str, Any]) -> None:
    """A table or two, one line a rank."""
    from rich.console import Console

    console = Console()
    _print_peaks(result, console)
    if "run_dir" in result:
        _print_kept(result, console)
    if result["recomputed"]:
        again = result["hardware_flops_per_token"] / result["training_flops_per_token"] - 1
        print_lines(console, f"recomputed: {'; '.join(result['recomputed'])} ({again:.1%} more FLOPs)")


def _print_peaks(result: dict[str, Any], console: Console) -> None:
    is_measured = "run_dir" in result
    parts: list[str] = [
        part for part in result["ranks"][0]["parts"] if any(row["parts"][part] for row in result["ranks"])
    ]
    peaks = ("predicted", "measured") if is_measured else ("predicted",)
    table = new_table(
        f"{result['layout']}: peak of a step, in MiB",
        (
            "rank",
            *(_SHORT.get(part, part.replace("_", " ")) for part in parts),
            *peaks,
            "at",
        ),
    )
    for index, row in enumerate(result["ranks"]):
        sizes = [row["parts"][part] for part in parts] + [row[f"{name}_peak"] for name in peaks]
        cells = ["-" if size is None else f"{size / 2**20:.2f}" for size in sizes]
        table.add_row(str(index), *cells, row["peak_action"])
    table.caption = (
        "the parts are those of the measured peak"
        if is_measured
        else "one of the ranks of each pipeline rank"
    )
    console.print(table)


def _print_kept(result: dict[str, Any], console: Console) -> None:
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
    console.print(table)


def _recomputed(config: TrainConfig, data_vocab_size: int | None) -> dict[str, Any]:
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
    summary="the peak of a step on each rank, in bytes, and what it is made of",
    help=_HELP,
    run=run,
    print_result=print_result,
    check=check,
    columns=("predicted_max", "measured_max", "persistent_max", "activations_max"),
    options=(
        Option("--measure", "memory: start ranks, and measure beside what is predicted"),
        Option(
            "--as",
            "memory: count as another program would",
            metavar="PROGRAM",
            example="megatron",
            read=_program,
        ),
    ),
)
