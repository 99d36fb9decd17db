"""Whether two shapes compute the same from equal weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from counterflow.models.config import ModelConfig
from counterflow.models.positions import rotary_scale, softmax_scale

# Fields of `moe` that change nothing that the weights compute.
TRAINING = ("bias_update_speed", "load_balance_loss", "sequence_balance_loss", "z_loss")


def differences(one: ModelConfig, other: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """The fields that let the two compute something else, by their names under `model`, with both values."""
    left, right = _function_of(one), _function_of(other)
    for name, value in left.items():
        if not _is_equal(value, right.get(name)):
            yield name, value, right.get(name)


def _function_of(config: ModelConfig) -> dict[str, Any]:
    """What decides what the weights compute, by the name under `model`; what is not in force is left out."""
    unused = {"name", "vocab_size", "max_seq_length", "rope_theta", "num_kv_heads", "head_dim"}
    found = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in unused | {"mla", "yarn", "moe", "mtp"}
    }
    found["mtp.num_modules"] = config.mtp.num_modules
    if config.position == "learned":
        found["max_seq_length"] = config.max_seq_length
    else:
        found |= {"rope_theta": config.rope_theta, "yarn.factor": config.yarn.factor}
    if config.position != "learned" and config.yarn.factor > 1:
        for name in ("original_seq_length", "beta_fast", "beta_slow", "truncate"):
            found[f"yarn.{name}"] = getattr(config.yarn, name)
        found["yarn.attention_factor"] = rotary_scale(config.yarn)
        # The size of a head is compared on its own; what is left is YaRN's.
        found["yarn.mscale_all_dim"] = softmax_scale(config)
    if config.uses_mla:
        found |= {f"mla.{field.name}": getattr(config.mla, field.name) for field in fields(config.mla)}
        found["mla.latent_norm_eps"] = config.latent_norm_eps
    else:
        found |= {"num_kv_heads": config.num_kv_heads, "head_dim": config.dim_per_head}
    if config.moe.num_experts:
        found |= {
            f"moe.{field.name}": getattr(config.moe, field.name)
            for field in fields(config.moe)
            if field.name not in (*TRAINING, "load_balance_scope")
        }
        found["moe.expert_intermediate_size"] = config.expert_intermediate_size
    return found


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other)
    return one == other
