"""What cannot be written for transformers, or read from it, is refused with the rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from counterflow.models.config import ModelConfig, MoEConfig, MTPConfig
from counterflow.models.hf.config import family_of, from_hf_config, to_hf_config
from counterflow.models.hf.files import read_folder, write_folder
from counterflow.models.hf.weights import from_hf, to_hf
from tests.models.hf.model import build, state_of
from tests.models.hf.tiny_shapes import DEEPSEEK_V3, GPT2, LLAMA, MIXTRAL, QWEN3_MOE, VOCAB


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (replace(GPT2, position="rope"), "gpt2 has layer norms, GELU, learned positions"),
        (replace(LLAMA, mlp_bias=False), "are both set or both not"),
        (replace(LLAMA, mtp=MTPConfig(num_modules=1)), "MTP modules are in deepseek_v3 only"),
        (replace(DEEPSEEK_V3, moe=MoEConfig()), "routed and shared experts"),
        (replace(MIXTRAL, moe=MoEConfig(num_experts=4, num_shared_experts=1)), "without groups, shared"),
        (replace(MIXTRAL, moe=MoEConfig(num_experts=4, normalize_weights=False)), "weights normalised"),
        (replace(QWEN3_MOE, moe=MoEConfig(num_experts=4, capacity_factor=1.0)), "drops tokens"),
    ],
)
def test_a_model_that_transformers_has_no_architecture_for(config: ModelConfig, rule: str) -> None:
    with pytest.raises(
        ValueError, match=f"^no architecture of transformers.*{rule}.*change the model's shape"
    ):
        family_of(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type=mamba: not an architecture known here; they are llama, "),
        ({"hidden_act": "relu"}, "hidden_act=relu: only hidden_act=silu"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type=llama3: only default"),
        ({"sliding_window": 128}, "sliding_window=128: only sliding_window=None"),
    ],
)
def test_a_configuration_that_is_not_computed_here(changes: dict[str, Any], message: str) -> None:
    values = to_hf_config(LLAMA, vocab_size=VOCAB, max_positions=64)
    with pytest.raises(ValueError, match=message):
        from_hf_config(values | changes)


def test_tensors_of_another_model() -> None:
    tensors = to_hf(state_of(build(MIXTRAL)), MIXTRAL)
    tensors["model.extra.weight"] = tensors.pop("model.norm.weight")
    with pytest.raises(
        ValueError,
        match=r"1 tensors of the model are missing \(model.norm.weight\); 1 tensors do not .*extra",
    ):
        from_hf(tensors, MIXTRAL)
    with pytest.raises(ValueError, match="do not belong to the model"):
        to_hf(state_of(build(MIXTRAL)) | {"stray": torch.zeros(1)}, MIXTRAL)


def test_a_folder_that_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a whole Hugging Face checkpoint \(FileNotFoundError"):
        read_folder(tmp_path)
    write_folder(tmp_path, {"model_type": "llama"}, {"a": torch.zeros(3)})
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match="SafetensorError"):
        read_folder(tmp_path)
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="files outside of its folder"):
        read_folder(tmp_path)
