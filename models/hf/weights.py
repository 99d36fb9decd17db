"""Names and layouts of Hugging Face checkpoints, and ours: pure functions over whole (unsharded) tensors.

Theirs are those of the files on the Hub: each expert's matrices by themselves, GPT-2's linears transposed with query,
key and value in one, DeepSeek's rotary dims in pairs (0, 1), (2, 3), .. where ours are (i, i + D/2).

Besides parameters, our state has `layers.{i}.mlp.router.bias` (fp32 [E], what balances a sigmoid router); MTP modules'
blocks are `mtp.layers.{k}.block`, theirs are layers after the last. Of a run, `layers.{i}.router.bias` and
`layers.{i}.router.fractions` (MTP modules counted on from the last layer) are known as well; fractions are of training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from counterflow.models.config import ModelConfig
from counterflow.models.hf.config import family_of
from counterflow.models.moe import MoE
from counterflow.models.transformer import TransformerStage
from counterflow.parallel.collectives import Axis

Convert = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Some tensors of ours are some of theirs: their names, and how the values go over.

    copies: names that theirs have beside, with the values of `theirs`; not read.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_hf: Convert = tuple
    from_hf: Convert = tuple
    copies: tuple[str, ...] = ()


def to_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Their tensors for ours, whole. The biases of a sigmoid router are no parameters, and have to be in `state` too.

    Raises ValueError: for a tensor that is missing, not the model's or of another shape, or a model that transformers
    cannot express.
    """
    rules = rules_of(config)
    state = _with_routers(state, config)
    _check_names(state, _names(rules, "ours"), frozenset())
    _check_shapes(state, shapes_of(config, state["embedding.weight"]))
    found: dict[str, Tensor] = {}
    for rule in rules:
        values = rule.to_hf([state[name] for name in rule.ours])
        found.update(zip(rule.theirs, values, strict=True))
        found.update(dict.fromkeys(rule.copies, values[0]))
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors for theirs. Copies that files have beside (a tied head, the head of an MTP module) are compared.

    Names may lack the prefix of the model, as those of a base model's file do; buffers that older releases of
    transformers saved (causal masks, rotary frequencies) are left aside.

    Raises ValueError: for a tensor that is missing, not the model's, of another shape or quantised, or a copy that
    differs.
    """
    rules = rules_of(config)
    state = _whole_names(state, config)
    copies = {copy: rule.theirs[0] for rule in rules for copy in rule.copies}
    if config.tie_embeddings:
        copies["lm_head.weight"] = _embedding_of(config)
    _check_names(state, _names(rules, "theirs"), set(copies))
    wanted = shapes_of(config, state[_embedding_of(config)])
    _check_shapes(state, {name: shape for rule in rules for name, shape in _their_shapes(rule, wanted)})
    for copy, original in copies.items():
        if copy in state and not torch.equal(state[copy], state[original]):
            raise ValueError(
                f"{copy} is not equal to {original}, though the model has one weight for both; untie them in "
                "config.json (tie_word_embeddings=false), or take the copy out of the file"
            )
    found: dict[str, Tensor] = {}
    for rule in rules:
        found.update(zip(rule.ours, rule.from_hf([state[name] for name in rule.theirs]), strict=True))
    return {name: tensor.contiguous() for name, tensor in found.items()}


def shapes_of(config: ModelConfig, embedding: Tensor | None = None) -> dict[str, torch.Size]:
    """The shapes of our tensors by name: parameters, and the biases of a sigmoid router.

    embedding: says how many tokens there are where config.vocab_size is null.
    """
    vocab_size = config.vocab_size
    if vocab_size is None:
        assert embedding is not None, "config.vocab_size is null"
        vocab_size = embedding.shape[0]
    stage = TransformerStage(
        config,
        range(config.num_layers),
        first=True,
        last=True,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=vocab_size,
    )
    found = {name: parameter.shape for name, parameter in stage.named_parameters()}
    if config.moe.router == "sigmoid":
        for name, module in stage.named_modules():
            if isinstance(module, MoE):
                found[f"{name}.router.bias"] = torch.Size((config.moe.num_experts,))
    return found


def is_leftover(name: str, config: ModelConfig) -> bool:
    """Whether `name` is of a buffer that older releases of transformers saved, made of nothing but the config."""
    pattern = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"
    if config.position == "rope":
        pattern = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq"
    return re.fullmatch(pattern, name) is not None


def _whole_names(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """`state` with the model's prefix before each name, without what is left over."""
    prefix = "transformer." if config.position == "learned" else "model."
    if not any(name.startswith(prefix) for name in state):
        state = {name if name.startswith("lm_head.") else prefix + name: state[name] for name in state}
    return {name: tensor for name, tensor in state.items() if not is_leftover(name, config)}


