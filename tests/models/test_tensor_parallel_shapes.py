"""Models of every class over a tensor axis against one process: loss and the gradient of every parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.models.config import ModelConfig, MoEConfig
from counterflow.models.transformer import TransformerBlock, TransformerStage, materialize
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.ops.loss import vocab_parallel_cross_entropy
from counterflow.parallel.ops.weight_grad import WeightGradStore
from counterflow.parallel.parameters import placement_of
from counterflow.parallel.pipeline.runtime.adoption import adopt
from tests.models.hf import tiny_shapes
from tests.models.hf.model import build, router_biases, sample
from tests.models.hf.tiny_shapes import VOCAB
from tests.models.placement import assert_close_to_scale, fill, grad_of, slice_of
from tests.rank_pool import RankPool

SHAPES = {
    "latent attention, mtp": replace(tiny_shapes.DEEPSEEK_V3, moe=MoEConfig()),
    "no query latent": replace(tiny_shapes.DEEPSEEK_V2_LITE, moe=MoEConfig()),
    "norms on heads": tiny_shapes.QWEN3,
    "gpt2": tiny_shapes.GPT2,
    "biases": tiny_shapes.LLAMA,
    "deepseek_v3": tiny_shapes.DEEPSEEK_V3,
    "deepseek_v3, tied": replace(tiny_shapes.DEEPSEEK_V3, tie_embeddings=True),
}


def loss_of(stage: TransformerStage, tokens: Tensor, targets: Tensor, axis: Axis) -> Tensor:
    outputs = stage(tokens)
    pairs = [(outputs, targets)]
    if isinstance(outputs, tuple):
        logits, hidden = outputs
        pairs = [(logits, targets), *stage.mtp_predictions(hidden, targets)]
    losses = [vocab_parallel_cross_entropy(found, wanted, axis, vocab_size=VOCAB) for found, wanted in pairs]
    return torch.stack([loss.sum() for loss in losses]).sum()


def compare(name: str, sequence_parallel: bool, deferred: bool) -> None:
    config = SHAPES[name]
    tokens, targets = sample(VOCAB)
    reference = build(config)
    expected = loss_of(reference, tokens, targets, Axis())
    expected.backward()
    whole = dict(reference.named_parameters())

    axis = Axis(group=dist.group.WORLD)
    stage = TransformerStage(
        config,
        range(config.num_layers),
        first=True,
        last=True,
        tensor=axis,
        sequence_parallel=sequence_parallel,
        vocab_size=VOCAB,
    )
    materialize(stage, device="cpu", seed=5)
    for parameter_name, parameter in stage.named_parameters():
        fill(parameter, whole[parameter_name].detach())
    biases = router_biases(reference) if config.moe.router == "sigmoid" else {}
    for module_name, bias in (router_biases(stage) if biases else {}).items():
        bias.copy_(biases[module_name])

    buffers = {id(parameter): torch.zeros_like(parameter) for parameter in stage.parameters()}
    store = WeightGradStore(lambda parameter: buffers[id(parameter)])
    if deferred:
        adoption = adopt(stage, store)
        # Every matrix but the tables and the stacks of norms.
        immediate = [item for item in adoption.immediate if "norm" not in item and "bias" not in item]
        table = {"embedding.weight", "positions.weight"}
        assert set(immediate) <= table
    loss = loss_of(stage, tokens, targets, axis)
    assert_close_to_scale(loss, expected.detach(), "loss")
    if deferred:
        with store.deferring(0):
            loss.backward()
        store.run(0)
    else:
        loss.backward()

    for parameter_name, parameter in stage.named_parameters():
        placement = placement_of(parameter)
        grad = buffers[id(parameter)].clone()
        if parameter.grad is not None:
            grad += parameter.grad
        # All experts are on every rank here, and each rank's tokens come from its part of the sequence.
        if placement.partial_over_tensor or placement.experts is not None:
            dist.all_reduce(grad)
        wanted = slice_of(parameter, grad_of(whole[parameter_name]))
        if parameter_name.endswith("k_proj.bias") and config.position == "learned":
            # It adds the same to all scores of a query, so its gradient is nothing but rounding.
            assert (grad - wanted).abs().max() < 1e-6
            continue
        assert_close_to_scale(grad, wanted, parameter_name, ulps=128)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_matches_one_process(ranks: RankPool, name: str, sequence_parallel: bool) -> None:
    ranks.run(compare, 2, name, sequence_parallel, False)


@pytest.mark.parametrize("name", SHAPES)
def test_deferred_weight_gradients_match(ranks: RankPool, name: str) -> None:
    ranks.run(compare, 2, name, True, True)


def entering_bytes(config: ModelConfig) -> int:
    meter = ByteMeter()
    stage = TransformerStage(
        config,
        range(1),
        first=False,
        last=False,
        tensor=Axis(group=dist.group.WORLD, meter=meter),
        sequence_parallel=True,
        vocab_size=VOCAB,
    )
    materialize(stage, device="cpu", seed=5)
    x = torch.zeros(2, 8, config.hidden_size)
    block = stage.layers["0"]
    assert isinstance(block, TransformerBlock)
    block.attention(x)
    return meter.sent_bytes()["tensor"]


def test_latents_enter_the_tensor_parallel_region_in_place_of_hidden_states(ranks: RankPool) -> None:
    """Each of 2 ranks sends its half: 2 x 8 tokens, in by 24 + 16 + 8 numbers, out by the 32 of a hidden state."""
    config = SHAPES["latent attention, mtp"]
    assert ranks.run(entering_bytes, 2, config) == [4 * 2 * 8 * (24 + 16 + 8 + 32)] * 2


def refuse_heads() -> None:
    with pytest.raises(ValueError, match=r"model.num_heads=3: .*tensor_parallel_size=2.*more heads"):
        TransformerStage(
            replace(SHAPES["no query latent"], num_heads=3),
            range(1),
            first=True,
            last=False,
            tensor=Axis(group=dist.group.WORLD),
            sequence_parallel=True,
            vocab_size=VOCAB,
        )


def test_heads_that_the_axis_does_not_divide_are_refused(ranks: RankPool) -> None:
    ranks.run(refuse_heads, 2)
