"""A tiny shape of each architecture of transformers that is known here, with every option of it in use."""

from __future__ import annotations

from counterflow.models.config import MLAConfig, ModelConfig, MoEConfig, MTPConfig, YarnConfig

VOCAB = 50
_COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "init_std": 0.1}
_MLA = {
    "mla": MLAConfig(kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12),
    "norm_eps": 1e-6,  # transformers has no other for the latents' norms
}
V3_EXPERTS = MoEConfig(
    num_experts=8,
    num_experts_per_token=3,
    expert_intermediate_size=20,
    num_shared_experts=2,
    num_dense_layers=1,
    router="sigmoid",
    routed_scaling_factor=2.5,
    num_groups=4,
    num_groups_per_token=2,
)

LLAMA = ModelConfig(**_COMMON, num_layers=2, rope_theta=500.0, attention_bias=True, mlp_bias=True)
LLAMA_YARN = ModelConfig(
    **_COMMON, num_layers=2, tie_embeddings=True, yarn=YarnConfig(factor=4.0, original_seq_length=8)
)
QWEN3 = ModelConfig(**_COMMON, num_layers=2, head_dim=12, qk_norm=True, norm_eps=1e-6, rope_theta=1e6)
MIXTRAL = ModelConfig(**_COMMON, num_layers=2, moe=MoEConfig(num_experts=4))
QWEN3_MOE = ModelConfig(
    **_COMMON,
    num_layers=3,
    head_dim=12,
    qk_norm=True,
    moe=MoEConfig(num_experts=8, num_experts_per_token=3, expert_intermediate_size=20, num_dense_layers=1),
)
DEEPSEEK_V2 = ModelConfig(
    **_COMMON,
    **_MLA,
    num_layers=3,
    yarn=YarnConfig(factor=40.0, original_seq_length=8, mscale=0.5, mscale_all_dim=0.707),
    moe=MoEConfig(
        num_experts=8,
        num_experts_per_token=3,
        expert_intermediate_size=20,
        num_shared_experts=2,
        num_dense_layers=1,
        normalize_weights=False,
        routed_scaling_factor=1.5,
        num_groups=4,
        num_groups_per_token=2,
    ),
)
DEEPSEEK_V2_LITE = ModelConfig(
    **_COMMON,
    mla=MLAConfig(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    norm_eps=1e-6,
    num_layers=2,
    moe=MoEConfig(num_experts=6, expert_intermediate_size=20, num_shared_experts=1, normalize_weights=False),
)
DEEPSEEK_V3 = ModelConfig(
    **_COMMON,
    **_MLA,
    num_layers=3,
    yarn=YarnConfig(factor=40.0, original_seq_length=8, mscale_all_dim=1.0),
    moe=V3_EXPERTS,
    mtp=MTPConfig(num_modules=2),
)
GPT2 = ModelConfig(
    **_COMMON,
    num_layers=2,
    num_kv_heads=4,
    activation="gelu",
    norm="layer",
    position="learned",
    max_seq_length=20,
    attention_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
)

ALL = {
    "llama": LLAMA,
    "llama, yarn, tied": LLAMA_YARN,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2, no query latent": DEEPSEEK_V2_LITE,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt2": GPT2,
}
