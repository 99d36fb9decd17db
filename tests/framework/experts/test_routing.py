"""What the routers of a whole job count, report, learn and leave to a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from counterflow.framework.experts.routing import begin_step, finish_step, moe_layers, routing_state
from counterflow.framework.metrics.record import StepRecord
from counterflow.models.config import ModelConfig, MoEConfig, MTPConfig
from counterflow.models.moe import MoE
from counterflow.models.transformer import materialize
from counterflow.parallel.collectives import Axis
from counterflow.parallel.expert.exchange import ExpertParallel, even_placement
from tests.framework.metrics.records import record
from tests.rank_pool import RankPool

MOE = MoEConfig(
    num_experts=4, num_experts_per_token=1, expert_intermediate_size=8, bias_update_speed=0.1, z_loss=0.1
)
CONFIG = ModelConfig(
    hidden_size=8, num_heads=1, num_kv_heads=1, num_layers=3, moe=MOE, mtp=MTPConfig(num_modules=1)
)


def make(layer: int) -> MoE:
    experts = ExpertParallel(axis=Axis(name="expert"), experts_by_rank=even_placement(4, 1))
    module = MoE(CONFIG, layer=layer, tensor=Axis(), sequence_parallel=False, experts=experts)
    materialize(module, device="cpu", seed=layer)
    return module


def route_all_to(layer: MoE, expert: int, num_tokens: int) -> None:
    layer.router.state.bias.copy_(10.0 * torch.eye(4)[expert])
    layer(torch.randn(1, num_tokens, 8))


def test_a_step_by_hand() -> None:
    layer = make(1)
    stage = nn.ModuleDict({"1": layer})
    begin_step([stage], num_valid_tokens=12, loss_scale=3.0)
    assert layer.router.state.loss_weight == 0.25
    with torch.no_grad():
        layer.router.weight.zero_()
    for expert, num_tokens in ((0, 6), (1, 3), (2, 3)):
        route_all_to(layer, expert, num_tokens)
    layer.router.state.bias.zero_()
    found = finish_step([stage], CONFIG, world=Axis())
    (routing,) = found.layers
    assert routing.layer == 1
    assert routing.load == (0.5, 0.25, 0.25, 0)
    assert routing.imbalance == 2.0
    assert routing.entropy == pytest.approx(torch.tensor(4.0).log().item())
    assert routing.z_loss == pytest.approx(routing.entropy**2)
    assert routing.load_balance_loss is None
    assert (routing.num_dropped, routing.sent_bytes, found.link_bytes) == (0, 0, ((0,),))
    assert layer.router.state.fractions.tolist() == [0.5, 0.25, 0.25, 0]
    torch.testing.assert_close(layer.router.state.bias, torch.tensor([-0.1, 0, 0, 0.1]))
    begin_step([stage], num_valid_tokens=12)
    assert finish_step([stage], CONFIG, world=Axis()).layers == ()  # nothing was routed, nothing is learned
    torch.testing.assert_close(layer.router.state.bias, torch.tensor([-0.1, 0, 0, 0.1]))


def over_a_pipeline() -> None:
    """Layer 0 is dense; ranks 0 and 1 have copies of layer 1, rank 1 the MTP module's as well, rank 2 nothing."""
    layers = {0: [make(1)], 1: [make(3), make(1)], 2: []}[dist.get_rank()]
    stages = [nn.ModuleList([layer]) for layer in layers]
    begin_step(stages, 10)
    for layer in layers:
        if layer.layer == 1:
            route_all_to(layer, dist.get_rank(), 5)
        else:
            route_all_to(layer, 2, 7)
        layer.router.state.bias.zero_()
    found = finish_step(stages, CONFIG, world=Axis(group=dist.group.WORLD))
    assert [routing.layer for routing in found.layers] == [1, 3]
    assert [routing.load for routing in found.layers] == [(0.5, 0.5, 0, 0), (0, 0, 1, 0)]
    assert [layer.layer for layer in moe_layers(stages)] == sorted(layer.layer for layer in layers)
    for layer in layers:
        expected = [-0.1, -0.1, 0.1, 0.1] if layer.layer == 1 else [0.1, 0.1, -0.1, 0.1]
        torch.testing.assert_close(layer.router.state.bias, torch.tensor(expected))


def test_every_rank_has_all_layers_and_copies_agree(ranks: RankPool) -> None:
    ranks.run(over_a_pipeline, 3)


def test_the_state_is_named_by_layer_and_live() -> None:
    layers = [make(1), make(2)]
    found = routing_state(layers)
    assert sorted(found) == [
        f"layers.{layer}.router.{what}" for layer in (1, 2) for what in ("bias", "fractions")
    ]
    found["layers.2.router.bias"].copy_(torch.arange(4.0))
    assert layers[1].router.state.bias.tolist() == [0, 1, 2, 3]
    assert layers[0].router.state.bias.tolist() == [0, 0, 0, 0]


def test_a_step_record_keeps_the_routing() -> None:
    layers = [make(1), make(2)]
    begin_step(layers, 4)
    for layer in layers:
        route_all_to(layer, 0, layer.layer)
    moe = finish_step(layers, CONFIG, world=Axis())
    step = record(3, moe=moe)
    assert StepRecord.from_json(step.to_json()) == step
    assert StepRecord.from_json(replace(step, moe=None).to_json()).moe is None
    scalars = step.scalars()
    assert scalars["moe/imbalance"] == 4.0
    assert scalars["moe/layer_2/entropy"] == moe.layers[1].entropy
    assert "moe/layer_2/load_balance_loss" not in scalars
    assert not [name for name in scalars if "load" in name and "layer" in name]
