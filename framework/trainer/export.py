"""Checkpoints of a run in Hugging Face's format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from counterflow.framework.checkpoint.shard import TensorShard
from counterflow.framework.checkpoint.storage import load
from counterflow.models.config import ModelConfig
from counterflow.models.hf.config import to_hf_config
from counterflow.models.hf.files import write_folder
from counterflow.models.hf.weights import shapes_of, to_hf


def export_checkpoint(
    checkpoint: Path, folder: Path, config: ModelConfig, *, vocab_size: int, max_positions: int
) -> None:
    """Write the model of `checkpoint` (a folder of one step) to `folder`, in fp32 as its masters are.

    config: what the run trained. vocab_size: of its tokenizer where config.vocab_size is null. max_positions: the
    longest sequence the model is meant for.

    Raises ValueError: where transformers cannot express the model, or the checkpoint is of another. CheckpointError:
    where it is damaged.
    """
    values = to_hf_config(config, vocab_size=vocab_size, max_positions=max_positions)
    write_folder(folder, values, to_hf(model_state(checkpoint, config, vocab_size=vocab_size), config))


def model_state(checkpoint: Path, config: ModelConfig, *, vocab_size: int) -> dict[str, Tensor]:
    """The whole parameters in fp32 and each router's bias, as `to_hf` takes them."""
    shapes = shapes_of(replace(config, vocab_size=vocab_size))
    names = {f"model.{name}": name for name in shapes if not name.endswith("router.bias")}
    wanted = {name: shapes[own] for name, own in names.items()}
    for index in range(config.num_layers + config.mtp.num_modules):
        if config.is_moe_layer(index):
            name = f"layers.{index}.router.bias"
            names[f"routing.{name}"] = name
            wanted[f"routing.{name}"] = torch.Size((config.moe.num_experts,))
    shards = [
        TensorShard(
            name=name, global_shape=tuple(shape), offsets=(0,) * len(shape), tensor=torch.empty(shape)
        )
        for name, shape in wanted.items()
    ]
    load(checkpoint, shards, group=None, partial=True)
    return {names[shard.name]: shard.tensor for shard in shards}
