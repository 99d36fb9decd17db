"""What a config.json says, and what it leaves out, is computed as transformers does, or refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from counterflow.models.config import MLAConfig, ModelConfig, YarnConfig
from counterflow.models.hf.config import from_hf_config, to_hf_config
from counterflow.models.hf.files import read_folder, write_folder
from counterflow.models.hf.weights import from_hf, to_hf
from tests.models.hf.model import build, loaded, sample, state_of
from tests.models.hf.tiny_shapes import (
    ALL,
    DEEPSEEK_V3,
    GPT2,
    LLAMA,
    LLAMA_YARN,
    MIXTRAL,
    QWEN3,
    QWEN3_MOE,
    VOCAB,
)

_ABSENT = object()
V3 = replace(DEEPSEEK_V3, mtp=replace(DEEPSEEK_V3.mtp, num_modules=0), num_layers=2)
V2 = ALL["deepseek_v2"]


def yarn(**values: Any) -> dict[str, Any]:
    """A stretch that all of a sample's 16 positions feel."""
    return {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **values},
        "max_position_embeddings": 64,
    }


def written(config: ModelConfig, changes: dict[str, Any], folder: Path) -> None:
    """Our random weights under a config.json with changes."""
    values = to_hf_config(config, vocab_size=VOCAB, max_positions=64) | changes
    values = {name: value for name, value in values.items() if value is not _ABSENT}
    write_folder(folder, values, to_hf(state_of(build(config)), config))


