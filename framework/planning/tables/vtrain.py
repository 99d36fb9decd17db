"""vTrain's measured iterations (arXiv 2312.12391): Megatron-DeepSpeed on A100 nodes, full recomputation.

Small models of the single-node table are bound by launches of kernels. Tensor groups of more than a node's 8 devices
are shown apart: their all-reduce crosses nodes in ways that the source does not describe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from counterflow.framework.planning.cluster import load_cluster
from counterflow.framework.planning.step import estimate_step
from counterflow.framework.planning.tables.megatron_a100 import megatron_layout
from counterflow.framework.planning.tables.table import (
    Case,
    PublishedTable,
    Share,
    data_of,
    gpt_of,
    source_of,
)

VOCABULARY = 50257
# Of the single-node table, rows of two devices, to which the host's time of a launch is fitted.
_TWO = "_two"


def _seconds(row: Mapping[str, Any], share: Share) -> float:
    model = gpt_of(
        hidden=row["hidden"], heads=row["heads"], layers=row["layers"], vocab=VOCABULARY, seq=row["seq"]
    )
    layout = megatron_layout(
        tensor=row["tp"],
        pipeline=row["pp"],
        data=row["dp"],
        micro_batch_size=row["mbs"],
        num_microbatches=row["gbs"] // (row["mbs"] * row["dp"]),
        seq_length=row["seq"],
        vocab_size=VOCABULARY,
        recompute="full",
        scatter_messages=False,
        overlap_tensor=True,
    )
    return estimate_step(model, layout, load_cluster("a100").of_size(max(8, row["gpus"])), share).seconds


def _cases(name: str) -> tuple[Case, ...]:
    data = data_of(name.removesuffix(_TWO))
    cases: list[Case] = []
    for values in data["rows"]:
        row = dict(zip(data["columns"], values, strict=True))
        if name.startswith("vtrain_single") and (row["gpus"] == 2) != name.endswith(_TWO):
            continue

        def predict(share: Share, row: Mapping[str, Any] = row) -> float:
            return 1e3 * _seconds(row, share)

        size = f"{row['params_b']:g}B" if "params_b" in row else f"{row['layers']} x {row['hidden']}"
        is_wide = row["tp"] > 8
        cases.append(
            Case(
                label=f"{size} tp{row['tp']} pp{row['pp']} dp{row['dp']} mbs{row['mbs']}",
                quantity="step time",
                unit="ms",
                published=row["iter_ms"],
                predict=predict,
                counts=not is_wide,
                note="a tensor group over two nodes" if is_wide else "",
            )
        )
    return tuple(cases)


TABLES = tuple(
    PublishedTable(
        id=name,
        title=title,
        source=source_of(data_of(name.removesuffix(_TWO))),
        hardware="A100, 8 to a node",
        definition="measured iteration time",
        cases=lambda name=name: _cases(name),
        calibrated=name.endswith(_TWO),
    )
    for name, title in (
        ("vtrain_multi", "vTrain: measured iterations on 64 to 512 A100"),
        ("vtrain_single", "vTrain: measured iterations on 4 and 8 A100"),
        ("vtrain_single_two", "vTrain: measured iterations on 2 A100"),
    )
)
