"""Counts against published parameter counts, torch's FLOP counter and the tensors autograd really keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.attention import RotaryTable
from models.config import ModelConfig
from models.cost import activation_bytes_per_layer, model_cost, stage_parameters
from models.partition import partition
from models.transformer import TransformerBlock, TransformerStage, materialize
from parallel.collectives import Axis

SHAPES = Path(__file__).parents[2] / "conf" / "model"
GQA = ModelConfig(hidden_size=64, intermediate_size=96, num_layers=3, num_heads=8, num_kv_heads=2)
WIDE_HEADS = replace(GQA, head_dim=16, tie_embeddings=True)


def stage_of(
    config: ModelConfig, layers: range, *, first: bool, last: bool, vocab_size: int = 100
) -> TransformerStage:
    return TransformerStage(
        config,
        layers,
        first=first,
        last=last,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=vocab_size,
    )


@pytest.mark.parametrize(
    ("name", "billions"), [("llama3_8b", 8.03), ("llama3_70b", 70.55), ("llama3_405b", 405.85)]
)
def test_published_parameter_counts(name: str, billions: float) -> None:
    config = ModelConfig(**yaml.safe_load((SHAPES / f"{name}.yaml").read_text()))
    assert config.vocab_size == 128256
    cost = model_cost(config, seq_length=8192, vocab_size=128256)
    assert round(cost.parameters / 1e9, 2) == billions
    built = stage_of(config, range(config.num_layers), first=True, last=True, vocab_size=128256)
    assert cost.parameters == sum(parameter.numel() for parameter in built.parameters())


def test_small_has_10_to_30_million_parameters() -> None:
    config = ModelConfig(**yaml.safe_load((SHAPES / "small.yaml").read_text()))
    for vocab_size in (4096, 16384):
        assert 10e6 < model_cost(config, seq_length=512, vocab_size=vocab_size).parameters < 30e6


def test_shape_files_hold_only_what_differs_from_the_defaults() -> None:
    default = ModelConfig()
    for path in SHAPES.glob("*.yaml"):
        values: dict[str, Any] = yaml.safe_load(path.read_text())
        ModelConfig(**values)
        assert values.pop("name") == path.stem
        assert [key for key, value in values.items() if getattr(default, key) == value] == []


@pytest.mark.parametrize("config", [GQA, WIDE_HEADS], ids=["gqa", "wide heads, tied"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stage_parameters_are_those_built(config: ModelConfig, num_stages: int) -> None:
    for part in partition(config, num_stages, seq_length=32, vocab_size=100):
        built = stage_of(config, part.layers, first=part.first, last=part.last)
        assert stage_parameters(
            config, len(part.layers), first=part.first, last=part.last, vocab_size=100
        ) == sum(parameter.numel() for parameter in built.parameters())


def test_parts_add_up() -> None:
    for config in (GQA, WIDE_HEADS):
        cost = model_cost(config, seq_length=32, vocab_size=100)
        parts = cost.embedding_parameters + config.num_layers * cost.layer_parameters + cost.head_parameters
        assert parts == cost.parameters


@pytest.mark.parametrize("config", [GQA, WIDE_HEADS], ids=["gqa", "wide heads, tied"])
def test_flops_are_those_torch_counts(config: ModelConfig) -> None:
    stage = stage_of(config, range(config.num_layers), first=True, last=True)
    materialize(stage, device="cpu", seed=0)
    batch, seq = 2, 32
    counter = FlopCounterMode(display=False)
    # The fused CPU kernel has no formula in torch's counter; the plain one is counted by its products.
    with sdpa_kernel(SDPBackend.MATH):
        with counter:
            logits = stage(torch.zeros(batch, seq, dtype=torch.int64))
        forward = counter.get_total_flops()
        with counter:
            logits.sum().backward()
    cost = model_cost(config, seq_length=seq, vocab_size=100, causal_halved=False)
    assert forward == batch * seq * cost.forward_flops_per_token
    # The first layer's input gradient is needed by the embedding, so a backward is two forwards to the last.
    assert forward + counter.get_total_flops() == batch * seq * cost.training_flops_per_token


def test_causal_halving_takes_half_of_attention() -> None:
    whole = model_cost(GQA, seq_length=32, vocab_size=100, causal_halved=False)
    halved = model_cost(GQA, seq_length=32, vocab_size=100)
    # Two products of 2 x 32 keys x 64 for each of 3 layers.
    assert whole.forward_flops_per_token - halved.forward_flops_per_token == 3 * (2 * 2 * 32 * 64) // 2
    assert halved.causal_halved


def kept_bytes(block: TransformerBlock, x: Tensor) -> int:
    """Bytes of the distinct storages, other than parameters, that autograd keeps for a backward."""
    parameters = {parameter.data_ptr() for parameter in block.parameters()}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)  # a storage freed and used again would be counted once
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(storages.values())


@pytest.mark.parametrize("config", [GQA, WIDE_HEADS], ids=["gqa", "wide heads"])
def test_activation_bytes_are_those_autograd_keeps(config: ModelConfig) -> None:
    block = TransformerBlock(
        config,
        rotary=RotaryTable(config.dim_per_head, 1e4),
        tensor=Axis(),
        sequence_parallel=False,
        device="cpu",
    )
    materialize(block, device="cpu", seed=0)
    batch, seq = 2, 32
    measured = kept_bytes(block, torch.randn(batch, seq, config.hidden_size, requires_grad=True))
    expected = activation_bytes_per_layer(config, num_tokens=batch * seq, bytes_per_element=4)
    # On CPU RMSNorm is not fused and keeps x / rms besides; the rotary tables are shared by all layers.
    unfused_norms = 2 * batch * seq * config.hidden_size * 4
    rotary_tables = 2 * seq * config.dim_per_head * 4
    assert measured == expected + unfused_norms + rotary_tables


def test_activation_bytes_shrink_over_the_tensor_axis() -> None:
    def kept(size: int, sequence_parallel: bool) -> int:
        return activation_bytes_per_layer(
            GQA, num_tokens=1, tensor_parallel_size=size, sequence_parallel=sequence_parallel
        )

    # Per token: 4 x 64 around the regions; (2 x 8 + 2 x 2) x 8 + 4 x 96 inside; 2 bytes each. fp32: 2 and 8.
    assert kept(1, False) == kept(1, True) == 2 * (256 + 160 + 384) + 4 * (2 + 8)
    assert kept(2, False) == 2 * (256 + 80 + 192) + 4 * (2 + 4)
    assert kept(2, True) == 2 * (64 + 128 + 80 + 192) + 4 * (1 + 4)
