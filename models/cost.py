"""What a model costs: parameters, FLOPs per token and activation memory, as pure functions of its shape.

FLOPs are those of matrix products, a multiply-add counted as two; norms, RoPE, softmax and SwiGLU's products
are left out, as in the published model-FLOPs figures (PaLM, arXiv 2204.02311, appendix B). Attention scores
and values are two products over the keys: all `seq_length` of them, or half where `causal_halved` is stated.
A backward costs two forwards; recomputation is not model FLOPs and counted by itself. A token passes
`num_experts_per_token` routed experts of a mixture layer and all its shared ones.

MTP modules (models/mtp.py) train with the model and are dropped after: where a figure includes them it says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from counterflow.models.config import ModelConfig
from counterflow.models.recompute import NOTHING, Parts, Plan
from counterflow.parallel.ops.loss_config import chunk_bytes, tokens_at_once

LayerKind = Literal["dense", "moe", "mtp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Layers `first` to `first + count - 1`, all of one shape; each of them costs what stands here.

    kind: with a dense MLP, with experts, or an MTP module (its own norms and projection are in `rest`).
    attention, router, routed_experts, dense_mlp, rest: parameters by part; dense_mlp holds the shared experts too.
    active_parameters: those that a token passes. forward_flops_per_token: an MTP module's with the output head.
    activation_bytes: kept for the backward of one sequence, not cut over any axis.
    """

    kind: LayerKind
    first: int
    count: int
    attention: int
    router: int
    routed_experts: int
    dense_mlp: int
    rest: int
    active_parameters: int
    forward_flops_per_token: int
    activation_bytes: int

    @property
    def parameters(self) -> int:
        return self.attention + self.router + self.routed_experts + self.dense_mlp + self.rest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The cost of a whole model, and what it was computed for.

    parameters, active_parameters, forward_flops_per_token, training_flops_per_token: as it trains, with MTP modules.
    layers: runs of equal layers, in order, the MTP modules last.
    embedding_parameters: tables of tokens and learned positions. head_parameters: the final norm and the head; a
    tied head has no table of its own. Tables are counted without padding.
    """

    seq_length: int
    vocab_size: int
    causal_halved: bool
    parameters: int
    active_parameters: int
    embedding_parameters: int
    head_parameters: int
    forward_flops_per_token: int
    training_flops_per_token: int
    layers: tuple[LayerCost, ...]

    @property
    def without_mtp(self) -> ModelCost:
        """The model that is left after training; what is published of a model is about this one."""
        mtp = [layer for layer in self.layers if layer.kind == "mtp"]
        forward = sum(layer.count * layer.forward_flops_per_token for layer in mtp)
        return ModelCost(
            seq_length=self.seq_length,
            vocab_size=self.vocab_size,
            causal_halved=self.causal_halved,
            parameters=self.parameters - sum(layer.count * layer.parameters for layer in mtp),
            active_parameters=self.active_parameters
            - sum(layer.count * layer.active_parameters for layer in mtp),
            embedding_parameters=self.embedding_parameters,
            head_parameters=self.head_parameters,
            forward_flops_per_token=self.forward_flops_per_token - forward,
            training_flops_per_token=self.training_flops_per_token - 3 * forward,
            layers=tuple(layer for layer in self.layers if layer.kind != "mtp"),
        )


def model_cost(
    config: ModelConfig,
    *,
    seq_length: int,
    vocab_size: int,
    causal_halved: bool = True,
    bytes_per_element: int = 2,
) -> ModelCost:
    """The cost of `config` on sequences of `seq_length` tokens, activations in `bytes_per_element`."""
    runs: list[LayerCost] = []
    for _, run in groupby(layer_indices(config), key=lambda index: layer_kind(config, index)):
        indices = list(run)
        runs.append(
            _layer_cost(
                config,
                indices[0],
                len(indices),
                seq_length=seq_length,
                vocab_size=vocab_size,
                causal_halved=causal_halved,
                bytes_per_element=bytes_per_element,
            )
        )
    embedding, head = embedding_parameters(config, vocab_size), _head_parameters(config, vocab_size)
    forward = head_forward_flops(config, vocab_size=vocab_size)
    forward += sum(run.count * run.forward_flops_per_token for run in runs)
    return ModelCost(
        seq_length=seq_length,
        vocab_size=vocab_size,
        causal_halved=causal_halved,
        parameters=embedding + head + sum(run.count * run.parameters for run in runs),
        active_parameters=embedding + head + sum(run.count * run.active_parameters for run in runs),
        embedding_parameters=embedding,
        head_parameters=head,
        forward_flops_per_token=forward,
        training_flops_per_token=3 * forward,
        layers=tuple(runs),
    )


def layer_indices(config: ModelConfig) -> range:
    """Every layer, and after them the MTP modules."""
    return range(config.num_layers + config.mtp.num_modules)


def layer_kind(config: ModelConfig, index: int) -> LayerKind:
    if index >= config.num_layers:
        return "mtp"
    return "moe" if config.is_moe_layer(index) else "dense"


def layer_parameters(config: ModelConfig, index: int) -> int:
    """Parameters of layer `index`; from num_layers on, of an MTP module without embedding and head."""
    norms = 2 * _norm_parameters(config) + _rest_of_mtp(config, index)
    return attention_parameters(config) + _mlp_parameters(config, index) + norms


def stage_parameters(config: ModelConfig, layers: range, *, first: bool, last: bool, vocab_size: int) -> int:
    """Parameters of a stage with these layers over the whole tensor and expert axes, without padding.

    The last stage holds a head of its own unless it is tied to an embedding on the same stage, the MTP modules,
    and for them a copy of the embedding unless it or a tied head is there already.
    """
    table = vocab_size * config.hidden_size
    total = sum(layer_parameters(config, index) for index in layers)
    if first:
        total += embedding_parameters(config, vocab_size)
    if last:
        total += _norm_parameters(config) + (0 if first and config.tie_embeddings else table)
        modules = range(config.num_layers, config.num_layers + config.mtp.num_modules)
        total += sum(layer_parameters(config, index) for index in modules)
        total += table if modules and not first and not config.tie_embeddings else 0
    return total


def layer_forward_flops(
    config: ModelConfig, index: int, *, seq_length: int, causal_halved: bool = True
) -> int:
    """Forward FLOPs of layer `index` per token: two for each parameter of its matrices that the token passes, and
    attention's two products. Of an MTP module without the output head."""
    matrices = _active_mlp_matrices(config, index)
    if index >= config.num_layers:
        matrices += 2 * config.hidden_size**2
    return 2 * matrices + _attention_flops(config, seq_length=seq_length, causal_halved=causal_halved)


