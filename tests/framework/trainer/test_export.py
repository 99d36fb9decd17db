"""A run's checkpoint in Hugging Face's format computes there what the run had learned, its routers' biases too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from counterflow.framework.checkpoint.manifest import step_folder
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.checkpointing import save_state
from counterflow.framework.trainer.export import export_checkpoint, model_state
from counterflow.framework.trainer.loop import train
from counterflow.framework.trainer.resume_source import checkpoints_of
from counterflow.models.hf.weights import to_hf
from tests.framework.trainer.test_rebalance import whole_state
from tests.models.hf.model import loaded
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, merged, prepare_tiny, run_context, tiny_config

# Odd, so that what goes up and down by one speed does not end at zero.
NUM_STEPS = 3


def train_and_save(config: TrainConfig, folder: Path) -> tuple[int, dict[str, Tensor]]:
    run = run_context(prepare_tiny(folder / "data"), folder / "run")
    assembly = build(config, run.data, torch.device("cpu"))
    list(train(assembly, 0))
    save_state(assembly, run, NUM_STEPS)
    return assembly.vocab_size, whole_state(assembly)


def test_logits_of_a_checkpoint_in_transformers(ranks: RankPool, tmp_path: Path) -> None:
    # A quick bias, large weights: what is left out shows.
    changes: dict[str, Any] = {
        "init_std": 0.3,
        "mla": {"latent_norm_eps": 1e-6},
        "moe": {"bias_update_speed": 0.1},
    }
    config = tiny_config(model=merged(MIXTURES["deepseek_v3"], changes), training={"num_steps": NUM_STEPS})
    prepare_tiny(tmp_path / "data")
    ((vocab_size, whole),) = ranks.run(train_and_save, 1, config, tmp_path)
    checkpoint = step_folder(checkpoints_of(tmp_path / "run"), NUM_STEPS)
    export_checkpoint(checkpoint, tmp_path / "hf", config.model, vocab_size=vocab_size, max_positions=32)
    reference: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager", dtype=torch.float32
    )

    model = loaded_run(config, vocab_size, whole)
    tokens = torch.randint(0, vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = model(tokens)[0], reference(input_ids=tokens).logits
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        for layer in reference.model.layers[1:]:
            assert layer.mlp.gate.e_score_correction_bias.abs().max() > 0.05
            layer.mlp.gate.e_score_correction_bias.zero_()
        assert (reference(input_ids=tokens).logits - expected).abs().max() > 1e-2, "the biases matter here"

    state = model_state(checkpoint, config.model, vocab_size=vocab_size)
    with pytest.raises(ValueError, match=r"the biases of 4 routers are missing \(layers.1.mlp.router.bias"):
        to_hf({name: state[name] for name in state if not name.endswith("router.bias")}, config.model)


def loaded_run(config: TrainConfig, vocab_size: int, whole: dict[str, Tensor]) -> Any:
    """The model in one process with the masters and the biases that the run held."""
    model = {
        name.removeprefix("model."): tensor for name, tensor in whole.items() if name.startswith("model.")
    }
    num_layers = config.model.num_layers
    for index in range(1, num_layers):
        model[f"layers.{index}.mlp.router.bias"] = whole[f"routing.layers.{index}.router.bias"]
    model["mtp.layers.0.block.mlp.router.bias"] = whole[f"routing.layers.{num_layers}.router.bias"]
    return loaded(replace(config.model, vocab_size=vocab_size), model)
