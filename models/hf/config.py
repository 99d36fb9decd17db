"""A model's shape as Hugging Face's config.json has it, and back.

What is read of it stands in `keys`, rotary positions in `rope`. What is written is read again and compared: a model of
which something would be lost is refused.

Note [The weight of the load-balancing loss]
transformers adds router_aux_loss_coef * E sum_e f_e p_e, where f_e is how many of its k choices a token gives to expert
e and p_e its probability, both meaned over the tokens of all L layers with experts together. `load_balance_loss` weighs
a sum over layers of the same with f_e / k, so it is router_aux_loss_coef * k / L: equal in value and gradient where the
layers' loads are, and with one layer always. Otherwise a layer is balanced here by its own load, there by that of all.
transformers adds the loss only with output_router_logits=true; the coefficient is read either way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from counterflow.models.config import MLAConfig, ModelConfig, MoEConfig, MTPConfig
from counterflow.models.hf.function import TRAINING, differences
from counterflow.models.hf.keys import FAMILIES, not_computed, read_keys
from counterflow.models.hf.rope import rope_from_hf, rope_to_hf

Family = Literal["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt2"]
# What transformers has for the norms of latents, whatever rms_norm_eps is.
_LATENT_NORM_EPS = 1e-6
logger = logging.getLogger(__name__)


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
        _require(
            not config.qk_norm and config.dim_per_head * config.num_heads == config.hidden_size,
            "gpt2's heads make up the hidden size and have no norms",
        )
        _require(config.mtp.num_modules == 0, "MTP modules are in deepseek_v3 only")
        return "gpt2"
    _require(
        config.mlp_bias or not config.attention_bias,
        "model.attention_bias and model.mlp_bias are both set or both not in llama, or only the latter",
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
        _require(not config.mlp_bias, "deepseek_v2 and deepseek_v3 have no biases")
        if moe.router == "sigmoid":
            _require(
                moe.num_experts // moe.num_groups > 1,
                "deepseek_v3 scores a group by its two best experts, so it has two or more",
            )
            return "deepseek_v3"
        _require(not moe.normalize_weights, "deepseek_v2 does not normalise the weights of a softmax router")
        _require(not moe.bias_update_speed, "deepseek_v2's router has no bias")
        return "deepseek_v2"
    _require(config.mtp.num_modules == 0, "MTP modules are in deepseek_v3 only")
    _require(
        not (config.qk_norm and (config.attention_bias or config.mlp_bias)),
        "qwen3 and qwen3_moe have no biases in the MLP, and one on attention's output where its projections have",
    )
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

    Raises ValueError: where no architecture of transformers computes what `config` does, or vocab_size is not that of
    `config`.
    """
    if config.vocab_size not in (None, vocab_size):
        raise ValueError(
            f"vocab_size={vocab_size}: the model has model.vocab_size={config.vocab_size}; give the same"
        )
    family = family_of(config)
    found = _to_hf(config, family, vocab_size, max_positions)
    _require_nothing_is_lost(config, from_hf_config(found, name=config.name))
    _say_what_is_left_out(config, family)
    return found


def _to_hf(config: ModelConfig, family: Family, vocab_size: int, max_positions: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "architectures": [FAMILIES[family].architecture],
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
        "rope_parameters": rope_to_hf(config),
    }
    if config.uses_mla:
        return found | _mla_to_hf(config)
    found |= {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.dim_per_head,
    }
    moe = config.moe
    if family == "llama":
        found |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    elif family == "mixtral":
        found |= {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_token}
    elif family == "qwen3_moe":
        found |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_token,
            "moe_intermediate_size": config.expert_intermediate_size,
            "norm_topk_prob": moe.normalize_weights,
            "mlp_only_layers": list(range(moe.num_dense_layers)),
            "decoder_sparse_step": 1,
        }
    if moe.num_experts:
        found["router_aux_loss_coef"] = moe.load_balance_loss / _balance_ratio(moe, config.num_layers)
        # transformers cannot sum the losses of no layer.
        found["output_router_logits"] = moe.load_balance_loss > 0 and moe.num_dense_layers < config.num_layers
    return found


