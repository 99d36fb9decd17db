"""Transfers of an activation, and steps of sleeping stages, in chunks and whole by turns, over loopback and
over an emulated link of limited rate (network namespaces: Linux, root).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from counterflow.framework.bench.config import P2PBenchConfig
from counterflow.launch.bench.bench import Bench
from counterflow.launch.printing import new_table, values_of

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.bench.p2p import Row

LOOPBACK = "loopback"


def measure(config: P2PBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Measure, print a table and the verdict; what --json prints.

    Raises RunFailedError: where a rank fails.
    """
    from counterflow.framework.bench.network import why_not

    rates = list(config.mbit_per_s)
    reason = why_not() if rates else None
    if reason is not None:
        console.print(f"no rate-limited link: {reason}; loopback only", highlight=False)
        rates = []
    sizes = ", ".join(f"{size:g}" for size in config.tensor_mib)
    console.print(
        f"activations of {sizes} MiB on {config.num_ranks} ranks, whole and in chunks by turns, {config.repeats} "
        f"of each; in the steps F, I and W sleep {config.action_ms:g} ms",
        highlight=False,
    )
    rows: list[Row] = []
    for rate in (None, *rates):
        rows += _measure(config, rate, folder)
    _print(rows, console)
    return {"rows": [_mapping(row) for row in rows], "rate_limited": reason or "measured"}


def _measure(config: P2PBenchConfig, rate: float | None, folder: Path) -> list[Row]:
    from counterflow.framework.bench.p2p import CASES, measure_p2p
    from counterflow.launch.bench.ranks import run_ranks

    link = LOOPBACK if rate is None else f"{rate:g} Mbit/s"
    tensors = [int(size * 2**20) for size in config.tensor_mib]
    chunks = [size * 2**10 for size in config.chunk_kib]
    measured = partial(measure_p2p, action_s=config.action_ms / 1e3, repeats=config.repeats, report=_say)
    args = (link, CASES, tensors, chunks)
    return run_ranks(measured, args, num_ranks=config.num_ranks, folder=folder, mbit_per_s=rate)


def _say(row: Row) -> None:
    print(f"  {row.link}, {row.case}, {_sizes(row)}: {row.ratio:.3f} of the time whole", flush=True)


def _sizes(row: Row) -> str:
    return f"{row.tensor_bytes / 2**20:g} MiB in {row.chunk_bytes // 2**10} KiB"


def _mapping(row: Row) -> dict[str, Any]:
    names = ("link", "case", "tensor_bytes", "chunk_bytes", "ratio", "verdict", "whole_s", "chunked_s")
    return values_of(row, *names)


def _print(rows: Sequence[Row], console: Console) -> None:
    import statistics

    from rich.box import SIMPLE_HEAD

    table = new_table(
        "transfers in chunks of so many KiB, beside the same whole",
        ("link", "case", "MiB", "KiB", "whole ms", "ratio", "of pairs", ""),
        left=("link", "case", ""),
        no_wrap=True,
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for row in rows:
        ratios = row.ratios
        table.add_row(
            row.link,
            row.case,
            f"{row.tensor_bytes / 2**20:g}",
            f"{row.chunk_bytes // 2**10}",
            f"{1e3 * statistics.median(row.whole_s):.1f}",
            f"{row.ratio:.3f}",
            f"{ratios[0]:.2f}-{ratios[-1]:.2f}",
            row.verdict,
        )
    table.caption = "ratio: chunked over whole, median of pairs in turn; below 1 the chunks pay"
    console.print(table)
    counts = {name: sum(row.verdict == name for row in rows) for name in ("pays", "same", "costs")}
    console.print(
        f"comm.p2p_chunk_bytes: pays in {counts['pays']}, is the same in {counts['same']} and costs in "
        f"{counts['costs']} of {len(rows)} cases",
        highlight=False,
    )


BENCH = Bench(
    name="p2p",
    summary="whether transfers in chunks (comm.p2p_chunk_bytes) pay",
    about=__doc__ or "",
    examples="""
        counterflow bench p2p  loopback and one emulated link
        counterflow bench p2p mbit_per_s=[200,1000]  two emulated links""",
    output="""
        rows.json, a table.""",
    keys=P2PBenchConfig,
    measure=measure,
)
