"""The mixture of experts on one process, against transformers on the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.models.config import ModelConfig, MoEConfig
from counterflow.models.moe import MoE
from counterflow.models.transformer import materialize
from counterflow.parallel.collectives import Axis
from counterflow.parallel.expert.exchange import ExpertParallel, even_placement
from counterflow.parallel.ops.weight_grad import WeightGradStore
from counterflow.parallel.parameters import placement_of
from counterflow.parallel.pipeline.runtime.adoption import adopt
from tests.models.placement import assert_close_to_scale, grad_of

HIDDEN, INNER = 16, 24


def build(moe: MoEConfig, dtype: torch.dtype = torch.float32, **shape: Any) -> MoE:
    config = ModelConfig(
        **{"hidden_size": HIDDEN, "intermediate_size": 32, "init_std": 0.3, **shape, "moe": moe}
    )
    experts = ExpertParallel(axis=Axis(name="expert"), experts_by_rank=even_placement(moe.num_experts, 1))
    layer = MoE(config, layer=0, tensor=Axis(), sequence_parallel=False, experts=experts, dtype=dtype)
    materialize(layer, device="cpu", seed=4)
    return layer


def mixtral() -> tuple[MoEConfig, nn.Module]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    peer = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=6, num_experts_per_tok=2
    )
    ours = MoEConfig(num_experts=6, num_experts_per_token=2, expert_intermediate_size=INNER)
    return ours, MixtralSparseMoeBlock(peer)


def qwen3(normalize: bool) -> tuple[MoEConfig, nn.Module]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    peer = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=normalize,
    )
    ours = MoEConfig(
        num_experts=8,
        num_experts_per_token=3,
        expert_intermediate_size=INNER,
        normalize_weights=normalize,
    )
    return ours, Qwen3MoeSparseMoeBlock(peer)


def qwen2() -> tuple[MoEConfig, nn.Module]:
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    peer = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=2 * INNER,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
    )
    ours = MoEConfig(
        num_experts=8,
        num_experts_per_token=3,
        expert_intermediate_size=INNER,
        num_shared_experts=2,
        shared_expert_gate=True,
        normalize_weights=False,
    )
    return ours, Qwen2MoeSparseMoeBlock(peer)


def deepseek_v3() -> tuple[MoEConfig, nn.Module]:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    peer = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    ours = MoEConfig(
        num_experts=8,
        num_experts_per_token=3,
        expert_intermediate_size=INNER,
        num_shared_experts=2,
        router="sigmoid",
        num_groups=4,
        num_groups_per_token=2,
        routed_scaling_factor=2.5,
        bias_update_speed=0.001,
    )
    return ours, DeepseekV3MoE(peer)


def deepseek_v2() -> tuple[MoEConfig, nn.Module]:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    peer = DeepseekV2Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        num_attention_heads=4,
    )
    ours = MoEConfig(
        num_experts=8,
        num_experts_per_token=3,
        expert_intermediate_size=INNER,
        num_shared_experts=1,
        normalize_weights=False,
        num_groups=4,
        num_groups_per_token=2,
        routed_scaling_factor=1.5,
    )
    return ours, DeepseekV2Moe(peer)


def pairs_of(layer: MoE, peer: Any) -> list[tuple[list[nn.Parameter], nn.Parameter]]:
    """Our parameters, and the one of `peer` that holds them, laid behind each other along its next to last dim."""
    experts = layer.experts
    found = [
        ([layer.router.weight], peer.gate.weight),
        ([experts.gate_proj.weight, experts.up_proj.weight], peer.experts.gate_up_proj),
        ([experts.down_proj.weight], peer.experts.down_proj),
    ]
    if layer.shared is not None:
        shared = peer.shared_experts if hasattr(peer, "shared_experts") else peer.shared_expert
        for name in ("gate_proj", "up_proj", "down_proj"):
            found.append(([getattr(layer.shared, name).weight], getattr(shared, name).weight))
    if layer.shared_gate is not None:
        found.append(([layer.shared_gate.weight], peer.shared_expert_gate.weight))
    return found


PEERS = {
    "mixtral": mixtral,
    "qwen3": lambda: qwen3(True),
    "qwen3-not-normalized": lambda: qwen3(False),
    "qwen2-shared-gate": qwen2,
    "deepseek-v3": deepseek_v3,
    "deepseek-v2": deepseek_v2,
}


@pytest.mark.parametrize("name", list(PEERS))
def test_equals_transformers(name: str) -> None:
    moe, peer = PEERS[name]()
    layer = build(moe)
    with torch.no_grad():
        for ours, theirs in pairs_of(layer, peer):
            theirs.copy_(torch.cat([each.detach() for each in ours], dim=-2))
        if name == "deepseek-v3":
            layer.router.state.bias.uniform_(-0.3, 0.3)
            peer.gate.e_score_correction_bias.copy_(layer.router.state.bias)  # type: ignore[union-attr]
    torch.manual_seed(2)
    x = torch.randn(2, 12, HIDDEN, requires_grad=True)
    peer_x = x.detach().clone().requires_grad_()
    out, expected = layer(x), peer(peer_x)
    assert_close_to_scale(out.detach(), expected.detach(), "output")
    grad_output = torch.randn_like(out)
    out.backward(grad_output)
    expected.backward(grad_output)
    assert_close_to_scale(grad_of(x), grad_of(peer_x), "input")
    for ours, theirs in pairs_of(layer, peer):
        grad = torch.cat([grad_of(each) for each in ours], dim=-2)
        assert_close_to_scale(grad, grad_of(theirs), str(theirs.shape))


def reference(layer: MoE, x: Tensor, kept: Tensor | None = None) -> Tensor:
    """Every choice by itself."""
    routing = layer.router(x)
    flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    for token, (choice, weights) in enumerate(zip(routing.choice, routing.weights, strict=True)):
        for j, expert in enumerate(choice.tolist()):
            if kept is None or kept[token, j]:
                gate, up, down = (
                    getattr(layer.experts, name).weight[expert]
                    for name in ("gate_proj", "up_proj", "down_proj")
                )
                row = flat[token]
                inner = nn.functional.silu(gate @ row) * (up @ row)
                out[token] = out[token] + weights[j] * (down @ inner)
    return out.view_as(x)


@pytest.mark.parametrize(("hidden", "inner", "dtype"), [(6, 10, torch.float32), (16, 8, torch.float64)])
def test_shapes_and_types_that_the_grouped_kernel_does_not_take(
    hidden: int, inner: int, dtype: torch.dtype
) -> None:
    moe = MoEConfig(num_experts=5, num_experts_per_token=2, expert_intermediate_size=inner)
    layer = build(moe, dtype, hidden_size=hidden, num_heads=1, num_kv_heads=1)
    torch.manual_seed(0)
    x = torch.randn(1, 6, hidden, dtype=dtype, requires_grad=True)
    parameters = [x, *layer.parameters()]
    grad_output = torch.randn_like(x)
    expected = torch.autograd.grad(reference(layer, x), parameters, grad_output)
    out = layer(x)
    torch.testing.assert_close(out, reference(layer, x))
    for found, wanted in zip(torch.autograd.grad(out, parameters, grad_output), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_what_finds_no_room_is_left_out_and_counted() -> None:
    moe = MoEConfig(
        num_experts=4, num_experts_per_token=2, expert_intermediate_size=INNER, capacity_factor=0.5
    )
    layer = build(moe)
    torch.manual_seed(0)
    x = torch.randn(2, 8, HIDDEN)
    with torch.no_grad():
        kept = layer.router(x).kept
    assert isinstance(kept, Tensor)
    # An expert has room for ceil(0.5 * 16 * 2 / 4) = 4 choices.
    routing = layer.router(x)
    per_expert = torch.bincount(routing.choice[kept], minlength=4)
    assert per_expert.tolist() == torch.bincount(routing.choice.flatten(), minlength=4).clamp(max=4).tolist()
    layer.router.state.begin_step(None)
    torch.testing.assert_close(layer(x), reference(layer, x, kept))
    assert layer.router.state.num_dropped == 2 * (~kept).sum()  # by the layer, and by the reference


def test_no_gradient_is_missing_and_matrices_are_deferred() -> None:
    """An expert without tokens has a gradient of zeros; I leaves all matrices to W."""
    moe = MoEConfig(
        num_experts=4, num_experts_per_token=1, expert_intermediate_size=INNER, num_shared_experts=1
    )
    layer, whole = build(moe), build(moe)

    def buffer(parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    store = WeightGradStore(buffer)
    adoption = adopt(layer, store)
    assert set(adoption.deferred) == {name for name, _ in layer.named_parameters()}
    torch.manual_seed(0)
    x, grad_output = torch.randn(1, 2, HIDDEN), torch.randn(1, 2, HIDDEN)
    own_x, whole_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    whole(whole_x).backward(grad_output)
    with store.deferring(0):
        layer(own_x).backward(grad_output)
    torch.testing.assert_close(own_x.grad, whole_x.grad)
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert store.held_bytes > 0
    store.run(0)
    for (name, found), expected in zip(layer.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name)
    used = layer.experts.up_proj.weight.grad
    assert used is not None
    assert 1 <= used.flatten(1).any(1).sum() <= 2


def test_bf16_stays_near_fp32() -> None:
    moe = replace(deepseek_v3()[0], num_groups=1, num_groups_per_token=1)
    half, full = build(moe, torch.bfloat16), build(moe)
    with torch.no_grad():
        for theirs, ours in zip(full.parameters(), half.parameters(), strict=True):
            theirs.copy_(ours)
    torch.manual_seed(0)
    x = torch.randn(2, 8, HIDDEN).bfloat16()
    out = half(x)
    assert out.dtype == torch.bfloat16
    expected = full(x.float())
    assert (out - expected).abs().max() < 0.03 * expected.abs().max()


def test_placements() -> None:
    layer = build(MoEConfig(num_experts=4, expert_intermediate_size=INNER))
    placement = placement_of(layer.experts.down_proj.weight)
    assert placement.global_shape == (4, HIDDEN, INNER)
    assert placement.experts == (0, 1, 2, 3)
    assert placement.tensor_dim is None
    assert placement_of(layer.router.weight).partial_over_tensor


def test_a_placement_of_other_experts_is_refused() -> None:
    config = ModelConfig(moe=MoEConfig(num_experts=4))
    experts = ExpertParallel(axis=Axis(name="expert"), experts_by_rank=even_placement(8, 1))
    with pytest.raises(ValueError, match=r"8 experts are placed on the ranks, but model\.moe\.num_experts=4"):
        MoE(config, layer=0, tensor=Axis(), sequence_parallel=False, experts=experts)
