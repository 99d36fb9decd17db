"""A model and a corpus small enough that a test trains in a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from counterflow.framework.checks.rules import check
from counterflow.framework.checks.rules.rule import merged as merged
from counterflow.framework.config.mapping import from_mapping
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData, prepare
from counterflow.framework.trainer.run import RunContext
from counterflow.parallel.pipeline.schedules.registry import generate

TINY: dict[str, dict[str, Any]] = {
    "model": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "data": {"seq_length": 16, "micro_batch_size": 1, "validation_fraction": 0.1, "validation_batches": 2},
    "tokenizer": {"vocab_size": 321},  # odd: the tensor axis pads it
    "logger": {"name": "jsonl"},
    "checkpoint": {"enabled": False},
}

# The model of one mixture each, with every auxiliary loss between them: what `tiny_config(model=...)` takes.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "moe": {
            "num_experts": 4,
            "expert_intermediate_size": 24,
            "load_balance_loss": 0.02,
            "z_loss": 0.001,
        }
    },
    "qwen3_moe": {
        "head_dim": 16,
        "qk_norm": True,
        "moe": {
            "num_experts": 8,
            "expert_intermediate_size": 12,
            "load_balance_loss": 0.02,
            "load_balance_scope": "global_batch",
        },
    },
    "deepseek_v3": {
        "mla": {
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        "moe": {
            "num_experts": 8,
            "expert_intermediate_size": 12,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "router": "sigmoid",
            "routed_scaling_factor": 2.5,
            "num_groups": 4,
            "num_groups_per_token": 2,
            "bias_update_speed": 0.01,
            "sequence_balance_loss": 0.01,
        },
        "mtp": {"num_modules": 1},
    },
}


def tiny_config(
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    schedule: str = "1f1b",
    num_microbatches: int = 4,
    zero: int | Mapping[str, Any] = 0,
    **nodes: Any,
) -> TrainConfig:
    """A checked config of the tiny model; `nodes` are merged in (`model={"tie_embeddings": True}`)."""
    layout = {
        "parallel": {"pipeline_parallel_size": pp, "data_parallel_size": dp, "tensor_parallel_size": tp},
        "schedule": {"name": schedule, "num_microbatches": num_microbatches},
        "zero": {"stage": zero} if isinstance(zero, int) else zero,
    }
    config = from_mapping(TrainConfig, merged(merged(TINY, layout), nodes))
    check(config)
    return config


def layers_for(schedule: str, num_ranks: int) -> int:
    """As many layers as the schedule has stages, and two where it has one: more of them prove the same."""
    num_stages = generate(schedule, num_ranks, 2 * num_ranks).num_stages
    return max(2, num_stages)


def with_few_layers(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `tiny_config` with `layers_for` their schedule, where they do not say how many."""
    few = layers_for(layout.get("schedule", "1f1b"), layout.get("pp", 1))
    return merged({"model": {"num_layers": few}}, layout)


def prepare_tiny(folder: Path) -> PreparedData:
    """A corpus of a few sources of the running Python, tokenized into `folder`."""
    import json

    sources = [str(Path(json.__file__).parent)]
    config = from_mapping(TrainConfig, merged(TINY, {"data": {"sources": sources, "cache_dir": str(folder)}}))
    return prepare(config.data, config.tokenizer)


def run_context(data: PreparedData, run_dir: Path) -> RunContext:
    """A run without a launcher."""
    return RunContext(
        run_dir=run_dir, data=data, config_hash="0" * 64, started_at=time.time(), show_progress=False
    )
