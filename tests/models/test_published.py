"""The shapes of conf/model against what is published of them, and against transformers' own models of these shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from counterflow.models.config import YarnConfig
from counterflow.models.cost import ModelCost, model_cost
from counterflow.models.hf.config import from_hf_config, to_hf_config
from counterflow.models.transformer import TransformerStage
from counterflow.parallel.collectives import Axis
from tests.models.shapes import NAMES, shape


def cost_of(name: str, *, seq_length: int | None = None, causal_halved: bool = True) -> ModelCost:
    config = shape(name)
    assert config.vocab_size is not None
    return model_cost(
        config,
        seq_length=seq_length or config.max_seq_length,
        vocab_size=config.vocab_size,
        causal_halved=causal_halved,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Billions of parameters as the source says them.

    embedding_is_active: whether its active ones have the table of tokens, of which a token reads a row.
    cut: the active figure is cut off after its last digit, not rounded (3.353 billion are said to be 3.3).
    """

    total: float
    active: float
    embedding_is_active: bool = True
    cut: bool = False


PUBLISHED = {
    "llama3_8b": Published(total=8.03, active=8.03),
    "llama3_70b": Published(total=70.6, active=70.6),
    "llama3_405b": Published(total=405.9, active=405.9),
    "gpt3_175b": Published(total=175.0, active=175.0),  # arXiv 2005.14165, table 2.1
    "mixtral_8x7b": Published(total=46.7, active=12.9),  # mistral.ai/news/mixtral-of-experts
    "mixtral_8x22b": Published(total=141, active=39),  # mistral.ai/news/mixtral-8x22b
    "qwen3_30b_a3b": Published(total=30.5, active=3.3, cut=True),  # its model card
    "qwen3_235b_a22b": Published(total=235, active=22),  # its model card
    "deepseek_v2_lite": Published(
        total=15.7, active=2.4, embedding_is_active=False, cut=True
    ),  # arXiv 2405.04434, B.1
    # README_WEIGHTS.md of its repository. It counts the active ones with an embedding, but says 36.7, which is without.
    "deepseek_v3_671b": Published(total=671, active=36.7, embedding_is_active=False),
    # The Hub's count of the tensors of Kimi-K2-Base; the paper (arXiv 2507.20534, table 2) says 1.04 trillion and 32.6.
    "kimi_k2_1t": Published(total=1026.47, active=32.6),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    cost, published = cost_of(name).without_mtp, PUBLISHED[name]
    assert cost.parameters / 1e9 == pytest.approx(published.total, rel=0.01)
    active = cost.active_parameters - (0 if published.embedding_is_active else cost.embedding_parameters)
    if published.cut:
        assert published.active <= active / 1e9 < published.active + 0.1
    else:
        assert active / 1e9 == pytest.approx(published.active, rel=0.01)


def test_the_mtp_module_of_deepseek_v3_is_the_published_one() -> None:
    """11.5 billion, embedding and head left out: README_WEIGHTS.md of its repository."""
    cost = cost_of("deepseek_v3_671b")
    assert (cost.parameters - cost.without_mtp.parameters) / 1e9 == pytest.approx(11.5, rel=0.01)


def test_every_full_size_shape_is_held() -> None:
    assert set(NAMES) - {name for name in NAMES if name.startswith(("tiny", "small"))} == set(PUBLISHED)


# TFLOP/s over tokens/s of one GPU, from the performance summary of NVIDIA's Megatron Bridge (releases 25.09 to 26.08):
# FLOPs a token, causal attention halved.
MEGATRON_BRIDGE = {
    "llama3_8b": (744e12 / 14451, 8192),
    "llama3_70b": (727e12 / 1619, 8192),
    "llama3_405b": (2403e12 / 952, 8192),
    "qwen3_30b_a3b": (1029e12 / 44544, 4096),
    "qwen3_235b_a22b": (1077e12 / 7280, 4096),
}


@pytest.mark.parametrize("name", MEGATRON_BRIDGE)
def test_training_flops_are_those_megatron_bridge_counts(name: str) -> None:
    flops, seq_length = MEGATRON_BRIDGE[name]
    assert shape(name).max_seq_length == seq_length
    assert cost_of(name).training_flops_per_token == pytest.approx(flops, rel=0.01)


def test_training_flops_of_deepseek_v3_are_published_with_and_without_mtp() -> None:
    """250 GFLOPs a token at 4096 (arXiv 2505.09343, table 2; 385 TFLOP/s a GPU at its speed there, and 432 with the
    causal mask not halved), 260 with the MTP module (Megatron Bridge's 1635 TFLOP/s at 6288 tokens/s)."""
    cost = cost_of("deepseek_v3_671b")
    assert cost.without_mtp.training_flops_per_token == pytest.approx(250e9, rel=0.01)
    assert cost.training_flops_per_token == pytest.approx(1635e12 / 6288, rel=0.01)
    whole = cost_of("deepseek_v3_671b", causal_halved=False)
    tokens_per_gpu_s = 272.8e9 / 86400 / 2048
    assert whole.without_mtp.training_flops_per_token == pytest.approx(432e12 / tokens_per_gpu_s, rel=0.01)


def test_training_flops_of_gpt3_are_korthikantis_formula() -> None:
    """arXiv 2205.05198, eq. 7 (appendix A): 72 B s L h^2 (1 + s / 6h + V / 12hL), attention not halved."""
    hidden, layers, seq, vocab = 12288, 96, 2048, 50257
    formula = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    cost = cost_of("gpt3_175b", causal_halved=False)
    assert cost.training_flops_per_token == pytest.approx(formula, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "active_matrices"),
    [
        # Of each layer: attention's four matrices, the router, two experts of three; and the head.
        ("mixtral_8x7b", 32 * (2 * 4096 * (4096 + 1024) + 8 * 4096 + 6 * 4096 * 14336) + 32000 * 4096),
        ("mixtral_8x22b", 56 * (2 * 6144 * (6144 + 1024) + 8 * 6144 + 6 * 6144 * 16384) + 32768 * 6144),
    ],
)
def test_training_flops_of_mixtral_are_palms_formula(name: str, active_matrices: int) -> None:
    """arXiv 2204.02311, appendix B: 6 N + 12 L H Q T, and N the parameters of a token's matrices."""
    config, seq = shape(name), 4096
    formula = 6 * active_matrices + 12 * config.num_layers * config.hidden_size * seq
    cost = cost_of(name, seq_length=seq, causal_halved=False)
    assert cost.training_flops_per_token == formula


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_transformers_builds(name: str) -> None:
    """From the config.json that we write for the shape; and the shape comes back from it."""
    config = shape(name)
    assert config.vocab_size is not None
    values = to_hf_config(config, vocab_size=config.vocab_size, max_positions=config.max_seq_length)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert cost_of(name).without_mtp.parameters == expected
    back = from_hf_config(values, name=name)
    for key in ("hidden_size", "num_layers", "num_heads", "mla", "qk_norm", "rope_theta", "norm_eps", "mtp"):
        assert getattr(back, key) == getattr(config, key), key


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_built(name: str) -> None:
    config = shape(name)
    vocab_size = config.vocab_size or 4096
    built = TransformerStage(
        config,
        range(config.num_layers),
        first=True,
        last=True,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=vocab_size,
    )
    cost = model_cost(config, seq_length=128, vocab_size=vocab_size)
    assert cost.parameters == sum(parameter.numel() for parameter in built.parameters())


# config.json of the released models, as far as it describes what is computed.
RELEASED = {
    "mixtral_8x7b": {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "deepseek_v3_671b": {
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_configuration_is_the_shape(name: str) -> None:
    """But for what only training needs, and for the context that is lengthened after the pretraining."""
    found, config = from_hf_config(RELEASED[name], name=name), shape(name)
    moe = replace(
        config.moe,
        bias_update_speed=0.0,
        sequence_balance_loss=0.0,
        expert_intermediate_size=found.moe.expert_intermediate_size,
    )
    yarn = YarnConfig(factor=40.0, mscale_all_dim=1.0) if "rope_scaling" in RELEASED[name] else YarnConfig()
    assert found == replace(config, moe=moe, yarn=yarn, max_seq_length=found.max_seq_length)