def from_hf_config(values: Mapping[str, Any], *, name: str = "imported") -> ModelConfig:
    """The shape that config.json's content describes; what it does not say of training keeps its default.

    Raises ValueError: for an architecture, a key, or a value of one, that is not known here.
    """
    keys = read_keys(values)
    family = cast(Family, values["model_type"])
    if family == "gpt2":
        return _gpt2_from_hf(keys, name)
    _check_attention_is_full(keys, family)
    num_heads = int(keys["num_attention_heads"])
    uses_mla = family in ("deepseek_v2", "deepseek_v3")
    theta, yarn = rope_from_hf(keys, default_theta=1e6 if family == "mixtral" else 1e4, uses_mla=uses_mla)
    common: dict[str, Any] = {
        "name": name,
        "vocab_size": keys["vocab_size"],
        "hidden_size": keys["hidden_size"],
        "intermediate_size": keys["intermediate_size"],
        "num_layers": keys["num_hidden_layers"],
        "num_heads": num_heads,
        "norm_eps": keys["rms_norm_eps"],
        "tie_embeddings": keys["tie_word_embeddings"],
        "init_std": keys["initializer_range"],
        "rope_theta": theta,
        "yarn": yarn,
    }
    if uses_mla:
        return ModelConfig(**common, **_mla_from_hf(keys, is_v3=family == "deepseek_v3"))
    head_dim = keys["head_dim"]
    is_derived = head_dim is not None and head_dim * num_heads == keys["hidden_size"]
    if keys.get("attention_bias") and not keys["mlp_bias"]:
        raise not_computed(
            "attention_bias=True", "with mlp_bias=True is a bias on attention's output", "attention_bias"
        )
    return ModelConfig(
        **common,
        num_kv_heads=keys["num_key_value_heads"] or num_heads,
        head_dim=None if is_derived else head_dim,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        attention_bias=keys.get("attention_bias", False),
        mlp_bias=keys.get("mlp_bias", False),
        moe=_moe_from_hf(keys, family),
    )


def _check_attention_is_full(keys: Mapping[str, Any], family: Family) -> None:
    """No layer attends within a window."""
    kinds = keys["layer_types"]
    if keys.get("use_sliding_window") and keys["sliding_window"] is not None:
        # Qwen3's first layers see everything, or all of them where the file says so layer by layer.
        first = keys["max_window_layers"] if family == "qwen3" else 0
        if family != "qwen3" or (kinds is None and first < keys["num_hidden_layers"]):
            raise not_computed(
                f"sliding_window={keys['sliding_window']}",
                "sliding_window=None or use_sliding_window=False is",
                "sliding_window",
            )
    for kind in kinds or ():
        if kind != "full_attention":
            raise not_computed(f"layer_types=[{kind}]", "full_attention is")


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


def _mla_from_hf(keys: Mapping[str, Any], *, is_v3: bool) -> dict[str, Any]:
    num_heads, num_kv_heads = keys["num_attention_heads"], keys["num_key_value_heads"]
    if num_kv_heads not in (None, num_heads):
        raise not_computed(
            f"num_key_value_heads={num_kv_heads}", f"as many as num_attention_heads={num_heads} are"
        )
    if keys["num_experts_per_tok"] is None:
        raise ValueError(
            "num_experts_per_tok=None: must be set, for transformers has no default; set it to what the model was "
            "trained with"
        )
    if keys.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy"):
        raise not_computed(f"topk_method={keys['topk_method']}", "greedy and group_limited_greedy are")
    is_grouped = is_v3 or keys["topk_method"] == "group_limited_greedy"
    num_modules = (keys["num_nextn_predict_layers"] or 0) if is_v3 else 0
    # More dense layers than layers: all are dense. A module's block is counted on, so there it is said as it is.
    num_dense = keys["first_k_dense_replace"]
    return {
        "mla": MLAConfig(
            kv_lora_rank=keys["kv_lora_rank"],
            q_lora_rank=keys["q_lora_rank"],
            qk_nope_head_dim=keys["qk_nope_head_dim"],
            qk_rope_head_dim=keys["qk_rope_head_dim"],
            v_head_dim=keys["v_head_dim"],
            latent_norm_eps=None if keys["rms_norm_eps"] == _LATENT_NORM_EPS else _LATENT_NORM_EPS,
        ),
        "moe": MoEConfig(
            num_experts=keys["n_routed_experts"],
            num_experts_per_token=keys["num_experts_per_tok"],
            expert_intermediate_size=keys["moe_intermediate_size"],
            num_shared_experts=keys["n_shared_experts"],
            num_dense_layers=num_dense if num_modules else min(num_dense, keys["num_hidden_layers"]),
            router="sigmoid" if is_v3 else "softmax",
            normalize_weights=is_v3 and keys["norm_topk_prob"],
            routed_scaling_factor=float(keys["routed_scaling_factor"]),
            num_groups=(keys["n_group"] or 1) if is_grouped else 1,
            num_groups_per_token=(keys["topk_group"] or 1) if is_grouped else 1,
        ),
        "mtp": MTPConfig(num_modules=num_modules),
    }