def recomputed_flops(
    config: ModelConfig, index: int, recomputed: Parts, *, seq_length: int, causal_halved: bool = True
) -> int:
    """Forward FLOPs that layer `index` runs again in its backward per token, where these parts are recomputed."""
    attention = _attention_flops(config, seq_length=seq_length, causal_halved=causal_halved)
    mlp = 2 * _active_mlp_matrices(config, index)
    if "block" in recomputed:
        return attention + mlp
    flops = attention if "attention" in recomputed else 0
    if not recomputed.isdisjoint(("mlp", "moe")):
        return flops + mlp
    _, routed, shared = _mlp_parts(config, index)
    if "experts" in recomputed:
        flops += 2 * routed * config.moe.num_experts_per_token // config.moe.num_experts
    if "shared_experts" in recomputed:
        flops += 2 * (shared - (config.hidden_size if config.moe.shared_expert_gate else 0))
    return flops


def hardware_flops_per_token(
    config: ModelConfig, plan: Plan, *, seq_length: int, vocab_size: int, causal_halved: bool = True
) -> int:
    """Training FLOPs per token with what `plan` runs again: as `ModelCost.training_flops_per_token`, and that."""
    cost = model_cost(config, seq_length=seq_length, vocab_size=vocab_size, causal_halved=causal_halved)
    again = (
        recomputed_flops(config, index, parts, seq_length=seq_length, causal_halved=causal_halved)
        for index, parts in plan.items()
    )
    return cost.training_flops_per_token + sum(again)


