"""`counterflow bench compression` on local ranks: over loopback and, where namespaces are allowed, a slow link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from framework.bench.config import CompressionBenchConfig
from framework.bench.network import why_not
from launch.bench_ranks import run_ranks
from launch.compose import compose_config
from models.config import ModelConfig
from parallel.compress_config import CompressionConfig

if TYPE_CHECKING:
    from framework.bench.compression import Row

LOOPBACK = "loopback"


def bench_compression(config: CompressionBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Measure and print a table; what --json prints.

    Raises ValueError: for a method or model that there is none of. RunFailedError: where a rank fails.
    """
    from framework.bench.compression import NONE

    model = compose_config([f"model={config.model}"]).model
    names = dict.fromkeys((NONE, *config.methods))
    methods = {
        # Without warm-up: it is the compressed steps that are of interest.
        name: replace(compose_config([f"compression={name}"]).compression, warmup_steps=0)
        for name in names
    }
    rate = config.mbit_per_s
    reason = why_not() if rate is not None else None
    if reason is not None:
        console.print(f"no rate-limited link: {reason}; loopback only", highlight=False)
        rate = None
    console.print(
        f"the gradient of model={config.model} summed over {config.num_ranks} ranks, "
        f"{'for all of them' if config.everywhere else 'each its own range'}; {config.repeats} steps of each method "
        "are counted, in turn",
        highlight=False,
        soft_wrap=True,
    )
    measured = {LOOPBACK: _measure(config, None, model, methods, folder)}
    if rate is not None:
        measured[f"{rate:g} Mbit/s"] = _measure(config, rate, model, methods, folder)
    rows = _mappings(measured, rate)
    _print(rows, console)
    return {"rows": rows, "rate_limited": reason or ("measured" if rate is not None else "not asked for")}


def _measure(
    config: CompressionBenchConfig,
    rate: float | None,
    model: ModelConfig,
    methods: Mapping[str, CompressionConfig],
    folder: Path,
) -> list[Row]:
    link = LOOPBACK if rate is None else f"{rate:g} Mbit/s"
    return run_ranks(
        _rank, (config, link, model, methods), num_ranks=config.num_ranks, folder=folder, mbit_per_s=rate
    )


def _rank(
    config: CompressionBenchConfig,
    link: str,
    model: ModelConfig,
    methods: Mapping[str, CompressionConfig],
) -> list[Row]:
    from framework.bench.compression import measure_compression

    return measure_compression(
        link,
        model,
        methods,
        is_everywhere=config.everywhere,
        compute_s=config.compute_ms / 1e3,
        repeats=config.repeats,
        report=_say,
    )


def _say(row: Row) -> None:
    print(f"  {row.link}, {row.method}: {row.ratio:.1f} times fewer bytes", flush=True)


def _mappings(measured: Mapping[str, Sequence[Row]], rate: float | None) -> list[dict[str, Any]]:
    """Plain values; on a limited link with the time that bytes foretell and what both say the method gains."""
    from framework.bench.compression import predicted_s

    loopback = {row.method: row for row in measured[LOOPBACK]}
    mappings: list[dict[str, Any]] = []
    for link, rows in measured.items():
        plain = rows[0]
        for row in rows:
            mapping: dict[str, Any] = {
                "link": link,
                "method": row.method,
                "num_elements": row.num_elements,
                "sent_bytes": row.sent_bytes,
                "fp32_bytes": row.fp32_bytes,
                "ratio": row.ratio,
                "message_error": row.message_error,
                "sum_error": row.sum_error,
                "best_s": row.best_s,
                "speedup": plain.best_s / row.best_s,
                "step_s": list(row.step_s),
            }
            if link != LOOPBACK and rate is not None:
                predicted = predicted_s(loopback[row.method], rate)
                mapping["predicted_s"] = predicted
                mapping["predicted_speedup"] = predicted_s(loopback[plain.method], rate) / predicted
            mappings.append(mapping)
    return mappings


def _print(rows: Sequence[dict[str, Any]], console: Console) -> None:
    for link in dict.fromkeys(row["link"] for row in rows):
        table = Table(title=f"gradients on the wire, {link}", title_justify="left", caption_justify="left")
        table.add_column("method")
        titles = ["MB", "ratio", "error", "of sum", "step ms", "gain"]
        if link != LOOPBACK:
            titles.append("by bytes")
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        for row in rows:
            if row["link"] == link:
                table.add_row(row["method"], *_cells(row))
        table.caption = "MB: of a rank; error: of a first message and of its sum; gain: in time"
        if link != LOOPBACK:
            table.caption += (
                "\nby bytes: the gain foretold by the step over loopback and the bytes at the rate"
            )
        console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [
        f"{row['sent_bytes'] / 1e6:.2f}",
        f"{row['ratio']:.1f}",
        f"{row['message_error']:.3f}",
        f"{row['sum_error']:.3f}",
        f"{1e3 * row['best_s']:.0f}",
        f"{row['speedup']:.2f}",
    ]
    return cells + ([f"{row['predicted_speedup']:.2f}"] if "predicted_speedup" in row else [])