def _moe_from_hf(keys: Mapping[str, Any], family: Family) -> MoEConfig:
    if family not in ("mixtral", "qwen3_moe"):
        return MoEConfig()
    num_layers = keys["num_hidden_layers"]
    if family == "mixtral":
        found = MoEConfig(
            num_experts=keys["num_local_experts"], num_experts_per_token=keys["num_experts_per_tok"]
        )
    else:
        given = [int(layer) for layer in keys["mlp_only_layers"] or () if isinstance(layer, int)]
        if len(given) != len(keys["mlp_only_layers"] or ()):
            raise ValueError(
                f"mlp_only_layers={keys['mlp_only_layers']}: must be a list of whole numbers; correct config.json"
            )
        dense = sorted({layer for layer in given if layer < num_layers})
        if dense != list(range(len(dense))):
            raise not_computed(f"mlp_only_layers={dense}", "the first layers, from 0 on, being dense is")
        found = MoEConfig(
            num_experts=keys["num_experts"],
            num_experts_per_token=keys["num_experts_per_tok"],
            expert_intermediate_size=keys["moe_intermediate_size"],
            num_dense_layers=len(dense),
            normalize_weights=keys["norm_topk_prob"],
        )
    coefficient = (keys["router_aux_loss_coef"] or 0.0) * _balance_ratio(found, num_layers)
    return replace(found, load_balance_loss=coefficient)


def _balance_ratio(moe: MoEConfig, num_layers: int) -> float:
    """load_balance_loss over router_aux_loss_coef; see the note above."""
    return moe.num_experts_per_token / max(1, num_layers - moe.num_dense_layers)


def _gpt2_from_hf(keys: Mapping[str, Any], name: str) -> ModelConfig:
    return ModelConfig(
        name=name,
        vocab_size=keys["vocab_size"],
        hidden_size=keys["n_embd"],
        intermediate_size=keys["n_inner"] or 4 * keys["n_embd"],
        num_layers=keys["n_layer"],
        num_heads=keys["n_head"],
        num_kv_heads=keys["n_head"],
        activation="gelu",
        norm="layer",
        position="learned",
        max_seq_length=keys["n_positions"],
        norm_eps=keys["layer_norm_epsilon"],
        attention_bias=True,
        mlp_bias=True,
        tie_embeddings=keys["tie_word_embeddings"],
        init_std=keys["initializer_range"],
    )


def _require_nothing_is_lost(config: ModelConfig, written: ModelConfig) -> None:
    lost = [f"model.{name}={ours} would be {theirs}" for name, ours, theirs in differences(config, written)]
    _require(not lost, "; ".join(lost))


def _say_what_is_left_out(config: ModelConfig, family: Family) -> None:
    """A file has no place for most of what training alone reads."""
    kept = ("load_balance_loss",) if family in ("mixtral", "qwen3_moe") else ()
    left = [f"model.moe.{name}={getattr(config.moe, name)}" for name in TRAINING if name not in kept]
    left = [each for each in left if not each.endswith("=0.0")] if config.moe.num_experts else []
    if kept and config.moe.load_balance_loss and config.moe.load_balance_scope != "micro_batch":
        left.append(f"model.moe.load_balance_scope={config.moe.load_balance_scope}")
    if left:
        logger.warning("config.json has no place for %s: of training only, and left out", ", ".join(left))


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(
            f"no architecture of transformers computes this model: {rule}; change the model's shape, or keep its "
            "checkpoints in the format of this package"
        )