def _with_routers(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """`state` with what a run keeps of its routers under the names of their modules.

    Raises ValueError: where a bias is learned that this router does not have, or one is missing.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        of_run = re.fullmatch(r"layers\.(\d+)\.router\.(bias|fractions)", name)
        if of_run is None:
            found[name] = tensor
            continue
        if of_run[2] == "fractions":
            continue
        if config.moe.router == "sigmoid":
            found[_router_of(int(of_run[1]), config)] = tensor
        elif tensor.any():
            raise ValueError(
                f"{name} is not zero: transformers has a bias in the router of deepseek_v3 only "
                "(model.moe.router=sigmoid); keep the checkpoint in the format of this package"
            )
    missing = [
        _router_of(index, config)
        for index in range(config.num_layers + config.mtp.num_modules)
        if config.moe.router == "sigmoid" and config.is_moe_layer(index)
    ]
    missing = [name for name in missing if name not in found]
    if missing:
        raise ValueError(
            f"the biases of {len(missing)} routers are missing ({missing[0]}, ..): the choice of experts depends on "
            "them; a checkpoint has them as routing.layers.{index}.router.bias, and a bias that nothing learned is zero"
        )
    return found


def _router_of(index: int, config: ModelConfig) -> str:
    """Our name of the bias of layer `index`; MTP modules come after the layers."""
    module = index - config.num_layers
    return f"layers.{index}.mlp.router.bias" if module < 0 else f"mtp.layers.{module}.block.mlp.router.bias"


def rules_of(config: ModelConfig) -> list[Rule]:
    """Every tensor of the model, each once."""
    if family_of(config) == "gpt2":
        return _gpt2_rules(config)
    rules = [
        _same("embedding.weight", "model.embed_tokens.weight", copies=_copies(config, "embed_tokens.weight")),
        _same("norm.weight", "model.norm.weight"),
    ]
    if not config.tie_embeddings:
        rules.append(
            _same("head.weight", "lm_head.weight", copies=_copies(config, "shared_head.head.weight"))
        )
    for index in range(config.num_layers):
        rules += _block_rules(config, index, f"layers.{index}", f"model.layers.{index}")
    for module in range(config.mtp.num_modules):
        index = config.num_layers + module
        ours, theirs = f"mtp.layers.{module}", f"model.layers.{index}"
        rules += [
            _same(f"{ours}.embedding_norm.weight", f"{theirs}.enorm.weight"),
            _same(f"{ours}.hidden_norm.weight", f"{theirs}.hnorm.weight"),
            _same(f"{ours}.proj.weight", f"{theirs}.eh_proj.weight"),
            _same(f"{ours}.norm.weight", f"{theirs}.shared_head.norm.weight"),
            *_block_rules(config, index, f"{ours}.block", theirs),
        ]
    return rules


def _block_rules(config: ModelConfig, index: int, ours: str, theirs: str) -> list[Rule]:
    rules = [
        _same(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight"),
        _same(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight"),
    ]
    attention = _mla_rules if config.uses_mla else _gqa_rules
    rules += attention(config, f"{ours}.attention", f"{theirs}.self_attn")
    if config.is_moe_layer(index):
        return rules + _moe_rules(config, f"{ours}.mlp", theirs)
    return rules + _mlp_rules(f"{ours}.mlp", f"{theirs}.mlp", bias=config.mlp_bias)


def _gqa_rules(config: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    names = [f"{letter}_proj.weight" for letter in "qkvo"]
    if config.attention_bias:
        names += [f"{letter}_proj.bias" for letter in "qkvo"]
    if config.qk_norm:
        names += ["q_norm.weight", "k_norm.weight"]
    return [_same(f"{ours}.{name}", f"{theirs}.{name}") for name in names]


def _mla_rules(config: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    mla = config.mla
    queries = _Pairing(plain=mla.qk_nope_head_dim, rotary=mla.qk_rope_head_dim)
    keys = _Pairing(plain=mla.kv_lora_rank, rotary=mla.qk_rope_head_dim)
    q_name = "q_proj" if mla.q_lora_rank is None else "q_b_proj"
    rules = [
        queries.rule(f"{ours}.q_up_proj.weight", f"{theirs}.{q_name}.weight"),
        keys.rule(f"{ours}.kv_down_proj.weight", f"{theirs}.kv_a_proj_with_mqa.weight"),
        _same(f"{ours}.kv_latent_norm.weight", f"{theirs}.kv_a_layernorm.weight"),
        _same(f"{ours}.kv_up_proj.weight", f"{theirs}.kv_b_proj.weight"),
        _same(f"{ours}.o_proj.weight", f"{theirs}.o_proj.weight"),
    ]
    if mla.q_lora_rank is not None:
        rules += [
            _same(f"{ours}.q_down_proj.weight", f"{theirs}.q_a_proj.weight"),
            _same(f"{ours}.q_latent_norm.weight", f"{theirs}.q_a_layernorm.weight"),
        ]
    return rules


def _mlp_rules(ours: str, theirs: str, *, bias: bool = False) -> list[Rule]:
    return [
        _same(f"{ours}.{part}_proj.{kind}", f"{theirs}.{part}_proj.{kind}")
        for part in ("gate", "up", "down")
        for kind in (("weight", "bias") if bias else ("weight",))
    ]


def _moe_rules(config: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    moe, is_mixtral = config.moe, family_of(config) == "mixtral"
    theirs = f"{theirs}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    rules = [_same(f"{ours}.router.weight", f"{theirs}.gate.weight")]
    for part, letter in parts.items():
        name = letter if is_mixtral else part
        rules.append(
            Rule(
                ours=(f"{ours}.experts.{part}.weight",),
                theirs=tuple(f"{theirs}.experts.{expert}.{name}.weight" for expert in range(moe.num_experts)),
                to_hf=lambda tensors: tensors[0].unbind(0),
                from_hf=lambda tensors: (torch.stack(list(tensors)),),
            )
        )
    if moe.router == "sigmoid":
        rules.append(_same(f"{ours}.router.bias", f"{theirs}.gate.e_score_correction_bias"))
    if moe.num_shared_experts:
        rules += _mlp_rules(f"{ours}.shared", f"{theirs}.shared_experts")
    return rules


def _gpt2_rules(config: ModelConfig) -> list[Rule]:
    rules = [
        _same("embedding.weight", "transformer.wte.weight"),
        _same("positions.weight", "transformer.wpe.weight"),
        _same("norm.weight", "transformer.ln_f.weight"),
        _same("norm.bias", "transformer.ln_f.bias"),
    ]
    if not config.tie_embeddings:
        rules.append(_same("head.weight", "lm_head.weight"))
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"transformer.h.{index}"
        for our_norm, their_norm in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            rules += [
                _same(f"{ours}.{our_norm}.{kind}", f"{theirs}.{their_norm}.{kind}")
                for kind in ("weight", "bias")
            ]
        # A weight [out, in] of theirs lies as [in, out]; a bias is the same either way.
        rules += [
            Rule(
                ours=tuple(f"{ours}.attention.{letter}_proj.{kind}" for letter in "qkv"),
                theirs=(f"{theirs}.attn.c_attn.{kind}",),
                to_hf=lambda tensors: (torch.cat(list(tensors)).t(),),
                from_hf=lambda tensors: tensors[0].t().chunk(3),
            )
            for kind in ("weight", "bias")
        ]
        for our_linear, their_linear in (
            ("attention.o_proj", "attn.c_proj"),
            ("mlp.up_proj", "mlp.c_fc"),
            ("mlp.down_proj", "mlp.c_proj"),
        ):
            rules += [
                Rule(
                    ours=(f"{ours}.{our_linear}.{kind}",),
                    theirs=(f"{theirs}.{their_linear}.{kind}",),
                    to_hf=lambda tensors: (tensors[0].t(),),
                    from_hf=lambda tensors: (tensors[0].t(),),
                )
                for kind in ("weight", "bias")
            ]
    return rules


def _same(ours: str, theirs: str, copies: tuple[str, ...] = ()) -> Rule:
    return Rule(ours=(ours,), theirs=(theirs,), copies=copies)


def _copies(config: ModelConfig, name: str) -> tuple[str, ...]:
    """DeepSeek's files repeat embedding and head in each MTP module."""
    return tuple(
        f"model.layers.{config.num_layers + module}.{name}" for module in range(config.mtp.num_modules)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairing:
    """Rows in groups of `plain` + `rotary` (a head, or the one of the keys), whose last are turned in pairs."""

    plain: int
    rotary: int

    def rule(self, ours: str, theirs: str) -> Rule:
        return Rule(
            ours=(ours,),
            theirs=(theirs,),
            to_hf=lambda tensors: (self._permuted(tensors[0], is_ours=True),),
            from_hf=lambda tensors: (self._permuted(tensors[0], is_ours=False),),
        )

    def _permuted(self, weight: Tensor, *, is_ours: bool) -> Tensor:
        """Pair i is rows i and i + D/2 of ours, 2i and 2i + 1 of theirs."""
        groups = weight.unflatten(0, (-1, self.plain + self.rotary))
        plain, rotary = groups.split((self.plain, self.rotary), dim=1)
        half = self.rotary // 2
        shape = (2, half) if is_ours else (half, 2)
        rotary = rotary.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
        return torch.cat((plain, rotary), dim=1).flatten(0, 1)


def _embedding_of(config: ModelConfig) -> str:
    return "transformer.wte.weight" if config.position == "learned" else "model.embed_tokens.weight"


def _their_shapes(rule: Rule, ours: Mapping[str, torch.Size]) -> list[tuple[str, torch.Size]]:
    tensors = rule.to_hf([torch.empty(ours[name], device="meta") for name in rule.ours])
    found = [(name, tensor.shape) for name, tensor in zip(rule.theirs, tensors, strict=True)]
    return found + [(name, found[0][1]) for name in rule.copies]


def _names(rules: Sequence[Rule], side: str) -> set[str]:
    return {name for rule in rules for name in getattr(rule, side)}


def _check_names(state: Mapping[str, Tensor], wanted: set[str], unread: set[str] | frozenset[str]) -> None:
    missing, foreign = sorted(wanted - set(state)), sorted(set(state) - wanted - unread)
    if missing or foreign:
        raise ValueError(
            "; ".join(
                f"{len(names)} tensors {what} ({', '.join(names[:3])}{', ..' if len(names) > 3 else ''})"
                for names, what in (
                    (missing, "of the model are missing"),
                    (foreign, "do not belong to the model"),
                )
                if names
            )
            + "; the weights have to be those of the model's shape"
        )


def _check_shapes(state: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    wrong = [name for name, shape in wanted.items() if name in state and state[name].shape != shape]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{len(wrong)} tensors have another shape than the model's ({name}: {list(state[name].shape)} instead of "
            f"{list(wanted[name])}{', ..' if len(wrong) > 1 else ''}); the weights have to be those of the model's "
            "shape"
        )
    for name in wanted:
        if name in state and not (state[name].is_floating_point() and state[name].itemsize > 1):
            raise ValueError(
                f"{name} is of dtype {state[name].dtype}: quantised weights are not read; convert them to bf16 or fp32"
            )
