"""A model shape that cannot be is refused with the value, the rule and a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from counterflow.models.config import MLAConfig, ModelConfig, MoEConfig, MTPConfig, YarnConfig

MLA = MLAConfig(kv_lora_rank=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, r"model.num_layers=0: must be at least 1"),
        ({"vocab_size": 0}, r"model.vocab_size=0: must be at least 1"),
        ({"head_dim": 0}, r"model.head_dim=0: must be at least 1"),
        ({"norm_eps": -1.0}, r"model.norm_eps=-1.0: must be positive"),
        (
            {"num_heads": 4, "num_kv_heads": 3},
            r"model.num_heads=4: must be a multiple of model.num_kv_heads=3",
        ),
        ({"hidden_size": 10}, r"model.hidden_size=10: must be a multiple of model.num_heads=4, or set"),
        ({"head_dim": 7}, r"model.head_dim=7: RoPE rotates pairs; use an even"),
        ({"max_seq_length": 0}, r"model.max_seq_length=0: must be at least 1"),
        ({"moe": MoEConfig(num_experts=4, num_dense_layers=5)}, r"num_dense_layers=5: .*model.num_layers=4"),
        ({"mla": MLA, "qk_norm": True}, r"model.qk_norm=true: .*latents instead; leave it out"),
        ({"mla": MLA, "attention_bias": True}, r"model.attention_bias=true: .*no biases"),
        ({"mla": MLA, "position": "learned"}, r"model.position=learned: .*rotary positions"),
        ({"yarn": YarnConfig(factor=2.0), "position": "learned"}, r"model.position=learned: .*rotary"),
        ({"moe": MoEConfig(num_experts=4), "activation": "gelu"}, r"model.activation=gelu: .*are SwiGLU"),
        ({"moe": MoEConfig(num_experts=4), "mlp_bias": True}, r"model.mlp_bias=true: .*no biases"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)


@pytest.mark.parametrize(
    ("node", "fields", "message"),
    [
        (MLAConfig, {"kv_lora_rank": -1}, r"model.mla.kv_lora_rank=-1: a width"),
        (MLAConfig, {"q_lora_rank": 0}, r"model.mla.q_lora_rank=0: must be at least 1"),
        (MLAConfig, {"qk_rope_head_dim": 7}, r"model.mla.qk_rope_head_dim=7: RoPE rotates pairs"),
        (YarnConfig, {"factor": 0.5}, r"model.yarn.factor=0.5: 1 \(off\) or more"),
        (YarnConfig, {"original_seq_length": 0}, r"model.yarn.original_seq_length=0: 1 or more"),
        (YarnConfig, {"beta_fast": 1.0}, r"model.yarn.beta_fast=1.0: must be above"),
        (MoEConfig, {"num_experts": -1}, r"model.moe.num_experts=-1: a count"),
        (MoEConfig, {"num_experts_per_token": 0}, r"model.moe.num_experts_per_token=0: must be at least 1"),
        (MoEConfig, {"z_loss": -1.0}, r"model.moe.z_loss=-1.0: 0 \(off\) or more"),
        (MoEConfig, {"routed_scaling_factor": 0.0}, r"model.moe.routed_scaling_factor=0.0: must be above 0"),
        (MoEConfig, {"capacity_factor": 0.0}, r"model.moe.capacity_factor=0.0: above 0, or null"),
        (MoEConfig, {"num_experts": 8, "num_groups": 3}, r"model.moe.num_groups=3: must divide .*=8"),
        (MoEConfig, {"num_experts": 8, "num_groups_per_token": 2}, r"num_groups_per_token=2: there are"),
        (
            MoEConfig,
            {"num_experts": 8, "num_groups": 4, "num_experts_per_token": 3},
            r"model.moe.num_experts_per_token=3: a token reaches 2 experts",
        ),
        (MTPConfig, {"num_modules": -1}, r"model.mtp.num_modules=-1: a count"),
        (MTPConfig, {"loss_weight": -0.1}, r"model.mtp.loss_weight=-0.1: 0 or more"),
    ],
)
def test_refused_in_a_node(node: type[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        node(**fields)


def test_which_layers_have_experts() -> None:
    config = ModelConfig(moe=MoEConfig(num_experts=4, num_dense_layers=1))
    assert [config.is_moe_layer(index) for index in range(5)] == [False, True, True, True, True]
    assert not ModelConfig().is_moe_layer(3)
    assert config.expert_intermediate_size == config.intermediate_size


def test_head_dim_is_derived_or_given() -> None:
    assert ModelConfig(hidden_size=128, num_heads=4).dim_per_head == 32
    assert ModelConfig(hidden_size=130, num_heads=4, head_dim=16).dim_per_head == 16