def distance(folder: Path) -> float:
    """How far our logits are from transformers', relative to the largest."""
    reference: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    values, tensors = read_folder(folder)
    config = from_hf_config(values)
    stage = loaded(config, from_hf(tensors, config))
    tokens, _ = sample(VOCAB)
    with torch.no_grad():
        expected = reference(input_ids=tokens).logits
        return ((stage(tokens) - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA, yarn(original_max_position_embeddings=8, attention_factor=1.0)),
        (LLAMA, yarn(original_max_position_embeddings=8, truncate=False)),
        (LLAMA, yarn()),  # the original context is that of max_position_embeddings
        (LLAMA, yarn(original_max_position_embeddings=8, factor=None)),
        (LLAMA, yarn(original_max_position_embeddings=4, beta_fast=4, beta_slow=2)),
        (LLAMA, yarn(original_max_position_embeddings=8, mscale=0.5, mscale_all_dim=0.9)),
        (LLAMA, yarn(original_max_position_embeddings=8) | {"original_max_position_embeddings": 16}),
        (LLAMA, yarn() | {"rope_scaling": {"type": "yarn", "factor": 8.0, "rope_theta": 50.0}}),
        (LLAMA, {"rope_parameters": _ABSENT, "rope_theta": 50.0}),
        (LLAMA, {"rms_norm_eps": _ABSENT, "hidden_act": "swish", "num_key_value_heads": 2}),
        (QWEN3, yarn(original_max_position_embeddings=8, attention_factor=1.3, truncate=False)),
        (QWEN3, {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2}),
        (QWEN3, {"sliding_window": 4, "use_sliding_window": _ABSENT}),
        (MIXTRAL, {"rms_norm_eps": _ABSENT, "rope_parameters": _ABSENT}),
        (QWEN3_MOE, {"norm_topk_prob": _ABSENT, "num_experts": _ABSENT, "num_local_experts": 8}),
        (QWEN3_MOE, {"mlp_only_layers": [0, 7]}),
        (V2, {"q_lora_rank": 24, "routed_scaling_factor": _ABSENT, "topk_method": _ABSENT}),
        (V3, yarn(original_max_position_embeddings=8, attention_factor=1.0, mscale_all_dim=1.0)),
        (V3, yarn(original_max_position_embeddings=8, mscale=0.7)),
        (V3, yarn(original_max_position_embeddings=8, mscale_all_dim=0.7)),
        (V3, yarn(original_max_position_embeddings=8, truncate=False)),
        (V3, {"routed_scaling_factor": _ABSENT, "norm_topk_prob": _ABSENT, "rms_norm_eps": 1e-2}),
        (GPT2, {"activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": _ABSENT}),
        (GPT2, {"n_embd": _ABSENT, "hidden_size": 32, "n_ctx": 20, "resid_pdrop": 0.1}),
    ],
)
def test_what_is_read(config: ModelConfig, changes: dict[str, Any], tmp_path: Path) -> None:
    written(config, changes, tmp_path)
    assert distance(tmp_path) <= 1e-5


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"attention_scale": 2.0}, "attention_scale=2.0: not a key of llama known here"),
        (LLAMA, {"mlp_bias": False}, "attention_bias=True: only with mlp_bias=True"),
        (LLAMA, {"is_causal": False}, "is_causal=False: only is_causal=True"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}: only"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: only"),
        (
            LLAMA,
            {"architectures": ["LlamaBiModel"]},
            r"architectures=\[LlamaBiModel\]: only LlamaForCausalLM",
        ),
        (LLAMA, {"hidden_size": "32"}, "hidden_size='32': must be of type int"),
        (LLAMA, {"architectures": 5}, "architectures=5: must be of type list; correct config.json"),
        (LLAMA, {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf: must be finite; correct config.json"),
        (LLAMA, {"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type=\['yarn'\]: only default and yarn"),
        (
            LLAMA,
            yarn(original_max_position_embeddings=0),
            "original_max_position_embeddings=0.0: must be at least",
        ),
        (LLAMA, yarn(factor=float("nan")), "rope_parameters.factor=nan: must be finite"),
        (LLAMA, yarn(truncate="no"), "rope_parameters.truncate='no': must be true or false"),
        (QWEN3_MOE, {"mlp_only_layers": ["0"]}, r"mlp_only_layers=\['0'\]: must be a list of whole numbers"),
        (
            LLAMA,
            yarn(factor=None, short_factor=[1.0]),
            "rope_parameters.short_factor=.*not a key of rope_type=yarn",
        ),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        (
            LLAMA,
            {"rope_parameters": {"factor": 4.0}},
            "rope_parameters.factor=4.0: not a key of rope_type=default",
        ),
        (LLAMA, yarn(partial_rotary_factor=0.5), "rope_parameters.partial_rotary_factor=0.5: only 1"),
        (
            LLAMA,
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}},
            "rope_type=linear",
        ),
        (
            LLAMA,
            yarn(factor=1.0, attention_factor=1.5),
            "=1.5: only 1 with factor=1 is computed here; take",
        ),
        (QWEN3, {"attention_bias": True}, "attention_bias=True: only attention_bias=False"),
        (
            QWEN3,
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_window=8: only",
        ),
        (
            QWEN3,
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types=\[sliding_attention\]",
        ),
        (QWEN3_MOE, {"use_sliding_window": True}, "sliding_window=4096: only"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2: only decoder_sparse_step=1"),
        (QWEN3_MOE, {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]: only the first layers"),
        (
            QWEN3_MOE,
            {"num_local_experts": 4},
            "num_experts=8 says the same otherwise|num_local_experts=4: num_experts=8",
        ),
        (MIXTRAL, {"sliding_window": 8}, "sliding_window=8: only sliding_window=None"),
        (MIXTRAL, {"attention_bias": True}, "attention_bias=True: only"),
        (V3, {"rope_interleave": False}, "rope_interleave=False: only rope_interleave=True"),
        (V3, {"scoring_func": "softmax"}, "scoring_func=softmax: only scoring_func=sigmoid"),
        (V3, {"attention_bias": True}, "attention_bias=True: only"),
        (V3, {"num_key_value_heads": 2}, "num_key_value_heads=2: only as many as num_attention_heads=4"),
        (V2, {"mlp_bias": True}, "mlp_bias=True: only"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob=True: only"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method=noaux_tc: only greedy"),
        (V2, {"num_experts_per_tok": _ABSENT}, "num_experts_per_tok=None: must be set"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights=False: only"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention=True: only"),
        (
            GPT2,
            {"activation_function": "gelu"},
            "activation_function=gelu: only activation_function=gelu_new",
        ),
    ],
)
def test_what_is_refused(config: ModelConfig, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    written(config, changes, tmp_path)
    with pytest.raises(ValueError, match=message) as refused:
        from_hf_config(read_folder(tmp_path)[0])
    assert re.search("; (take|set|correct|convert|leave)|and it may change what", str(refused.value)), (
        refused.value
    )


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt2"]
)
def test_a_file_that_says_nothing_has_the_defaults_of_transformers(name: str) -> None:
    theirs = transformers.AutoConfig.for_model(name)
    said = {key: value for key, value in theirs.to_dict().items() if key != "num_nextn_predict_layers"}
    needed: dict[str, Any] = {"model_type": name}
    if name == "deepseek_v2":
        needed["num_experts_per_tok"] = said["num_experts_per_tok"] = 6  # transformers has none
    assert from_hf_config(needed) == from_hf_config(said)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Qwen3", {"head_dim": _ABSENT}),
        ("Llama", {"num_key_value_heads": _ABSENT}),
        ("Mixtral", {"num_key_value_heads": 4}),
        ("DeepseekV3", {"first_k_dense_replace": 3}),
        ("DeepseekV3", {"first_k_dense_replace": 0, "tie_word_embeddings": True}),
        ("DeepseekV2", {"first_k_dense_replace": 1}),
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": None}),
    ],
)
def test_models_that_transformers_makes_and_saves_by_itself(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    shape: dict[str, Any] = {
        **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64},
        **{"bos_token_id": 0, "eos_token_id": 1},
    }
    if kind.startswith("Deepseek"):
        shape |= {
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        }
        shape |= {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
        shape |= {"moe_intermediate_size": 20}
    if kind == "GPT2":
        shape = {"vocab_size": VOCAB, "n_positions": 20, "bos_token_id": 0, "eos_token_id": 1}
    shape = {key: value for key, value in (shape | options).items() if value is not _ABSENT}
    torch.manual_seed(3)
    values = getattr(transformers, f"{kind}Config")(**shape)
    AutoModelForCausalLM.from_config(values, dtype=torch.float32).save_pretrained(tmp_path)
    if "head_dim" not in shape and kind == "Qwen3":
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved.pop("head_dim") == 128
        (tmp_path / "config.json").write_text(json.dumps(saved))
    assert distance(tmp_path) <= 1e-5


def renamed(folder: Path, names: dict[str, str], added: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors | added, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("config", "names", "added"),
    [
        (
            GPT2,
            {"transformer.": ""},
            {"h.0.attn.bias": torch.ones(1, 1, 20, 20), "h.1.attn.masked_bias": torch.ones(())},
        ),
        (GPT2, {}, {"transformer.h.0.attn.bias": torch.ones(1, 1, 20, 20)}),
        (LLAMA, {}, {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        (LLAMA_YARN, {"model.": ""}, {"rotary_emb.inv_freq": torch.ones(4)}),
        (V3, {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    ],
)
def test_names_and_leftovers_of_files_on_the_hub(
    config: ModelConfig, names: dict[str, str], added: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    written(config, {}, tmp_path)
    renamed(tmp_path, names, added)
    assert distance(tmp_path) <= 1e-5


def test_a_bias_of_attention_is_no_leftover_elsewhere() -> None:
    tensors = to_hf(state_of(build(MIXTRAL)), MIXTRAL)
    with pytest.raises(ValueError, match="1 tensors do not belong to the model"):
        from_hf(tensors | {"model.layers.0.attn.bias": torch.ones(3)}, MIXTRAL)


def test_a_head_that_is_tied_by_the_config_and_differs_in_the_file() -> None:
    tensors = to_hf(state_of(build(GPT2)), GPT2)
    head = tensors["transformer.wte.weight"].clone()
    assert set(from_hf(tensors | {"lm_head.weight": head}, GPT2)) == set(state_of(build(GPT2)))
    with pytest.raises(ValueError, match=r"lm_head.weight is not equal to transformer.wte.weight"):
        from_hf(tensors | {"lm_head.weight": head + 1}, GPT2)


def test_shapes_and_dtypes_are_checked() -> None:
    tensors = to_hf(state_of(build(LLAMA)), LLAMA)
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(
        ValueError, match=rf"1 tensors have another shape .*\({name}: \[8, 32\] instead of \[16, 32\]"
    ):
        from_hf(tensors | {name: tensors[name][:8]}, LLAMA)
    with pytest.raises(ValueError, match=rf"{name} is of dtype torch.int8: quantised"):
        from_hf(tensors | {name: tensors[name].to(torch.int8)}, LLAMA)
    with pytest.raises(ValueError, match=r"embed_tokens.weight: \[50, 32\] instead of \[60, 32\]"):
        from_hf(tensors, replace(LLAMA, vocab_size=60))
    state = state_of(build(LLAMA))
    state["head.weight"] = state["head.weight"][:49]
    with pytest.raises(ValueError, match=r"head.weight: \[49, 32\] instead of \[50, 32\]"):
        to_hf(state, replace(LLAMA, vocab_size=None))
    mixtral = to_hf(state_of(build(MIXTRAL)), MIXTRAL)
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    with pytest.raises(ValueError, match=r"experts.2.w1.weight: \[48, 16\] instead of \[48, 32\]"):
        from_hf(mixtral | {name: mixtral[name][:, :16]}, MIXTRAL)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(V3, norm_eps=1e-5), "model.mla.latent_norm_eps=1e-05 would be 1e-06"),
        (replace(LLAMA_YARN, yarn=YarnConfig(factor=4.0, mscale_all_dim=1.0)), "model.yarn.mscale_all_dim="),
        (replace(QWEN3, attention_bias=True, mlp_bias=True), "qwen3 and qwen3_moe have no biases in the MLP"),
        (replace(GPT2, head_dim=16), "gpt2's heads make up the hidden size"),
        (replace(GPT2, mtp=DEEPSEEK_V3.mtp), "MTP modules are in deepseek_v3 only"),
        (
            replace(V3, moe=replace(V3.moe, num_groups=8, num_groups_per_token=4)),
            "scores a group by its two best",
        ),
        (replace(V3, mlp_bias=True, moe=replace(V3.moe, num_experts=0)), "no architecture of transformers"),
    ],
)
def test_what_would_be_lost_on_the_way_out_is_refused(config: ModelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_hf_config(config, vocab_size=VOCAB, max_positions=64)


@pytest.mark.parametrize(
    "config",
    [
        replace(LLAMA_YARN, yarn=YarnConfig(factor=4.0, original_seq_length=8, mscale=0.4, truncate=False)),
        replace(LLAMA_YARN, yarn=YarnConfig(factor=4.0, original_seq_length=8, attention_factor=0.8)),
        replace(LLAMA, attention_bias=False),
        replace(V3, norm_eps=1e-2, mla=replace(V3.mla, latent_norm_eps=1e-6)),
        replace(V3, yarn=YarnConfig(factor=8.0, original_seq_length=8, mscale=0.4)),
        replace(V3, mla=MLAConfig(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=12)),
    ],
)
def test_what_goes_out_is_computed_there(config: ModelConfig, tmp_path: Path) -> None:
    written(config, {}, tmp_path)
    assert distance(tmp_path) <= 1e-5


def test_a_balance_loss_of_no_layer_is_none_of_transformers(tmp_path: Path) -> None:
    dense = replace(QWEN3_MOE, moe=replace(QWEN3_MOE.moe, num_dense_layers=3, load_balance_loss=0.1))
    written(dense, {}, tmp_path)
    assert distance(tmp_path) <= 1e-5


def test_another_vocabulary_than_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size=60: the model has model.vocab_size=50"):
        to_hf_config(LLAMA, vocab_size=60, max_positions=64)
