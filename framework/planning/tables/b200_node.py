"""Megatron-LM on one node of 8 B200: operators' measured efficiencies, and nothing fitted.

Distributed optimizer with fp32 main gradients, sequence parallelism with tensor parallelism, fused attention and
loss, and nothing overlapped. Models are cut to a few layers; experts have exactly their even share of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from counterflow.framework.memory.megatron import MegatronLayout, megatron_memory
from counterflow.framework.planning.cluster import load_cluster
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.step import estimate_step, schedule_of
from counterflow.framework.planning.tables.models import conf_model
from counterflow.framework.planning.tables.table import Case, PublishedTable, Share, data_of, source_of
from counterflow.models.config import ModelConfig, MTPConfig

_SHAPES = {"llama3_70b": "llama3_70b", "deepseekv3": "deepseek_v3_671b"}


def _model(row: Mapping[str, Any]) -> ModelConfig:
    model = replace(conf_model(_SHAPES[row["model"]]), num_layers=row["layers"], mtp=MTPConfig())
    if model.moe.num_experts:
        model = replace(model, moe=replace(model.moe, num_dense_layers=1))
    return model


def _layout(row: Mapping[str, Any], model: ModelConfig) -> Layout:
    assert model.vocab_size is not None
    return Layout(
        tensor=row["tp"],
        pipeline=row["pp"],
        data=row["dp"],
        expert=row["ep"],
        seq_length=row["seq"],
        vocab_size=model.vocab_size,
        num_microbatches=row["micro_batches"],
        sequence_parallel=row["tp"] > 1,
        zero_stage=1,
    )


def _seconds(row: Mapping[str, Any]) -> float:
    model = _model(row)
    return estimate_step(model, _layout(row, model), load_cluster("b200").of_size(8)).seconds


def _memory_gib(row: Mapping[str, Any]) -> float:
    model = _model(row)
    layout = _layout(row, model)
    ranks = megatron_memory(
        model,
        MegatronLayout(
            seq_length=layout.seq_length,
            vocab_size=layout.vocab_size,
            tensor_parallel_size=layout.tensor,
            data_parallel_size=layout.data,
            expert_parallel_size=layout.expert,
        ),
        schedule_of(layout),
    )
    return max(each.peak for each in ranks) / 2**30


def _cases() -> tuple[Case, ...]:
    cases: list[Case] = []
    for row in data_of("megatron_b200_node")["rows"]:

        def seconds(share: Share, row: Mapping[str, Any] = row) -> float:
            return 1e3 * _seconds(row)

        def memory(share: Share, row: Mapping[str, Any] = row) -> float:
            return _memory_gib(row)

        cases.append(
            Case(
                label=row["case"], quantity="step time", unit="ms", published=row["step_ms"], predict=seconds
            )
        )
        cases.append(
            Case(
                label=row["case"],
                quantity="peak memory",
                unit="GiB",
                published=row["peak_allocated_gib"],
                predict=memory,
            )
        )
    return tuple(cases)


TABLES = (
    PublishedTable(
        id="megatron_b200_node",
        title="Megatron-LM on a node of 8 B200",
        source=source_of(data_of("megatron_b200_node")),
        hardware="B200 SXM, NVLink 5",
        definition="mean time of a steady step; torch.cuda.max_memory_allocated of the largest rank",
        cases=_cases,
    ),
)
