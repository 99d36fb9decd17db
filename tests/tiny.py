"""A model and a corpus small enough that a test trains in a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.config import TrainConfig, check, from_mapping
from framework.data.prepare import PreparedData, prepare
from framework.run import RunContext

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


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """`first` with the values of `second` put in, nested."""
    result = dict(first)
    for key, value in second.items():
        is_node = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if is_node else value
    return result


def tiny_config(
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    schedule: str = "1f1b",
    num_microbatches: int = 4,
    zero: int = 0,
    **nodes: Any,
) -> TrainConfig:
    """A checked config of the tiny model; `nodes` are merged in (`model={"tie_embeddings": True}`)."""
    layout = {
        "parallel": {"pipeline_parallel_size": pp, "data_parallel_size": dp, "tensor_parallel_size": tp},
        "schedule": {"name": schedule, "num_microbatches": num_microbatches},
        "zero": {"stage": zero},
    }
    config = from_mapping(TrainConfig, merged(merged(TINY, layout), nodes))
    check(config)
    return config


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
