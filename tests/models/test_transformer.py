"""The model in one process: against transformers' Llama, whole against cut into stages, initial values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from counterflow.models.config import ModelConfig
from counterflow.models.transformer import TransformerStage, materialize
from counterflow.parallel.collectives import Axis
from counterflow.parallel.parameters import placement_of
from tests.models.placement import assert_close_to_scale, grad_of

VOCAB = 50
CONFIG = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    rope_theta=500.0,
    norm_eps=1e-3,
    init_std=0.1,
)
TIED = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=6,
    tie_embeddings=True,
    init_std=0.1,
)


def build(
    config: ModelConfig, layers: range | None = None, *, first: bool = True, last: bool = True
) -> TransformerStage:
    stage = TransformerStage(
        config,
        range(config.num_layers) if layers is None else layers,
        first=first,
        last=last,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=VOCAB,
    )
    assert all(parameter.is_meta for parameter in stage.parameters())
    materialize(stage, device="cpu", seed=5)
    return stage


def perturb(stage: TransformerStage) -> TransformerStage:
    """Norm weights of one would hide a norm in the wrong place."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return stage


def sample() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def hf_name(name: str) -> str:
    if name == "head.weight":
        return "lm_head.weight"
    for ours, theirs in (
        ("embedding.", "embed_tokens."),
        (".attention.", ".self_attn."),
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
    ):
        name = name.replace(ours, theirs)
    return f"model.{name}"


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_logits_and_gradients_are_those_of_transformers(config: ModelConfig) -> None:
    stage = perturb(build(config))
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.dim_per_head,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="eager",
        )
    )
    theirs = dict(reference.named_parameters())
    ours = dict(stage.named_parameters())
    assert {hf_name(name) for name in ours} == set(theirs)
    with torch.no_grad():
        for name, parameter in ours.items():
            theirs[hf_name(name)].copy_(parameter)

    tokens, targets = sample()
    expected = reference(input_ids=tokens).logits
    logits = stage(tokens)
    assert expected.abs().max() > 0.5
    assert_close_to_scale(logits, expected)

    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for name, parameter in ours.items():
        assert_close_to_scale(grad_of(parameter), grad_of(theirs[hf_name(name)]), name)


def test_stages_in_a_row_are_the_whole_model() -> None:
    whole = build(CONFIG)
    stages = [
        build(CONFIG, range(0), last=False),
        build(CONFIG, range(0, 2), first=False, last=False),
        build(CONFIG, range(2, 3), first=False, last=False),
        build(CONFIG, range(3, 3), first=False),
    ]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    tokens, _ = sample()
    x = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(tokens))


def test_tied_embedding_is_one_parameter_on_one_stage_and_equal_copies_on_two() -> None:
    whole = build(TIED)
    assert whole.head is not None
    assert whole.embedding is not None
    assert whole.head.weight is whole.embedding.weight
    assert "head.weight" not in dict(whole.named_parameters())

    first, last = build(TIED, range(1), last=False), build(TIED, range(1, 2), first=False)
    copy = dict(last.named_parameters())["head.weight"]
    assert placement_of(copy).tied_to == "embedding.weight"
    assert torch.equal(copy, dict(first.named_parameters())["embedding.weight"])
    tokens, _ = sample()
    assert torch.equal(last(first(tokens)), whole(tokens))


def test_placements_survive_materialize() -> None:
    stage = build(CONFIG)
    parameters = dict(stage.named_parameters())
    scaled = CONFIG.init_std / math.sqrt(2 * CONFIG.num_layers)
    for name, parameter in parameters.items():
        placement = placement_of(parameter)
        assert placement.global_shape == tuple(parameter.shape)
        assert placement.weight_decay == ("norm" not in name)
        if "norm" in name:
            assert placement.init == "ones"
        else:
            expected = scaled if "o_proj" in name or "down_proj" in name else CONFIG.init_std
            assert placement.init_std == expected
            assert parameter.std().item() == pytest.approx(expected, rel=0.1)


def test_causal() -> None:
    stage, (tokens, _) = build(CONFIG), sample()
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % VOCAB
    before, after = stage(tokens), stage(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


def test_training_after_an_evaluation_in_inference_mode_and_at_other_lengths() -> None:
    stage, (tokens, _) = build(CONFIG), sample()
    with torch.inference_mode():
        short = stage(tokens[:, :5])
    long = stage(tokens)
    long.sum().backward()
    torch.testing.assert_close(short, long[:, :5].detach())
    torch.testing.assert_close(stage(tokens[:, :5]), long[:, :5])


def test_bf16_stays_near_fp32() -> None:
    tokens, _ = sample()
    expected = build(CONFIG)(tokens)
    stage = TransformerStage(
        CONFIG,
        range(CONFIG.num_layers),
        first=True,
        last=True,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=VOCAB,
        dtype=torch.bfloat16,
    )
    materialize(stage, device="cpu", seed=5)
    logits = stage(tokens)
    assert logits.dtype == torch.bfloat16
    assert_close_to_scale(logits.float(), expected, ulps=8 * 2**16)  # 8 roundings of bf16