def head_forward_flops(config: ModelConfig, *, vocab_size: int) -> int:
    """Forward FLOPs of the output head per token."""
    return 2 * vocab_size * config.hidden_size


def activation_bytes_per_layer(
    config: ModelConfig,
    *,
    num_tokens: int,
    layer: int = 0,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    expert_parallel_size: int = 1,
    bytes_per_element: int = 2,
    recomputed: Parts = NOTHING,
    on_cpu: bool = False,
) -> int:
    """Bytes that one layer keeps for the backward of a micro-batch of `num_tokens`, on one rank.

    Kept are, per token: the inputs of the two norms (cut over the tensor axis under sequence parallelism)
    and their fp32 statistics; the inputs of matrices; q, k, v, the output of attention and its fp32 log-sum; what
    SwiGLU or GELU is computed from, and its result. Attention is taken to be a fused kernel, which keeps no
    scores, and the norms too. Experts: the tokens' even share, however many ranks the experts are cut over.

    recomputed: parts of the layer of which the input only is kept; that of experts are the tokens that have come.
    on_cpu: what torch's kernels for CPUs keep besides: RMSNorm is not fused there and keeps x / rms; values of latent
    attention are as wide as keys.
    """
    cut = tensor_parallel_size if sequence_parallel else 1
    hidden = config.hidden_size / cut
    if "block" in recomputed:
        return round(num_tokens * hidden * bytes_per_element)
    elements, numbers = 2 * hidden, 0.0
    statistics = (1 if config.norm == "rms" else 2) / cut
    unfused = hidden if on_cpu and config.norm == "rms" else 0.0
    if "attention" not in recomputed:
        more, more_numbers = _attention_activations(config, tensor_parallel_size, cut, on_cpu)
        elements += more + unfused
        numbers += more_numbers + statistics
    if recomputed.isdisjoint(("mlp", "moe")):
        more, more_numbers = _mlp_activations(
            config, layer, tensor_parallel_size, cut, expert_parallel_size, recomputed
        )
        elements += more + unfused
        numbers += more_numbers + statistics
    return round(num_tokens * (elements * bytes_per_element + 4 * numbers))


