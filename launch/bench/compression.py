"""On the gradient of a model, over links without a limit and with one, in turn: the gain in step time beside
the one that the bytes predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from counterflow.framework.bench.config import CompressionBenchConfig
from counterflow.launch.bench.bench import Bench
from counterflow.launch.printing import did_you_mean, new_table, values_of

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.bench.compression import Row

# How far the gain in time may be from the one that bytes predict.
TARGET_OFF = 0.15


def measure(config: CompressionBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Measure and print a table; what --json prints.

    Raises ValueError: for a method or model that there is none of. RunFailedError: where a rank fails.
    """
    from dataclasses import replace

    from counterflow.framework.bench.compression import NONE, measure_compression
    from counterflow.framework.bench.network import set_rate, why_not
    from counterflow.launch.bench.ranks import run_ranks
    from counterflow.launch.compose import compose_config

    _check_methods(config.methods)
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
    # Without a limited link there is loopback only, which is left as it is.
    links: dict[str, Any] = {"rates": (None,)}
    if rate is not None:
        links = {"rates": (None, rate), "set_rate": set_rate}
    rows = _mappings(
        run_ranks(
            partial(
                measure_compression,
                **links,
                is_everywhere=config.everywhere,
                compute_s=config.compute_ms / 1e3,
                repeats=config.repeats,
                report=_say,
            ),
            (model, methods),
            num_ranks=config.num_ranks,
            folder=folder,
            mbit_per_s=rate,
        )
    )
    _print(rows, console)
    return {"rows": rows, "rate_limited": reason or ("measured" if rate is not None else "not asked for")}


def _check_methods(methods: Sequence[str]) -> None:
    from counterflow.launch.compose import find_choices

    options = find_choices().groups["compression"]
    for name in methods:
        if name not in options:
            raise ValueError(
                f"methods=[{','.join(methods)}]: no way to compress is called {name}{did_you_mean(name, options)}; "
                f"choose from {', '.join(options)}"
            )


def _say(row: Row) -> None:
    print(f"  {_link(row.mbit_per_s)}, {row.method}: {1e3 * row.best_s:.0f} ms a step", flush=True)


def _link(mbit_per_s: float | None) -> str:
    return "no limit" if mbit_per_s is None else f"{mbit_per_s:g} Mbit/s"


def _mappings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain values; on a limited link with the time that bytes predict and what both say the method gains."""
    from counterflow.framework.bench.compression import NONE, predicted_s

    unlimited = {row.method: row for row in rows if row.mbit_per_s is None}
    plain = {row.mbit_per_s: row for row in rows if row.method == NONE}
    mappings: list[dict[str, Any]] = []
    for row in rows:
        mapping: dict[str, Any] = {
            "link": _link(row.mbit_per_s),
            **values_of(row, "method", "num_elements", "sent_bytes", "fp32_bytes", "ratio"),
            **values_of(row, "message_error", "sum_error", "best_s", "step_s"),
            "speedup": plain[row.mbit_per_s].best_s / row.best_s,
        }
        if row.mbit_per_s is not None:
            predicted = predicted_s(unlimited[row.method], row.mbit_per_s)
            mapping["predicted_s"] = predicted
            mapping["predicted_speedup"] = predicted_s(unlimited[NONE], row.mbit_per_s) / predicted
            mapping["off"] = mapping["speedup"] / mapping["predicted_speedup"] - 1
        mappings.append(mapping)
    return mappings


def _print(rows: Sequence[dict[str, Any]], console: Console) -> None:
    for link in dict.fromkeys(row["link"] for row in rows):
        here = [row for row in rows if row["link"] == link]
        titles = ["MB", "ratio", "error", "of sum", "step ms", "gain"]
        if "off" in here[0]:
            titles += ["by bytes", "off"]
        table = new_table(
            f"gradients on the wire, {link}",
            ("method", *titles),
            left=("method",),
            no_wrap=True,
            caption_justify="left",
        )
        for row in here:
            table.add_row(row["method"], *_cells(row))
        table.caption = "MB: of a rank; error: of a first message and of its sum; gain: in time"
        if "off" in here[0]:
            table.caption += (
                "\nby bytes: the gain predicted by the step without a limit and the bytes at the rate; "
                f"aim: off by at most {TARGET_OFF:.0%}"
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
    return cells + ([f"{row['predicted_speedup']:.2f}", f"{row['off']:+.0%}"] if "off" in row else [])


BENCH = Bench(
    name="compression",
    summary="what compressed reductions of gradients send, lose and take",
    about=__doc__ or "",
    examples="""
        counterflow bench compression  six methods, on a slow link too; about two minutes""",
    output="""
        rows.json, a table.""",
    keys=CompressionBenchConfig,
    measure=measure,
)
