"""A whole model in one process, with its state under our names."""

from __future__ import annotations

import torch
from torch import Tensor

from counterflow.models.config import ModelConfig
from counterflow.models.moe import MoE
from counterflow.models.transformer import TransformerStage, materialize
from counterflow.parallel.collectives import Axis


def build(config: ModelConfig, *, seed: int = 5) -> TransformerStage:
    """Random weights; norms, biases and routers' biases away from the values that would hide them."""
    assert config.vocab_size is not None
    stage = TransformerStage(
        config,
        range(config.num_layers),
        first=True,
        last=True,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=config.vocab_size,
    )
    materialize(stage, device="cpu", seed=seed)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        if config.moe.router == "sigmoid":
            for bias in router_biases(stage).values():
                bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))
    return stage


def router_biases(stage: TransformerStage) -> dict[str, Tensor]:
    return {
        f"{name}.router.bias": module.router.state.bias
        for name, module in stage.named_modules()
        if isinstance(module, MoE)
    }


def loaded(config: ModelConfig, state: dict[str, Tensor]) -> TransformerStage:
    """The model with the weights and routers' biases of `state`, which has exactly its names."""
    stage = build(config)
    own = state_of(stage)
    assert set(own) == set(state)
    for name, tensor in own.items():
        tensor.copy_(state[name])
    return stage


def state_of(stage: TransformerStage) -> dict[str, Tensor]:
    """Parameters and what a checkpoint holds of routers."""
    found = {name: parameter.detach() for name, parameter in stage.named_parameters()}
    if stage.config.moe.router == "sigmoid":
        found |= router_biases(stage)
    return found


def sample(vocab_size: int, length: int = 16) -> tuple[Tensor, Tensor]:
    """Tokens [2, length] and the token after each."""
    tokens = torch.randint(0, vocab_size, (2, length + 1), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1], tokens[:, 1:]
