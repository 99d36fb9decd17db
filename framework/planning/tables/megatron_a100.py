"""Megatron-LM on Selene's A100: PTD-P (arXiv 2104.04473) and selective recomputation (arXiv 2205.05198).

Full attention without a fused kernel, dropout, fp16 gradients all-reduced in fp16. In 2021 the backward waited for
its all-reduces; the second paper hides them under the products of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from counterflow.framework.planning.cluster import load_cluster
from counterflow.framework.planning.layers import LayerModel, Times
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.stages import machinery, recomputed
from counterflow.framework.planning.step import estimate_step
from counterflow.framework.planning.tables.table import (
    Case,
    PublishedTable,
    Share,
    data_of,
    gpt,
    source_of,
)

_HARDWARE = "A100 SXM 80 GB, 8 to a node, NVLink 3, HDR InfiniBand (Selene)"


def megatron_layout(**values: Any) -> Layout:
    """Megatron-LM's of 2021 and 2022."""
    fixed: dict[str, Any] = {
        "seq_length": 2048,
        "vocab_size": 51200,
        "flash": False,
        "fused": False,
        "dropout": True,
        "gradient_bytes": 2,
        "scatter_messages": True,
    }
    return Layout(**{**fixed, **values})


def _schedule(chunks: int) -> dict[str, Any]:
    return {"schedule": "interleaved_1f1b" if chunks > 1 else "1f1b", "num_chunks": chunks}


def _step_case(model: str, layout: Layout, published: float, label: str, **case: Any) -> Case:
    def predict(share: Share) -> float:
        return estimate_step(gpt(model), layout, load_cluster("a100").of_size(layout.num_gpus), share).seconds

    return Case(label=label, quantity="step time", unit="s", published=published, predict=predict, **case)


def _ptdp_cases() -> tuple[Case, ...]:
    return tuple(_ptdp_case(row) for row in data_of("ptdp_table1")["rows"])


def _ptdp_case(row: Mapping[str, Any]) -> Case:
    layout = megatron_layout(
        tensor=row["tp"],
        pipeline=row["pp"],
        data=row["dp"],
        micro_batch_size=row["mbs"],
        num_microbatches=row["microbatches"],
        recompute="full",
        **_schedule(row["vp"]),
    )
    label = f"{row['params_b']:g}B tp{row['tp']} pp{row['pp']} dp{row['dp']}"
    return _step_case(row["model"], layout, row["step_time_s_derived"], label)


def _korthikanti_cases() -> tuple[Case, ...]:
    cases: list[Case] = []
    for row in data_of("korthikanti_table3_5")["rows"]:
        layout = megatron_layout(
            tensor=row["tp"],
            pipeline=row["pp"],
            data=row["dp"],
            micro_batch_size=row["mbs"],
            num_microbatches=row["gbs"] // (row["mbs"] * row["dp"]),
            recompute=row["recompute"],
            sequence_parallel=row["sp"],
            overlap_tensor=True,
            **_schedule(row["vp"]),
        )
        label = f"{row['model'].split('_')[1].upper()} {row['recompute']}"
        label += " + sequence parallel" if row["sp"] else ""
        cases.append(_step_case(row["model"], layout, row["step_time_s"], label))
    return tuple(cases)


def _layer_cases() -> tuple[Case, ...]:
    cases: list[Case] = []
    for row in data_of("korthikanti_table4")["rows"]:
        name: str = row["experiment"]
        mode = "full" if "full" in name else "selective" if "selective" in name else "none"
        layout = megatron_layout(
            tensor=8,
            micro_batch_size=4,
            num_microbatches=1,
            recompute=mode,
            sequence_parallel="sequence" in name,
            overlap_tensor=True,
        )
        for backward in (False, True):

            def predict(share: Share, layout: Layout = layout, backward: bool = backward) -> float:
                times = _layer(layout, share)
                if not backward:
                    return 1e3 * (times.forward + times.forward_tensor)
                gradients = times.input_gradient + times.weight_gradient
                return 1e3 * (gradients + times.exposed_tensor(True) + recomputed(times, layout))

            cases.append(
                Case(
                    label=name,
                    quantity="backward" if backward else "forward",
                    unit="ms",
                    published=row["bwd_ms" if backward else "fwd_ms"],
                    predict=predict,
                )
            )
    return tuple(cases)


def _layer(layout: Layout, share: Share) -> Times:
    kernels, links = machinery(load_cluster("a100"), share)
    return LayerModel(model=gpt("gpt_22b"), layout=layout, kernels=kernels, links=links).layer(0)


TABLES = (
    PublishedTable(
        id="ptdp_table1",
        title="PTD-P Table 1: weak scaling from 1.7B to 1T",
        source=source_of(data_of("ptdp_table1")),
        hardware=_HARDWARE,
        definition="step time, from TFLOP/s a GPU by the paper's own formula 96 B s l h^2 (1 + s/6h + V/16lh)",
        cases=_ptdp_cases,
        calibrated=True,
    ),
    PublishedTable(
        id="korthikanti_table5",
        title="Korthikanti Table 5: full recomputation against selective with sequence parallelism",
        source=source_of(data_of("korthikanti_table3_5")),
        hardware=_HARDWARE,
        definition="step time",
        cases=_korthikanti_cases,
        notes=(
            "Times and layouts of 175B, 530B and 1T are not in the transcription that the others were read from. They "
            "were entered from memory and agree with the MFU of the paper (51.4, 56.0, 56.3 %); check them before use.",
        ),
    ),
    PublishedTable(
        id="korthikanti_table4",
        title="Korthikanti Table 4: one layer of the 22B model",
        source=source_of(data_of("korthikanti_table4")),
        hardware=_HARDWARE,
        definition="time of a layer's forward and backward",
        cases=_layer_cases,
    ),
)
