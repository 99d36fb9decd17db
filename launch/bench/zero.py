"""ZeRO-3 of this project beside torch's fully_shard per block and DeepSpeed's ZeRO-3: one model, the same batches, in
turn on gloo ranks. The most bytes alive in a step, its time, and what a rank sends beside the least that it has to.
With mode=link two ranks behind a slow link: how much of gathers and reductions runs under computation that takes as
long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterflow.framework.bench.config import ZeroBenchConfig
from counterflow.launch.bench.bench import Bench
from counterflow.launch.printing import new_table, values_of

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.bench.zero import ZeroRow
    from counterflow.framework.bench.zero_link import HiddenRow

_FIELDS = (
    "dp",
    "units",
    "reduce",
    "peak_bytes",
    "fully_shard_peak_bytes",
    "peak_ratio",
    "step_s",
    "step_ratio_fully_shard",
    "step_ratio_deepspeed",
    "sent_bytes",
    "lower_bound_bytes",
    "loss_difference",
)
_LINK_FIELDS = (
    "units",
    "reduce",
    "num_microbatches",
    "sent_bytes",
    "link_s",
    "compute_s",
    "step_s",
    "waits_s",
    "hidden_share",
)


def measure(config: ZeroBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Train, count and print tables; what --json prints.

    Raises ValueError: where mode needs a link that cannot be made. RunFailedError: where a rank fails.
    """
    result: dict[str, Any] = {}
    if config.mode in ("peers", "both"):
        rows = _beside_peers(config, folder)
        _print(rows, console)
        result["rows"] = [values_of(row, *_FIELDS) for row in rows]
    if config.mode in ("link", "both"):
        hidden = _behind_link(config, folder)
        _print_hidden(hidden, config, console)
        result["link"] = [values_of(row, *_LINK_FIELDS) for row in hidden]
    return result


def _behind_link(config: ZeroBenchConfig, folder: Path) -> list[HiddenRow]:
    from functools import partial

    from counterflow.framework.bench.network import why_not
    from counterflow.framework.bench.zero_link import measure_hidden
    from counterflow.launch.bench.ranks import run_ranks

    if reason := why_not():
        raise ValueError(f"mode={config.mode}: {reason}; set mode=peers, which needs no slow link")
    measured = partial(
        measure_hidden,
        mbit_per_s=config.mbit_per_s,
        block_s=config.block_ms / 1e3,
        num_microbatches=config.num_microbatches,
        repeats=config.repeats,
    )
    return run_ranks(measured, (_ways(config),), num_ranks=2, folder=folder, mbit_per_s=config.mbit_per_s)


def _ways(config: ZeroBenchConfig) -> list[tuple[str, str]]:
    """Each zero.units with each zero.reduce."""
    return [(units, reduce) for units in config.units for reduce in config.reduce]


def _beside_peers(config: ZeroBenchConfig, folder: Path) -> list[ZeroRow]:
    from counterflow.framework.bench.zero import measure_zero
    from counterflow.framework.checks.rules import check
    from counterflow.launch.bench.ranks import run_ranks
    from counterflow.launch.compose import compose_config
    from counterflow.launch.runs import prepare_data

    rows: list[ZeroRow] = []
    for size in config.data_parallel_sizes:
        training = compose_config(overrides(config, size))
        check(training)
        data = prepare_data(training, show=True)
        rows += run_ranks(
            measure_zero,
            (training, data, _ways(config), config.repeats, config.deepspeed),
            num_ranks=size,
            folder=folder,
        )
    return rows


def overrides(config: ZeroBenchConfig, data_parallel_size: int) -> list[str]:
    """The config of the runs, as a user would write it."""
    return [
        f"model.hidden_size={config.hidden_size}",
        f"model.intermediate_size={config.hidden_size * 43 // 16}",
        f"model.num_layers={config.num_layers}",
        "model.num_heads=8",
        "model.num_kv_heads=8",
        f"model.vocab_size={config.vocab_size}",
        f"data.seq_length={config.seq_length}",
        "data.micro_batch_size=1",
        f"parallel.data_parallel_size={data_parallel_size}",
        "parallel.tensor_parallel_size=1",
        "parallel.pipeline_parallel_size=1",
        "schedule=1f1b",
        f"schedule.num_microbatches={config.num_microbatches}",
        "zero.stage=3",
        "checkpoint=none",
        "logger=none",
    ]


def _print(rows: list[ZeroRow], console: Console) -> None:
    columns = (
        "dp",
        "units",
        "reduce",
        "peak",
        "fully_shard",
        "ratio",
        "x fully_shard",
        "x DeepSpeed",
        "sent",
        "least",
    )
    table = new_table("ZeRO-3, MiB of one rank", columns, left=("units", "reduce"), no_wrap=True)
    for row in rows:
        sizes = (row.peak_bytes, row.fully_shard_peak_bytes, row.sent_bytes, row.lower_bound_bytes)
        peak, theirs, sent, least = (f"{size / 2**20:.1f}" for size in sizes)
        deepspeed = "-" if row.step_ratio_deepspeed is None else f"{row.step_ratio_deepspeed:.2f}"
        table.add_row(
            str(row.dp),
            row.units,
            row.reduce,
            peak,
            theirs,
            f"{row.peak_ratio:.3f}",
            f"{row.step_ratio_fully_shard:.2f}",
            deepspeed,
            sent,
            least,
        )
    table.caption = (
        "x: the other's step time over ours; least: one block whole at a time, reduced once a step"
    )
    console.print(table)


def _print_hidden(rows: list[HiddenRow], config: ZeroBenchConfig, console: Console) -> None:
    columns = ("units", "reduce", "sent", "on the link", "computes", "step", "waits", "hidden")
    table = new_table(
        f"ZeRO-3 on two ranks, {config.mbit_per_s:g} Mbit/s, {config.num_microbatches} micro-batches",
        columns,
        left=("units", "reduce"),
        no_wrap=True,
    )
    for row in rows:
        seconds = (row.link_s, row.compute_s, row.step_s, row.waits_s)
        table.add_row(
            row.units,
            row.reduce,
            f"{row.sent_bytes / 1e6:.0f} MB",
            *(f"{1e3 * each:.0f} ms" for each in seconds),
            f"{row.hidden_share:.1%}",
        )
    table.caption = "hidden: of the time on the link, what a step does not take beyond its computation"
    console.print(table)


BENCH = Bench(
    name="zero",
    summary="ZeRO-3 by blocks beside torch's fully_shard and DeepSpeed's: peak, step time, bytes",
    about=__doc__ or "",
    examples="""
        counterflow bench zero  on four ranks; a few minutes
        counterflow bench zero data_parallel_sizes=[4,8] deepspeed=false  without DeepSpeed
        counterflow bench zero mode=link num_microbatches=4  behind 400 Mbit/s (Linux, root)""",
    output="""
        rows.json, a table.
        --json: rows [{dp, units, reduce, peak_bytes, fully_shard_peak_bytes, peak_ratio, step_ratio_fully_shard,
        step_ratio_deepspeed, sent_bytes, lower_bound_bytes}]; with mode=link, link [{units, reduce, num_microbatches,
        sent_bytes, link_s, compute_s, step_s, waits_s, hidden_share}].""",
    keys=ZeroBenchConfig,
    measure=measure,
)
