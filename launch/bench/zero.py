"""ZeRO-3 of this project beside torch's fully_shard per block and DeepSpeed's ZeRO-3: one model, the same batches, in
turn on gloo ranks. The most bytes alive in a step, its time, and what a rank sends beside the least that it has to.
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


def measure(config: ZeroBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Train, count and print a table; what --json prints. Raises RunFailedError: where a rank fails."""
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
        ways = [(units, reduce) for units in config.units for reduce in config.reduce]
        rows += run_ranks(
            measure_zero,
            (training, data, ways, config.repeats, config.deepspeed),
            num_ranks=size,
            folder=folder,
        )
    _print(rows, console)
    return {"rows": [values_of(row, *_FIELDS) for row in rows]}


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


BENCH = Bench(
    name="zero",
    summary="ZeRO-3 by blocks beside torch's fully_shard and DeepSpeed's: peak, step time, bytes",
    about=__doc__ or "",
    examples="""
        counterflow bench zero  on four ranks; a few minutes
        counterflow bench zero data_parallel_sizes=[4,8] deepspeed=false  without DeepSpeed""",
    output="""
        rows.json, a table.
        --json: rows [{dp, units, reduce, peak_bytes, fully_shard_peak_bytes, peak_ratio, step_ratio_fully_shard,
        step_ratio_deepspeed, sent_bytes, lower_bound_bytes}].""",
    keys=ZeroBenchConfig,
    measure=measure,
)
