"""Models written in Hugging Face's format and read by transformers compute what ours do, and come back unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from counterflow.models.config import ModelConfig
from counterflow.models.hf.config import family_of, from_hf_config, to_hf_config
from counterflow.models.hf.files import read_folder, write_folder
from counterflow.models.hf.weights import from_hf, to_hf
from tests.models.hf.model import build, sample, state_of
from tests.models.hf.tiny_shapes import ALL, VOCAB


def exported(config: ModelConfig, folder: Path) -> None:
    values = to_hf_config(config, vocab_size=VOCAB, max_positions=64)
    write_folder(folder, values, to_hf(state_of(build(config)), config))


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = ALL[name]
    exported(config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == name.split(",")[0]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    reference, loading = loaded
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]
    # Modules for further tokens are read apart from the model.
    unread = [key for key in loading["unexpected_keys"] if f"layers.{config.num_layers}" not in key]
    assert all(f"layers.{config.num_layers + 1}" in key for key in unread)

    stage = build(config)
    tokens, _ = sample(VOCAB)
    expected = reference(input_ids=tokens).logits
    logits = stage(tokens)[0] if config.mtp.num_modules else stage(tokens)
    assert expected.std() > 0.1
    difference = (logits - expected).abs().max().item()
    assert difference <= 1e-5, difference


@pytest.mark.parametrize("name", ALL)
def test_what_transformers_writes_comes_back(name: str, tmp_path: Path) -> None:
    config = ALL[name]
    exported(config, tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20kB")
    values, tensors = read_folder(tmp_path / "theirs")
    without_mtp = replace(config, mtp=replace(config.mtp, num_modules=0))
    if config.mtp.num_modules:
        values["num_nextn_predict_layers"] = 0
    found = from_hf_config(values, name=config.name)
    moe = replace(without_mtp.moe, load_balance_loss=found.moe.load_balance_loss)
    assert found == replace(without_mtp, moe=moe)
    state = state_of(build(config))
    ours = from_hf(tensors, found)
    assert set(ours) == {key for key in state if not key.startswith("mtp.")}
    for key, tensor in ours.items():
        assert torch.equal(tensor, state[key]), key


@pytest.mark.parametrize("name", ALL)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    config = ALL[name]
    state = state_of(build(config))
    write_folder(
        tmp_path,
        to_hf_config(config, vocab_size=VOCAB, max_positions=64),
        to_hf(state, config),
        max_file_bytes=9000,
    )
    values, tensors = read_folder(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert from_hf_config(values, name=config.name) == config
    back = from_hf(tensors, config)
    assert set(back) == set(state)
    assert all(torch.equal(back[key], tensor) for key, tensor in state.items())


def test_shapes_are_of_the_families_they_say() -> None:
    assert [family_of(config) for config in ALL.values()] == [name.split(",")[0] for name in ALL]
