"""Megatron-Core on H100 (README of Megatron-LM, 2024): GPT models with 131,072 words, 1.7B to 462B.

Gradients, weights and tensor parallelism's communication travel under computation, as the source's flags say. It
does not say micro-batches, chunks or recomputation: one sequence, and with a pipeline as few layers to a chunk as
Megatron's scripts have (interleaved, six chunks at most), selective recomputation of attention by its fused kernel
(none).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from counterflow.framework.planning.cluster import load_cluster
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.step import estimate_step
from counterflow.framework.planning.tables.table import Case, PublishedTable, Share, data_of, gpt, source_of
from counterflow.models.config import ModelConfig


def _layout(row: Mapping[str, Any], model: ModelConfig) -> Layout:
    per_rank = model.num_layers // row["pp"]
    chunks = max((each for each in range(1, 7) if per_rank % each == 0), default=1) if row["pp"] > 1 else 1
    num_microbatches = row["gbs"] // row["dp"]
    if num_microbatches % row["pp"]:
        chunks = 1
    return Layout(
        tensor=row["tp"],
        pipeline=row["pp"],
        data=row["dp"],
        seq_length=4096,
        vocab_size=131072,
        num_microbatches=num_microbatches,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        num_chunks=chunks,
        sequence_parallel=row["tp"] > 1,
        overlap_tensor=row["tp"] > 1,
        overlap_data=True,
        overlap_pipeline=True,
        zero_stage=1,
    )


def _tflops(row: Mapping[str, Any], share: Share) -> float:
    model = gpt(row["model"])
    layout = _layout(row, model)
    step = estimate_step(model, layout, load_cluster("h100").of_size(layout.num_gpus), share)
    return 1e-12 * step.model_flops / (step.seconds * step.num_gpus)


def _cases() -> tuple[Case, ...]:
    cases: list[Case] = []
    for row in data_of("megatron_h100_2024")["rows"]:

        def predict(share: Share, row: Mapping[str, Any] = row) -> float:
            return _tflops(row, share)

        cases.append(
            Case(
                label=f"{row['model'].split('_')[1].upper()} tp{row['tp']} pp{row['pp']} dp{row['dp']}",
                quantity="TFLOP/s a GPU",
                unit="",
                published=row["tflops_per_gpu"],
                predict=predict,
            )
        )
    return tuple(cases)


TABLES = (
    PublishedTable(
        id="megatron_h100_2024",
        title="Megatron-Core on H100: 1.7B to 462B",
        source=source_of(data_of("megatron_h100_2024")),
        hardware="H100 SXM, NVLink 4, 400 Gbit/s InfiniBand a GPU",
        definition="model TFLOP/s a GPU, attention counted whole",
        cases=_cases,
        notes=("The source does not say micro-batch, virtual stages or recomputation.",),
    ),
)
