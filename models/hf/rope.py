"""Rotary positions as Hugging Face's config.json has them, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from counterflow.models.config import ModelConfig, YarnConfig
from counterflow.models.hf.keys import not_computed
from counterflow.models.positions import rotary_scale

_DEFAULT_KEYS = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_YARN_KEYS = frozenset(
    (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    )
)
_KEYS = {"default": _DEFAULT_KEYS, "yarn": _DEFAULT_KEYS | _YARN_KEYS}


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The value of `rope_parameters`."""
    yarn = config.yarn
    if yarn.factor <= 1:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": config.rope_theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_seq_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    # DeepSeek's attention reads mscale_all_dim; in the other families it would only change the factor.
    if config.uses_mla and yarn.mscale_all_dim:
        found |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    if not math.isclose(rotary_scale(yarn), _attention_factor(found)):
        found["attention_factor"] = rotary_scale(yarn)
    if not yarn.truncate:
        found["truncate"] = False
    return found


def rope_from_hf(
    values: Mapping[str, Any], *, default_theta: float, uses_mla: bool
) -> tuple[float, YarnConfig]:
    """theta and YaRN, from `rope_parameters` or, as older files have them, from `rope_theta` and `rope_scaling`.

    Raises ValueError: for a type, a key or a value that is not computed here.
    """
    # In transformers' order: the older key counts where both are there.
    rope: dict[str, Any] = dict(values["rope_scaling"] or values["rope_parameters"] or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise not_computed(f"rope_parameters.rope_type={kind}", "default and yarn are")
    for name, value in rope.items():
        if name not in _KEYS[kind] and value is not None:
            raise ValueError(
                f"rope_parameters.{name}={value}: not a key of rope_type={kind} known here; take it out of config.json "
                "if it does not matter"
            )
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise not_computed(f"rope_parameters.partial_rotary_factor={rope['partial_rotary_factor']}", "1 is")
    theta = _number(rope, "rope_theta", values["rope_theta"] or default_theta)
    if kind == "default":
        return theta, YarnConfig()
    original = values["original_max_position_embeddings"] or _number(
        rope, "original_max_position_embeddings", values["max_position_embeddings"]
    )
    if not original >= 1:
        raise ValueError(
            f"rope_parameters.original_max_position_embeddings={original}: must be at least 1; correct config.json"
        )
    if not isinstance(rope.get("truncate", True), bool | None):
        raise ValueError(
            f"rope_parameters.truncate={rope['truncate']!r}: must be true or false; correct config.json"
        )
    if "factor" not in rope:
        raise ValueError("rope_parameters.factor is missing: YaRN stretches the context by it; set it")
    factor = _number(rope, "factor", values["max_position_embeddings"] / original)
    scale = _attention_factor(rope | {"factor": factor})
    if factor == 1:
        if not math.isclose(scale, 1):
            raise not_computed(f"rope_parameters.attention_factor={scale}", "1 with factor=1 is")
        return theta, YarnConfig()
    defaults = YarnConfig()
    mscale, mscale_all_dim = _mscales(rope)
    found = YarnConfig(
        factor=factor,
        original_seq_length=int(original),
        beta_fast=_number(rope, "beta_fast", 0) or defaults.beta_fast,
        beta_slow=_number(rope, "beta_slow", 0) or defaults.beta_slow,
        mscale=mscale if uses_mla and mscale and mscale_all_dim else defaults.mscale,
        mscale_all_dim=mscale_all_dim if uses_mla else 0.0,
        truncate=bool(rope.get("truncate", True)),
    )
    is_derived = rope.get("attention_factor") is None and math.isclose(rotary_scale(found), scale)
    return theta, found if is_derived else replace(found, attention_factor=scale)


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """What transformers multiplies cosines and sines by."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor", 1)
    mscale, mscale_all_dim = _mscales(rope)
    if not (mscale and mscale_all_dim):
        mscale, mscale_all_dim = 1.0, 0.0
    yarn = YarnConfig(factor=rope["factor"], mscale=mscale, mscale_all_dim=mscale_all_dim)
    return rotary_scale(yarn)


def _mscales(rope: Mapping[str, Any]) -> tuple[float, float]:
    return _number(rope, "mscale", 0), _number(rope, "mscale_all_dim", 0)


def _number(rope: Mapping[str, Any], name: str, default: float) -> float:
    value = default if rope.get(name) is None else rope[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"rope_parameters.{name}={value!r}: must be a number; correct config.json")
    if not math.isfinite(value):
        raise ValueError(f"rope_parameters.{name}={value}: must be finite; correct config.json")
    return float(value)
