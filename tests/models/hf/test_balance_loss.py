"""The coefficient of the load-balancing loss is converted: its gradient is that of transformers' loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from counterflow.models.config import ModelConfig
from counterflow.models.hf.config import from_hf_config, to_hf_config
from counterflow.models.hf.files import write_folder
from counterflow.models.hf.weights import to_hf
from counterflow.models.transformer import TransformerStage
from tests.models.hf.model import build, sample, state_of
from tests.models.hf.tiny_shapes import DEEPSEEK_V3, MIXTRAL, QWEN3_MOE, VOCAB


def with_weight(config: ModelConfig, weight: float, num_layers: int) -> ModelConfig:
    return replace(config, num_layers=num_layers, moe=replace(config.moe, load_balance_loss=weight))


def alike(stage: TransformerStage) -> None:
    """Let every layer of experts see the same states through one norm and one router, so that their loads are equal."""
    with torch.no_grad():
        parameters = dict(stage.named_parameters())
        last = f"layers.{stage.config.num_layers - 1}."
        for name, parameter in parameters.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            if name.endswith(("router.weight", "mlp_norm.weight")):
                parameter.copy_(parameters[last + name.split(".", 2)[2]])


def gradients(stage: TransformerStage, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Of the balance loss alone with respect to each router, transformers' and ours."""
    config = stage.config
    write_folder(
        folder, to_hf_config(config, vocab_size=VOCAB, max_positions=64), to_hf(state_of(stage), config)
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.output_router_logits
    tokens, targets = sample(VOCAB)
    out = model(input_ids=tokens, labels=targets)
    (model.config.router_aux_loss_coef * out.aux_loss).backward()
    (stage(tokens).sum() * 0).backward()

    def routers(module: torch.nn.Module, name: str) -> list[Tensor]:
        return [
            each.grad
            for key, each in module.named_parameters()
            if key.endswith(name) and each.grad is not None
        ]

    return routers(model, ".gate.weight"), routers(stage, ".router.weight")


@pytest.mark.parametrize(
    ("config", "num_layers"), [(MIXTRAL, 1), (QWEN3_MOE, 2), (MIXTRAL, 3), (QWEN3_MOE, 4)]
)
def test_gradients_are_those_of_transformers(config: ModelConfig, num_layers: int, tmp_path: Path) -> None:
    config = with_weight(config, 0.03, num_layers)
    stage = build(config)
    num_moe_layers = num_layers - config.moe.num_dense_layers
    if num_moe_layers > 1:
        alike(stage)
    theirs, ours = gradients(stage, tmp_path)
    assert len(theirs) == len(ours) == num_moe_layers
    for one, other in zip(theirs, ours, strict=True):
        assert one.abs().max() > 1e-6
        assert (one - other).norm() <= 1e-5 * one.norm()


def test_the_coefficient_there_and_back() -> None:
    config = with_weight(QWEN3_MOE, 0.03, 5)
    values = to_hf_config(config, vocab_size=VOCAB, max_positions=64)
    # Four layers with experts, three choices.
    assert values["router_aux_loss_coef"] == pytest.approx(0.03 * 4 / 3)
    assert from_hf_config(values).moe.load_balance_loss == pytest.approx(0.03)
    del values["router_aux_loss_coef"]
    assert from_hf_config(values).moe.load_balance_loss == pytest.approx(0.001 * 3 / 4)


def test_what_only_training_reads_is_said_where_it_has_no_place(caplog: pytest.LogCaptureFixture) -> None:
    moe = replace(DEEPSEEK_V3.moe, bias_update_speed=0.001, z_loss=0.01)
    to_hf_config(replace(DEEPSEEK_V3, moe=moe), vocab_size=VOCAB, max_positions=64)
    assert "no place for model.moe.bias_update_speed=0.001, model.moe.z_loss=0.01" in caplog.text
    caplog.clear()
    to_hf_config(with_weight(MIXTRAL, 0.03, 2), vocab_size=VOCAB, max_positions=64)
    assert not caplog.text
    values = to_hf_config(MIXTRAL, vocab_size=VOCAB, max_positions=64) | {"router_jitter_noise": 0.1}
    from_hf_config(values)
    assert "router_jitter_noise=0.1 is left out" in caplog.text
