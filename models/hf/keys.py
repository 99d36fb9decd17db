"""The keys of a config.json, family by family: read here, held to the values computed here, or known not to matter.

Any other key is refused: it may change what the model computes. Defaults are transformers' own (5.24), which leaves a
file's reader to know them. A key that is null counts as left out where transformers has it so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key that is read: the type of its value, transformers' default, and whether null is a value."""

    kind: type
    default: Any
    is_nullable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of one family.

    architecture: the class that is written. base: the one without a head. read: what is read. held: the values that
    are computed here, the first of them transformers' default. unread: what does not matter to the function.
    aliases: other names of keys that are read.
    """

    architecture: str
    base: str
    read: Mapping[str, Key]
    held: Mapping[str, tuple[Any, ...]]
    unread: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _count(default: int | None, *, is_nullable: bool = False) -> Key:
    return Key(kind=int, default=default, is_nullable=is_nullable or default is None)


def _number(default: float | None) -> Key:
    return Key(kind=float, default=default, is_nullable=default is None)


def _flag(default: bool) -> Key:
    return Key(kind=bool, default=default)


# What transformers or older releases of it write beside a model's shape, and what only generation reads.
_BOOKKEEPING = _names(
    """
    architectures auto_map dtype model_type name_or_path _name_or_path torch_dtype transformers_version _commit_hash
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id
    attn_implementation _attn_implementation _attn_implementation_autoset _experts_implementation
    chunk_size_feed_forward finetuning_task id2label label2id num_labels problem_type task_specific_params
    tokenizer_class prefix is_decoder gradient_checkpointing output_attentions output_hidden_states output_router_logits
    return_dict use_return_dict tie_encoder_decoder torchscript use_bfloat16 use_cache pretraining_tp
    max_length min_length do_sample early_stopping num_beams temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens epsilon_cutoff eta_cutoff
    encoder_repetition_penalty num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_lookbehind target_lookbehind num_beam_groups diversity_penalty max_new_tokens
    """
)
# Noise that acts in training only. Nothing here has it, and the log says so.
_NOISE = frozenset(("attention_dropout", "router_jitter_noise", "resid_pdrop", "embd_pdrop", "attn_pdrop"))
_HELD: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
    "per_layer_config": (None, {}),
    "quantization_config": (None,),
}
_HELD_ROPE = _HELD | {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (None, 1)}
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "mlp_bias": (False,)}
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"sliding_window": (None,), "use_sliding_window": (False,)}
_ROPE: dict[str, Key] = {
    "num_hidden_layers": _count(32),
    "num_attention_heads": _count(32),
    "hidden_size": _count(4096),
    "initializer_range": _number(0.02),
    "rms_norm_eps": _number(1e-6),
    "tie_word_embeddings": _flag(False),
    "rope_parameters": Key(kind=dict, default=None, is_nullable=True),
    "rope_scaling": Key(kind=dict, default=None, is_nullable=True),
    "rope_theta": _number(None),
    "original_max_position_embeddings": _count(None),
    "layer_types": Key(kind=list, default=None, is_nullable=True),
}
_DEEPSEEK = _ROPE | {
    "kv_lora_rank": _count(512),
    "q_lora_rank": _count(1536, is_nullable=True),
    "qk_nope_head_dim": _count(128),
    "qk_rope_head_dim": _count(64),
    "v_head_dim": _count(128),
}
_HELD_DEEPSEEK = _HELD_ROPE | _NO_BIAS | _NO_WINDOW | {"moe_layer_freq": (1,), "rope_interleave": (True,)}
# The size of a head is that of its parts; the losses are those of DeepSeek's own training, which transformers lacks.
_UNREAD_DEEPSEEK = frozenset(("head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux"))

FAMILIES: dict[str, Keys] = {
    "llama": Keys(
        architecture="LlamaForCausalLM",
        base="LlamaModel",
        read=_ROPE
        | {
            "vocab_size": _count(32000),
            "intermediate_size": _count(11008),
            "num_key_value_heads": _count(None),
            "head_dim": _count(None),
            "attention_bias": _flag(False),
            "mlp_bias": _flag(False),
            "max_position_embeddings": _count(2048),
        },
        held=_HELD_ROPE | _NO_WINDOW,
    ),
    "qwen3": Keys(
        architecture="Qwen3ForCausalLM",
        base="Qwen3Model",
        read=_ROPE
        | {
            "vocab_size": _count(151936),
            "intermediate_size": _count(22016),
            "num_key_value_heads": _count(32, is_nullable=True),
            "head_dim": _count(128),
            "max_position_embeddings": _count(32768),
            "use_sliding_window": _flag(False),
            "sliding_window": _count(4096, is_nullable=True),
            "max_window_layers": _count(28),
        },
        held=_HELD_ROPE | _NO_BIAS,
    ),
    "mixtral": Keys(
        architecture="MixtralForCausalLM",
        base="MixtralModel",
        read=_ROPE
        | {
            "vocab_size": _count(32000),
            "intermediate_size": _count(14336),
            "num_key_value_heads": _count(8, is_nullable=True),
            "head_dim": _count(None),
            "rms_norm_eps": _number(1e-5),
            "max_position_embeddings": _count(131072),
            "num_local_experts": _count(8),
            "num_experts_per_tok": _count(2),
            "router_aux_loss_coef": _number(0.001),
        },
        held=_HELD_ROPE | _NO_BIAS | _NO_WINDOW,
        aliases={"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": Keys(
        architecture="Qwen3MoeForCausalLM",
        base="Qwen3MoeModel",
        read=_ROPE
        | {
            "vocab_size": _count(151936),
            "hidden_size": _count(2048),
            "intermediate_size": _count(6144),
            "num_hidden_layers": _count(24),
            "num_key_value_heads": _count(4),
            "head_dim": _count(None),
            "max_position_embeddings": _count(32768),
            "use_sliding_window": _flag(False),
            "sliding_window": _count(4096, is_nullable=True),
            "moe_intermediate_size": _count(768),
            "num_experts": _count(128),
            "num_experts_per_tok": _count(8),
            "norm_topk_prob": _flag(False),
            "mlp_only_layers": Key(kind=list, default=None, is_nullable=True),
            "router_aux_loss_coef": _number(0.001),
        },
        held=_HELD_ROPE | _NO_BIAS | {"decoder_sparse_step": (1,)},
        unread=frozenset(("max_window_layers",)),
        aliases={"num_local_experts": "num_experts"},
    ),
    "deepseek_v2": Keys(
        architecture="DeepseekV2ForCausalLM",
        base="DeepseekV2Model",
        read=_DEEPSEEK
        | {
            "vocab_size": _count(102400),
            "intermediate_size": _count(11008),
            "num_key_value_heads": _count(None),
            "max_position_embeddings": _count(2048),
            "first_k_dense_replace": _count(0),
            "n_group": _count(None),
            "topk_group": _count(None),
            "topk_method": Key(kind=str, default="greedy"),
            "n_routed_experts": _count(64),
            "n_shared_experts": _count(2),
            "num_experts_per_tok": _count(None),
            "moe_intermediate_size": _count(1407),
            "routed_scaling_factor": _number(1.0),
        },
        held=_HELD_DEEPSEEK | {"scoring_func": ("softmax",), "norm_topk_prob": (False,)},
        unread=_UNREAD_DEEPSEEK,
        aliases={"num_experts": "n_routed_experts"},
    ),
    "deepseek_v3": Keys(
        architecture="DeepseekV3ForCausalLM",
        base="DeepseekV3Model",
        read=_DEEPSEEK
        | {
            "vocab_size": _count(129280),
            "hidden_size": _count(7168),
            "intermediate_size": _count(18432),
            "num_hidden_layers": _count(61),
            "num_attention_heads": _count(128),
            "num_key_value_heads": _count(128, is_nullable=True),
            "max_position_embeddings": _count(4096),
            "first_k_dense_replace": _count(3),
            "n_group": _count(8),
            "topk_group": _count(4),
            "n_routed_experts": _count(256),
            "n_shared_experts": _count(1),
            "num_experts_per_tok": _count(8),
            "moe_intermediate_size": _count(2048),
            "routed_scaling_factor": _number(2.5),
            "norm_topk_prob": _flag(True),
            # transformers counts 1, but its model has none: a file that does not say has none.
            "num_nextn_predict_layers": _count(0, is_nullable=True),
        },
        held=_HELD_DEEPSEEK | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        unread=_UNREAD_DEEPSEEK,
        aliases={
            "num_local_experts": "n_routed_experts",
            "num_experts": "n_routed_experts",
            "num_mtp_layers": "num_nextn_predict_layers",
        },
    ),
    "gpt2": Keys(
        architecture="GPT2LMHeadModel",
        base="GPT2Model",
        read={
            "vocab_size": _count(50257),
            "n_positions": _count(1024),
            "n_embd": _count(768),
            "n_layer": _count(12),
            "n_head": _count(12),
            "n_inner": _count(None),
            "layer_norm_epsilon": _number(1e-5),
            "initializer_range": _number(0.02),
            "tie_word_embeddings": _flag(True),
        },
        held=_HELD
        | {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        # The order of products with the scale is a matter of fp16, the summary one of other heads.
        unread=_names(
            """
            n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels
            summary_first_dropout
            """
        ),
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
}


# What to do about a value that is not computed here, where that is more than to take another model.
_REMEDIES: dict[str, str] = {
    "sliding_window": "set it to null where no sequence is longer than the window",
    "use_sliding_window": "set it to false where no sequence is longer than the window",
    "quantization_config": "convert the weights to bf16 or fp32, and take the key out",
    "add_cross_attention": "take the decoder alone",
}
_OTHER_MODEL = "take a checkpoint that was trained so, or keep this one in transformers"


def not_computed(what: str, allowed: str, name: str | None = None) -> ValueError:
    """What to raise for `what`, a key and its value, of which only `allowed` is computed here; name: of the key."""
    remedy = _REMEDIES.get(name or "", _OTHER_MODEL)
    return ValueError(f"{what}: only {allowed} computed here; {remedy}")


def read_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are read of a config.json's content, by their first names, those it leaves out at their defaults.

    Raises ValueError: for a family that is not known, a key that is not known or has a value that is not computed
    here, a value of another type, and a key that stands there twice with two values.
    """
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"model_type={family}: not an architecture known here; they are {', '.join(FAMILIES)}; take a "
            "checkpoint of one of them"
        )
    keys = FAMILIES[family]
    architectures: Any = values.get("architectures") or ()
    if not isinstance(architectures, list | tuple):
        raise ValueError(f"architectures={architectures!r}: must be of type list; correct config.json")
    for name in cast("Sequence[Any]", architectures):
        if name not in (keys.architecture, keys.base):
            raise not_computed(
                f"architectures=[{name}]", f"{keys.architecture} and {keys.base} of model_type={family} are"
            )
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = keys.aliases.get(name, name)
        if key in keys.read:
            if key in found and found[key] != value:
                raise ValueError(
                    f"{name}={value}: {key}={found[key]} says the same otherwise; leave one of them"
                )
            found[key] = _checked(name, value, keys.read[key])
        elif key in keys.held:
            # Null is no value of a key that has another default; transformers would take it for false.
            if not any(
                value == allowed and (value is None) == (allowed is None) for allowed in keys.held[key]
            ):
                raise not_computed(f"{name}={value}", f"{name}={keys.held[key][0]} is", name)
        elif key in _NOISE:
            if value:
                logger.warning(
                    "%s=%s is left out: it acts in training only, and no model here has it", name, value
                )
        elif key not in _BOOKKEEPING and key not in keys.unread and value is not None:
            raise ValueError(
                f"{name}={value}: not a key of {family} known here, and it may change what the model computes; take "
                "it out of config.json if it does not"
            )
    return {name: key.default for name, key in keys.read.items()} | found


def _checked(name: str, value: Any, key: Key) -> Any:
    if value is None and key.is_nullable:
        return None
    is_right = isinstance(value, int | float) if key.kind is float else isinstance(value, key.kind)
    if not is_right or (isinstance(value, bool) and key.kind is not bool):
        raise ValueError(f"{name}={value!r}: must be of type {key.kind.__name__}; correct config.json")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value}: must be finite; correct config.json")
    return value
