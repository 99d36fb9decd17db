"""A model's shape as Hugging Face's config.json has it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from models.config import MLAConfig, ModelConfig, MoEConfig, MTPConfig, YarnConfig

Family = Literal["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt2"]
_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def family_of(config: ModelConfig) -> Family:
    """The architecture of transformers that computes what `config` does.

    Raises ValueError: where none does.
    """
    moe = config.moe
    if config.norm == "layer" or config.activation == "gelu" or config.position == "learned":
        _require(
            config.norm == "layer"
            and config.activation == "gelu"
            and config.position == "learned"
            and config.attention_bias
            and config.mlp_bias
            and config.num_kv_heads == config.num_heads,
            "gpt2 has layer norms, GELU, learned positions, biases and as many key/value heads as heads, all together",
        )
        return "gpt2"
    _require(
        config.attention_bias == config.mlp_bias,
        "model.attention_bias and model.mlp_bias are both set or both not in llama and qwen3",
    )
    _require(
        not moe.num_experts or moe.capacity_factor is None,
        "model.moe.capacity_factor drops tokens, which none does",
    )
    _require(
        not moe.shared_expert_gate, "model.moe.shared_expert_gate is not in the architectures known here"
    )
    if config.uses_mla:
        _require(
            moe.num_experts > 0 and moe.num_shared_experts > 0,
            "latent attention goes with routed and shared experts in deepseek_v2 and deepseek_v3",
        )
        if moe.router == "sigmoid":
            return "deepseek_v3"
        _require(not moe.normalize_weights, "deepseek_v2 does not normalise the weights of a softmax router")
        _require(not moe.bias_update_speed, "deepseek_v2's router has no bias")
        return "deepseek_v2"
    _require(config.mtp.num_modules == 0, "MTP modules are in deepseek_v3 only")
    if not moe.num_experts:
        return "qwen3" if config.qk_norm else "llama"
    _require(
        moe.router == "softmax"
        and moe.num_shared_experts == 0
        and moe.num_groups == 1
        and moe.routed_scaling_factor == 1
        and not moe.bias_update_speed,
        "mixtral and qwen3_moe route by a softmax, without groups, shared experts, bias or scaling",
    )
    if config.qk_norm:
        return "qwen3_moe"
    _require(
        moe.normalize_weights
        and moe.num_dense_layers == 0
        and config.expert_intermediate_size == config.intermediate_size,
        "mixtral's experts are all alike, as wide as the model says, in every layer, their weights normalised",
    )
    return "mixtral"


def to_hf_config(config: ModelConfig, *, vocab_size: int, max_positions: int) -> dict[str, Any]:
    """The content of config.json. max_positions: the longest sequence the model is meant for.

    Raises ValueError: where no architecture of transformers computes what `config` does.
    """
    family = family_of(config)
    found: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }
    if family == "gpt2":
        return found | {
            "n_embd": config.hidden_size,
            "n_inner": config.intermediate_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_positions": config.max_seq_length,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    found |= {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rope_parameters": _rope_to_hf(config),
    }
    if config.uses_mla:
        return found | _mla_to_hf(config)
    found |= {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.dim_per_head,
        "attention_bias": config.attention_bias,
    }
    moe = config.moe
    if family == "llama":
        found["mlp_bias"] = config.mlp_bias
    elif family == "mixtral":
        found |= {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_token}
        found |= {"router_aux_loss_coef": moe.load_balance_loss}
    elif family == "qwen3_moe":
        found |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_token,
            "moe_intermediate_size": config.expert_intermediate_size,
            "norm_topk_prob": moe.normalize_weights,
            "mlp_only_layers": list(range(moe.num_dense_layers)),
            "decoder_sparse_step": 1,
            "router_aux_loss_coef": moe.load_balance_loss,
        }
    return found


def from_hf_config(values: Mapping[str, Any], *, name: str = "imported") -> ModelConfig:
    """The shape that config.json's content describes; what it does not say of training keeps its default.

    Raises ValueError: for an architecture, or a value of one, that is not known here.
    """
    family = values.get("model_type")
    if family not in _ARCHITECTURES:
        raise ValueError(
            f"model_type={family}: not an architecture known here; they are {', '.join(_ARCHITECTURES)}"
        )
    if family == "gpt2":
        return _gpt2_from_hf(values, name)
    _expect(values, "hidden_act", "silu")
    if values.get("use_sliding_window", True) and values.get("sliding_window") is not None:
        _expect(values, "sliding_window", None)
    num_heads = int(values["num_attention_heads"])
    theta, yarn = _rope_from_hf(values)
    common: dict[str, Any] = {
        "name": name,
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_layers": values["num_hidden_layers"],
        "num_heads": num_heads,
        "norm_eps": values.get("rms_norm_eps", 1e-6),
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        "init_std": values.get("initializer_range", 0.02),
        "rope_theta": theta,
        "yarn": yarn,
    }
    if family in ("deepseek_v2", "deepseek_v3"):
        return ModelConfig(**common, **_mla_from_hf(values, family))
    bias = bool(values.get("attention_bias", False))
    head_dim = values.get("head_dim")
    is_derived = head_dim is not None and head_dim * num_heads == values["hidden_size"]
    return ModelConfig(
        **common,
        num_kv_heads=values.get("num_key_value_heads") or num_heads,
        head_dim=None if is_derived else head_dim,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        attention_bias=bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
        moe=_moe_from_hf(values, cast(Family, family)),
    )


def _rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    yarn = config.yarn
    if yarn.factor <= 1:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": config.rope_theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_seq_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    if yarn.mscale_all_dim:
        found |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return found


def _rope_from_hf(values: Mapping[str, Any]) -> tuple[float, YarnConfig]:
    """theta and YaRN, from `rope_parameters` or, as older files have them, from `rope_theta` and `rope_scaling`."""
    rope: dict[str, Any] = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, YarnConfig()
    if kind != "yarn":
        raise ValueError(f"rope_parameters.rope_type={kind}: only default and yarn are known here")
    defaults = YarnConfig()
    return theta, YarnConfig(
        factor=float(rope["factor"]),
        original_seq_length=int(rope["original_max_position_embeddings"]),
        beta_fast=float(rope.get("beta_fast") or defaults.beta_fast),
        beta_slow=float(rope.get("beta_slow") or defaults.beta_slow),
        mscale=float(rope.get("mscale") or defaults.mscale)
        if rope.get("mscale_all_dim")
        else defaults.mscale,
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
    )


def _mla_to_hf(config: ModelConfig) -> dict[str, Any]:
    mla, moe = config.mla, config.moe
    found: dict[str, Any] = {
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": config.expert_intermediate_size,
        "first_k_dense_replace": moe.num_dense_layers,
        "moe_layer_freq": 1,
        "n_group": moe.num_groups,
        "topk_group": moe.num_groups_per_token,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "norm_topk_prob": moe.normalize_weights,
    }
    if moe.router == "sigmoid":
        return found | {
            "num_nextn_predict_layers": config.mtp.num_modules,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
    return found | {
        "scoring_func": "softmax",
        "topk_method": "greedy" if moe.num_groups == 1 else "group_limited_greedy",
    }


def _mla_from_hf(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    _expect(values, "attention_bias", False)
    _expect(values, "moe_layer_freq", 1)
    is_v3 = family == "deepseek_v3"
    is_grouped = is_v3 or values.get("topk_method") == "group_limited_greedy"
    return {
        "mla": MLAConfig(
            kv_lora_rank=values["kv_lora_rank"],
            q_lora_rank=values.get("q_lora_rank"),
            qk_nope_head_dim=values["qk_nope_head_dim"],
            qk_rope_head_dim=values["qk_rope_head_dim"],
            v_head_dim=values["v_head_dim"],
        ),
        "moe": MoEConfig(
            num_experts=values["n_routed_experts"],
            num_experts_per_token=values["num_experts_per_tok"],
            expert_intermediate_size=values["moe_intermediate_size"],
            num_shared_experts=values["n_shared_experts"],
            num_dense_layers=values["first_k_dense_replace"],
            router="sigmoid" if is_v3 else "softmax",
            normalize_weights=is_v3 and bool(values.get("norm_topk_prob", True)),
            routed_scaling_factor=float(values.get("routed_scaling_factor", 1.0)),
            num_groups=(values.get("n_group") or 1) if is_grouped else 1,
            num_groups_per_token=(values.get("topk_group") or 1) if is_grouped else 1,
        ),
        "mtp": MTPConfig(num_modules=values.get("num_nextn_predict_layers", 0) if is_v3 else 0),
    }


def _moe_from_hf(values: Mapping[str, Any], family: Family) -> MoEConfig:
    if family == "mixtral":
        return MoEConfig(
            num_experts=values["num_local_experts"],
            num_experts_per_token=values["num_experts_per_tok"],
            load_balance_loss=values.get("router_aux_loss_coef", 0.0),
        )
    if family != "qwen3_moe":
        return MoEConfig()
    _expect(values, "decoder_sparse_step", 1)
    dense = list(values.get("mlp_only_layers") or [])
    _expect(values, "mlp_only_layers", list(range(len(dense))) if dense else values.get("mlp_only_layers"))
    return MoEConfig(
        num_experts=values.get("num_experts", values.get("num_local_experts")),
        num_experts_per_token=values["num_experts_per_tok"],
        expert_intermediate_size=values["moe_intermediate_size"],
        num_dense_layers=len(dense),
        normalize_weights=bool(values.get("norm_topk_prob", False)),
        load_balance_loss=values.get("router_aux_loss_coef", 0.0),
    )


def _gpt2_from_hf(values: Mapping[str, Any], name: str) -> ModelConfig:
    _expect(values, "activation_function", "gelu_new")
    _expect(values, "scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        name=name,
        vocab_size=values["vocab_size"],
        hidden_size=values["n_embd"],
        intermediate_size=values.get("n_inner") or 4 * values["n_embd"],
        num_layers=values["n_layer"],
        num_heads=values["n_head"],
        num_kv_heads=values["n_head"],
        activation="gelu",
        norm="layer",
        position="learned",
        max_seq_length=values["n_positions"],
        norm_eps=values.get("layer_norm_epsilon", 1e-5),
        attention_bias=True,
        mlp_bias=True,
        tie_embeddings=bool(values.get("tie_word_embeddings", True)),
        init_std=values.get("initializer_range", 0.02),
    )


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(
            f"no architecture of transformers computes this model: {rule}; change the model's shape, or keep its "
            "checkpoints in the format of this package"
        )


def _expect(values: Mapping[str, Any], key: str, wanted: Any) -> None:
    if values.get(key, wanted) != wanted:
        raise ValueError(f"{key}={values[key]}: only {key}={wanted} is computed here")