def activation_bytes_of_ends(
    config: ModelConfig,
    *,
    num_tokens: int,
    first: bool,
    last: bool,
    vocab_size: int,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    bytes_per_element: int = 2,
    on_cpu: bool = False,
    is_loss_chunked: bool = False,
) -> int:
    """Bytes that a stage keeps for the backward of a micro-batch besides its layers, MTP modules' blocks among them.

    first: the tokens that the embedding looks up. last: the inputs of the final norm and of the head, the logits, and
    what the loss keeps of each token; with MTP modules all of that again for each, and their norms and projection.
    is_loss_chunked: the loss keeps what the head starts from and the targets (see `loss_chunk_bytes`).
    """
    cut = tensor_parallel_size if sequence_parallel else 1
    hidden, numbers = config.hidden_size / cut, 1 if config.norm == "rms" else 2
    norm = hidden * (2 if on_cpu and config.norm == "rms" else 1) * bytes_per_element + 4 * numbers / cut
    embedded = 9.0  # an index, and whether it is of this rank
    total = embedded if first else 0.0
    if last:
        logits = -(-vocab_size // tensor_parallel_size)
        end = norm + (config.hidden_size + logits) * bytes_per_element + 4 + 8 + 2
        if is_loss_chunked:
            end = norm + hidden * bytes_per_element + 8
        module = end + embedded + 2 * norm + 2 * hidden * bytes_per_element
        total += end + config.mtp.num_modules * module
    return round(num_tokens * total)


def loss_chunk_bytes(
    config: ModelConfig,
    chunk_tokens: int,
    *,
    num_tokens: int,
    vocab_size: int,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    bytes_per_element: int = 2,
) -> int:
    """Bytes that a backward of the last stage takes for the loss in chunks of tokens while it computes one.

    The logits of the chunk and, under sequence parallelism, the hidden states gathered for it.
    """
    num_columns = -(-vocab_size // tensor_parallel_size)
    tokens = tokens_at_once(
        chunk_tokens, num_tokens=num_tokens, hidden_size=config.hidden_size, num_columns=num_columns
    )
    is_gathered = sequence_parallel and tensor_parallel_size > 1
    gathered = num_tokens * config.hidden_size * bytes_per_element if is_gathered else 0
    return chunk_bytes(tokens, num_columns, bytes_per_element) + gathered


def attention_parameters(config: ModelConfig) -> int:
    """Parameters of a layer's attention: matrices, biases, norms of heads or latents."""
    total = _attention_matrices(config)
    if config.uses_mla:
        return total + config.mla.kv_lora_rank + (config.mla.q_lora_rank or 0)
    if config.qk_norm:
        total += 2 * config.dim_per_head
    if config.attention_bias:
        total += (config.num_heads + 2 * config.num_kv_heads) * config.dim_per_head
        total += config.hidden_size if config.mlp_bias else 0
    return total


def _layer_cost(
    config: ModelConfig,
    index: int,
    count: int,
    *,
    seq_length: int,
    vocab_size: int,
    causal_halved: bool,
    bytes_per_element: int,
) -> LayerCost:
    attention = attention_parameters(config)
    router, routed, dense = _mlp_parts(config, index)
    rest = 2 * _norm_parameters(config) + _rest_of_mtp(config, index)
    kind = layer_kind(config, index)
    forward = layer_forward_flops(config, index, seq_length=seq_length, causal_halved=causal_halved)
    if kind == "mtp":
        forward += head_forward_flops(config, vocab_size=vocab_size)
    share = routed * config.moe.num_experts_per_token // config.moe.num_experts if routed else 0
    return LayerCost(
        kind=kind,
        first=index,
        count=count,
        attention=attention,
        router=router,
        routed_experts=routed,
        dense_mlp=dense,
        rest=rest,
        active_parameters=attention + router + share + dense + rest,
        forward_flops_per_token=forward,
        activation_bytes=activation_bytes_per_layer(
            config, num_tokens=seq_length, layer=index, bytes_per_element=bytes_per_element
        ),
    )


def embedding_parameters(config: ModelConfig, vocab_size: int) -> int:
    positions = config.max_seq_length if config.position == "learned" else 0
    return (vocab_size + positions) * config.hidden_size


def _head_parameters(config: ModelConfig, vocab_size: int) -> int:
    return _norm_parameters(config) + (0 if config.tie_embeddings else vocab_size * config.hidden_size)


def _norm_parameters(config: ModelConfig) -> int:
    return config.hidden_size * (1 if config.norm == "rms" else 2)


def _rest_of_mtp(config: ModelConfig, index: int) -> int:
    """Of an MTP module: three norms and the projection of two states to one."""
    return 0 if index < config.num_layers else 3 * _norm_parameters(config) + 2 * config.hidden_size**2


def _attention_flops(config: ModelConfig, *, seq_length: int, causal_halved: bool) -> int:
    """Forward FLOPs of a layer's attention per token, matrices and products."""
    if config.uses_mla:
        mla = config.mla
        widths = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
    else:
        widths = 2 * config.dim_per_head
    products = 2 * seq_length * config.num_heads * widths
    return 2 * _attention_matrices(config) + (products // 2 if causal_halved else products)


def _attention_matrices(config: ModelConfig) -> int:
    hidden, heads = config.hidden_size, config.num_heads
    if not config.uses_mla:
        return hidden * config.dim_per_head * 2 * (heads + config.num_kv_heads)
    mla = config.mla
    qk_size = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    queries = hidden * qk_size if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + qk_size)
    keys_values = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    keys_values += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + keys_values + hidden * heads * mla.v_head_dim


def _mlp_parts(config: ModelConfig, index: int) -> tuple[int, int, int]:
    """Parameters of the router, the routed experts, and the dense MLP or shared experts of layer `index`."""
    hidden, moe = config.hidden_size, config.moe
    if not config.is_moe_layer(index):
        matrices = (3 if config.activation == "swiglu" else 2) * hidden * config.intermediate_size
        outputs = config.intermediate_size * (2 if config.activation == "swiglu" else 1) + hidden
        return 0, 0, matrices + (outputs if config.mlp_bias else 0)
    expert = 3 * hidden * config.expert_intermediate_size
    shared = moe.num_shared_experts * expert
    if moe.num_shared_experts and moe.shared_expert_gate:
        shared += hidden
    return hidden * moe.num_experts, moe.num_experts * expert, shared


def _mlp_parameters(config: ModelConfig, index: int) -> int:
    return sum(_mlp_parts(config, index))


def _active_mlp_matrices(config: ModelConfig, index: int) -> int:
    if not config.is_moe_layer(index):
        return (3 if config.activation == "swiglu" else 2) * config.hidden_size * config.intermediate_size
    router, routed, shared = _mlp_parts(config, index)
    return router + routed * config.moe.num_experts_per_token // config.moe.num_experts + shared


def _attention_activations(
    config: ModelConfig, tensor_size: int, cut: int, on_cpu: bool
) -> tuple[float, float]:
    """Elements and fp32 numbers per token that attention keeps, the norm before it left out."""
    heads = config.num_heads / tensor_size
    if not config.uses_mla:
        size = config.dim_per_head
        kept = 2 * (config.num_heads + config.num_kv_heads) * size / tensor_size
        numbers = heads
        if config.qk_norm:
            both = (config.num_heads + config.num_kv_heads) / tensor_size
            kept += both * size * (2 if on_cpu else 1)
            numbers += both
        return config.hidden_size + kept, numbers
    mla = config.mla
    qk_size = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    latents = mla.kv_lora_rank + mla.qk_rope_head_dim
    entering = latents + (config.hidden_size if mla.q_lora_rank is None else mla.q_lora_rank)
    outside = config.hidden_size + latents + (mla.q_lora_rank or 0)
    per_head = 2 * qk_size + mla.qk_nope_head_dim + 2 * mla.v_head_dim
    norms = 1 if mla.q_lora_rank is None else 2
    if on_cpu:
        outside += mla.kv_lora_rank + (mla.q_lora_rank or 0)
        per_head += 2 * mla.qk_rope_head_dim + mla.qk_nope_head_dim - mla.v_head_dim
    return outside / cut + entering + heads * per_head, norms / cut + heads


def _mlp_activations(
    config: ModelConfig, index: int, tensor_size: int, cut: int, expert_size: int, recomputed: Parts
) -> tuple[float, float]:
    """Elements and fp32 numbers per token that the MLP or the experts keep, the norm before them left out."""
    hidden, moe = config.hidden_size, config.moe
    if not config.is_moe_layer(index):
        inner = config.intermediate_size * (4 if config.activation == "swiglu" else 2)
        return hidden + inner / tensor_size, 0.0
    # All tokens are cut over the tensor axis, with sequence parallelism or without. For each of a token's experts the
    # row that goes in, gate, up, and what the last matrix takes; then scores and indices.
    k = moe.num_experts_per_token
    routed, numbers = k * (hidden + 3 * config.expert_intermediate_size), moe.num_experts + 8.0 * k
    if "experts" in recomputed:
        routed, numbers = hidden * _num_ranks_of_token(config, expert_size), moe.num_experts + 6.0 * k
    is_shared_kept = "shared_experts" not in recomputed
    shared = 4 * moe.num_shared_experts * config.expert_intermediate_size if is_shared_kept else 0
    elements = (hidden + routed + shared) / tensor_size
    if moe.num_shared_experts and tensor_size > 1 and (is_shared_kept or cut == 1):
        elements += hidden
    return elements, numbers / tensor_size


def _num_ranks_of_token(config: ModelConfig, expert_size: int) -> float:
    """On how many ranks the experts of a token are in the mean, where each choice of experts is as likely."""
    num_experts, k = config.moe.num_experts, config.moe.num_experts_per_token
    elsewhere = num_experts - num_experts // expert_size
    return expert_size * (1 - math.comb(elsewhere, k) / math.comb(num_experts, k))
