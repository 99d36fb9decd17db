"""Zero-bubble schedules (arXiv 2401.10241), tables 4 to 6, on A100 nodes.

What is judged is the ratio of throughput to 1F1B of the same model and number of micro-batches, and the peak memory.
ZB-2p is a schedule searched within 2p activations; the handcrafted ZB-H2 within the same bound stands for it, and
ZB-H1 for ZB-1p. Both run with post-validation of the optimizer, so a step takes the longest span of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from counterflow.framework.planning.cluster import load_cluster
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.memory import rank_memories
from counterflow.framework.planning.step import estimate_step, schedule_of, simulate_step
from counterflow.framework.planning.tables.table import Case, PublishedTable, Share, data_of, gpt, source_of
from counterflow.models.config import ModelConfig

_SCHEDULES = {
    "ZB-2p": "zb_h2",
    "ZB-2p*": "zb_h2",
    "ZB-1p": "zb1p",
    "ZB-V": "zbv",
    "1F1B": "1f1b",
    "1F1B-I": "interleaved_1f1b",
}


def _model(name: str) -> ModelConfig:
    return replace(gpt(name), tie_embeddings=False)


def _layout(row: Mapping[str, Any], model: ModelConfig) -> Layout:
    """The first and the last stage have one layer less; interleaved stages are single layers, or an end alone."""
    schedule, ranks, layers = _SCHEDULES[row["schedule"]], row["pp"], model.num_layers
    size, chunks = (layers + 2) // ranks, 1
    if schedule == "interleaved_1f1b":
        sizes, chunks = (0, *(1,) * layers, 0), size
    elif schedule == "zbv":
        sizes = (0, *(1,) * layers, 0)
        if len(sizes) != 2 * ranks:
            sizes = ()
    else:
        sizes = (size - 1, *(size,) * (ranks - 2), size - 1)
    return Layout(
        pipeline=ranks,
        seq_length=1024,
        vocab_size=50304,
        micro_batch_size=int(row["mbs"]),
        num_microbatches=row["microbatches"],
        schedule=schedule,
        num_chunks=chunks,
        layers_per_stage=sizes,
        flash=False,
        fused=False,
        dropout=True,
        post_validation=schedule.startswith("zb"),
    )


def _samples_per_gpu_s(row: Mapping[str, Any], share: Share) -> float:
    model = _model(row["model"])
    layout = _layout(row, model)
    step = estimate_step(model, layout, load_cluster("a100").of_size(layout.num_gpus), share)
    return layout.micro_batch_size * layout.num_microbatches / step.seconds / layout.num_gpus


def _memory_gib(row: Mapping[str, Any], share: Share) -> float:
    model = _model(row["model"])
    layout = _layout(row, model)
    *_, stages = simulate_step(model, layout, load_cluster("a100").of_size(layout.num_gpus), share)
    return max(each.peak for each in rank_memories(model, layout, schedule_of(layout), stages)) / 2**30


def _cases(table: str) -> tuple[Case, ...]:
    rows = data_of(table)["rows"]
    cases: list[Case] = []
    for row in rows:
        samples = row["microbatches"] * row["mbs"]
        base = next(
            each
            for each in rows
            if each["model"] == row["model"]
            and each["schedule"] == "1F1B"
            and each["microbatches"] * each["mbs"] == samples
        )
        label = f"{row['model'][3:].upper()} m={row['microbatches']} {row['schedule']}"
        if row is not base:

            def ratio(share: Share, row: Mapping[str, Any] = row, base: Mapping[str, Any] = base) -> float:
                return _samples_per_gpu_s(row, share) / _samples_per_gpu_s(base, share)

            cases.append(
                Case(
                    label=label,
                    quantity="throughput / 1F1B",
                    unit="",
                    published=row["samples_per_gpu_s"] / base["samples_per_gpu_s"],
                    predict=ratio,
                )
            )

        def memory(share: Share, row: Mapping[str, Any] = row) -> float:
            return _memory_gib(row, share)

        cases.append(
            Case(label=label, quantity="peak memory", unit="GiB", published=row["mem_gb"], predict=memory)
        )
    return tuple(cases)


def _table(name: str, title: str) -> PublishedTable:
    return PublishedTable(
        id=name,
        title=title,
        source=source_of(data_of(name)),
        hardware="A100 SXM 80 GB, RoCE between nodes",
        definition="samples per GPU and second as a ratio to 1F1B's of the same row; peak memory of the largest rank",
        cases=lambda: _cases(name),
        notes=("The vocabulary is not stated in the paper; 50,304 is assumed.",),
    )


TABLES = (
    _table("zb_table4", "Zero bubble Table 4: ZB-2p, ZB-1p, 1F1B, interleaved 1F1B"),
    _table("zb_table6", "Zero bubble Table 6: ZB-V at equal memory"),
)
