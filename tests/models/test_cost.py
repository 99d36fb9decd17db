"""Counts against published parameter counts, torch's FLOP counter and the tensors autograd really keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from counterflow.models.config import ModelConfig, MoEConfig, MTPConfig
from counterflow.models.cost import (
    activation_bytes_per_layer,
    hardware_flops_per_token,
    model_cost,
    recomputed_flops,
    stage_parameters,
)
from counterflow.models.hf.config import to_hf_config
from counterflow.models.partition import partition
from counterflow.models.positions import rotary_table
from counterflow.models.recompute import Part, Parts, options
from counterflow.models.transformer import TransformerBlock, TransformerStage, materialize
from counterflow.parallel.collectives import Axis
from tests.models.hf import tiny_shapes
from tests.models.hf.model import build
from tests.models.hf.tiny_shapes import VOCAB
from tests.models.shapes import shape

GQA = ModelConfig(hidden_size=64, intermediate_size=96, num_layers=3, num_heads=8, num_kv_heads=2)
WIDE_HEADS = replace(GQA, head_dim=16, tie_embeddings=True)
TIED_V3 = replace(tiny_shapes.DEEPSEEK_V3, tie_embeddings=True)
SHAPES = {"gqa": GQA, "wide heads, tied": WIDE_HEADS, "deepseek_v3, tied": TIED_V3} | tiny_shapes.ALL


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


def test_small_has_10_to_30_million_parameters() -> None:
    config = shape("small")
    for vocab_size in (4096, 16384):
        assert 10e6 < model_cost(config, seq_length=512, vocab_size=vocab_size).parameters < 30e6


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stage_parameters_are_those_built(config: ModelConfig, num_stages: int) -> None:
    for part in partition(config, num_stages, seq_length=32, vocab_size=100):
        built = stage_of(config, part.layers, first=part.first, last=part.last)
        assert stage_parameters(config, part.layers, first=part.first, last=part.last, vocab_size=100) == sum(
            parameter.numel() for parameter in built.parameters()
        )


def test_parts_add_up() -> None:
    for config in SHAPES.values():
        cost = model_cost(config, seq_length=32, vocab_size=100)
        layers = sum(run.count * run.parameters for run in cost.layers)
        assert cost.embedding_parameters + layers + cost.head_parameters == cost.parameters
        # One stage has every parameter once.
        whole = stage_parameters(config, range(config.num_layers), first=True, last=True, vocab_size=100)
        assert cost.parameters == whole


def test_runs_of_equal_layers() -> None:
    runs = model_cost(tiny_shapes.DEEPSEEK_V3, seq_length=32, vocab_size=100).layers
    assert [(run.kind, run.first, run.count) for run in runs] == [
        ("dense", 0, 1),
        ("moe", 1, 2),
        ("mtp", 3, 2),
    ]
    assert [run.routed_experts > 0 for run in runs] == [False, True, True]


def test_active_parameters_are_those_of_the_chosen_experts() -> None:
    """The parameters that get a gradient from one token, which goes to 3 of 8 experts."""
    config = replace(tiny_shapes.DEEPSEEK_V3, mtp=MTPConfig())
    stage = build(config)
    stage(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    reached = 0
    for name, parameter in stage.named_parameters():
        if ".experts." in name:
            assert parameter.grad is not None
            reached += int(parameter.grad.flatten(1).any(1).sum()) * parameter[0].numel()
        else:
            reached += parameter.numel()
    assert model_cost(config, seq_length=32, vocab_size=VOCAB).active_parameters == reached


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt2", "qwen3"])
def test_forward_flops_are_those_of_transformers(name: str) -> None:
    """Its experts are applied in a loop of plain products, each to the tokens that chose it."""
    config = tiny_shapes.ALL[name]
    values = to_hf_config(config, vocab_size=VOCAB, max_positions=64)
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**values), attn_implementation="eager", experts_implementation="eager"
    )
    batch, seq = 2, 16
    counter = FlopCounterMode(display=False)
    with counter:
        reference(input_ids=torch.randint(0, VOCAB, (batch, seq)))
    cost = model_cost(config, seq_length=seq, vocab_size=VOCAB, causal_halved=False).without_mtp
    assert counter.get_total_flops() == batch * seq * cost.forward_flops_per_token


# Values as wide as keys: narrower ones are padded for the CPU.
DENSE_V3 = replace(
    tiny_shapes.DEEPSEEK_V3, moe=MoEConfig(), mla=replace(tiny_shapes.DEEPSEEK_V3.mla, v_head_dim=16)
)


@pytest.mark.parametrize(
    "config",
    [GQA, WIDE_HEADS, tiny_shapes.QWEN3, replace(tiny_shapes.GPT2, max_seq_length=32), DENSE_V3],
    ids=["gqa", "wide heads, tied", "norms on heads", "gpt2", "latent attention, mtp"],
)
def test_flops_are_those_torch_counts(config: ModelConfig) -> None:
    stage = stage_of(config, range(config.num_layers), first=True, last=True)
    materialize(stage, device="cpu", seed=0)

    def results() -> Tensor:
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        if not config.mtp.num_modules:
            return stage(tokens).sum()
        logits, hidden = stage(tokens)
        return logits.sum() + sum(found.sum() for found, _ in stage.mtp_predictions(hidden, tokens))

    batch, seq = 2, 32
    counter = FlopCounterMode(display=False)
    # The fused CPU kernel has no formula in torch's counter; the plain one is counted by its products.
    with sdpa_kernel(SDPBackend.MATH):
        with counter:
            result = results()
        forward = counter.get_total_flops()
        with counter:
            result.backward()
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


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (GQA, ("attention",)),
        (GQA, ("attention", "mlp")),
        (DENSE_V3, ("block",)),
        (replace(DENSE_V3, mtp=MTPConfig()), ("attention",)),
    ],
)
def test_recomputed_flops_are_those_torch_counts(config: ModelConfig, parts: tuple[Part, ...]) -> None:
    """Of a whole step, over those of one without recomputation: what the backward runs again."""
    batch, seq = 2, 32
    plan = {index: frozenset(parts) for index in range(config.num_layers)}
    totals: list[int] = []
    for recomputed in ({}, plan):
        stage = TransformerStage(
            config,
            range(config.num_layers),
            first=True,
            last=True,
            tensor=Axis(),
            sequence_parallel=False,
            vocab_size=100,
            recomputed=recomputed,
        )
        materialize(stage, device="cpu", seed=0)
        counter = FlopCounterMode(display=False)
        with sdpa_kernel(SDPBackend.MATH), counter:
            out = stage(torch.zeros(batch, seq, dtype=torch.int64))
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        totals.append(counter.get_total_flops())
    again = sum(
        recomputed_flops(config, index, of_layer, seq_length=seq, causal_halved=False)
        for index, of_layer in plan.items()
    )
    assert totals[1] - totals[0] == batch * seq * again
    without, with_all = (
        hardware_flops_per_token(config, each, seq_length=seq, vocab_size=100, causal_halved=False)
        for each in ({}, plan)
    )
    assert with_all - without == again


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


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_activation_bytes_are_those_autograd_keeps(config: ModelConfig) -> None:
    """With every choice of what is recomputed."""
    for parts in options(config, 2):
        check_activation_bytes(config, parts)


def check_activation_bytes(config: ModelConfig, parts: Parts) -> None:
    config = replace(config, max_seq_length=32)
    rotary = rotary_table(config)
    block = TransformerBlock(
        config,
        layer=2,
        rotary=rotary,
        tensor=Axis(),
        sequence_parallel=False,
        recomputed=parts,
        device="cpu",
    )
    materialize(block, device="cpu", seed=0)
    batch, seq = 2, 32
    measured = kept_bytes(block, torch.randn(batch, seq, config.hidden_size, requires_grad=True))
    expected = activation_bytes_per_layer(
        config, num_tokens=batch * seq, layer=2, bytes_per_element=4, recomputed=parts, on_cpu=True
    )
    # The rotary tables are shared by all layers.
    has_tables = rotary is not None and not parts & {"attention", "block"}
    rotary_size = config.mla.qk_rope_head_dim if config.uses_mla else config.dim_per_head
    known = 4 * 2 * seq * rotary_size if has_tables else 0
    # Of a router's numbers only the larger are counted.
    tolerance = 0.04 * expected if config.is_moe_layer(2) and parts & {"experts", "shared_experts"} else 0
    tolerance = max(tolerance, 0.015 * expected if config.is_moe_layer(2) else 0)
    assert abs(measured - expected - known) <= tolerance, parts


def test_a_fused_norm_keeps_less() -> None:
    """What torch's kernels for CPUs keep besides, for each token: RMSNorm x / rms, of both norms."""
    fused, unfused = (
        activation_bytes_per_layer(GQA, num_tokens=1, bytes_per_element=4, on_cpu=on_cpu)
        for on_cpu in (False, True)
    )
    assert unfused - fused == 2 * 4 * GQA.hidden_size


def test_activation_bytes_shrink_over_the_tensor_axis() -> None:
    def kept(size: int, sequence_parallel: bool) -> int:
        return activation_bytes_per_layer(
            GQA, num_tokens=1, tensor_parallel_size=size, sequence_parallel=sequence_parallel
        )

    # Per token: 4 x 64 around the regions; (2 x 8 + 2 x 2) x 8 + 4 x 96 inside; 2 bytes each. fp32: 2 and 8.
    assert kept(1, False) == kept(1, True) == 2 * (256 + 160 + 384) + 4 * (2 + 8)
    assert kept(2, False) == 2 * (256 + 80 + 192) + 4 * (2 + 4)
    assert kept(2, True) == 2 * (64 + 128 + 80 + 192) + 4 * (1 + 4)
