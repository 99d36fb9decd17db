"""What a model costs: parameters, FLOPs per token and activation memory, as pure functions of its shape.

FLOPs are those of matrix products, a multiply-add counted as two; norms, RoPE, softmax and SwiGLU's products
are left out, as in the published model-FLOPs figures (PaLM, arXiv 2204.02311, appendix B). Attention scores
and values are two products over the keys: all `seq_length` of them, or half where `causal_halved` is stated.
A backward costs two forwards; recomputation is not model FLOPs and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The cost of a whole model, and what it was computed for.

    layer_parameters: of one layer. embedding_parameters, head_parameters: tables without padding; a tied head
    has none of its own. The final norm belongs to the head.
    activation_bytes_per_layer: kept for the backward of one sequence, not cut over any axis.
    """

    seq_length: int
    vocab_size: int
    causal_halved: bool
    parameters: int
    layer_parameters: int
    embedding_parameters: int
    head_parameters: int
    forward_flops_per_token: int
    training_flops_per_token: int
    activation_bytes_per_layer: int


def model_cost(
    config: ModelConfig,
    *,
    seq_length: int,
    vocab_size: int,
    causal_halved: bool = True,
    bytes_per_element: int = 2,
) -> ModelCost:
    """The cost of `config` on sequences of `seq_length` tokens, activations in `bytes_per_element`."""
    per_layer = layer_forward_flops(config, seq_length=seq_length, causal_halved=causal_halved)
    forward = config.num_layers * per_layer + head_forward_flops(config, vocab_size=vocab_size)
    return ModelCost(
        seq_length=seq_length,
        vocab_size=vocab_size,
        causal_halved=causal_halved,
        parameters=stage_parameters(config, config.num_layers, first=True, last=True, vocab_size=vocab_size),
        layer_parameters=layer_parameters(config),
        embedding_parameters=vocab_size * config.hidden_size,
        head_parameters=config.hidden_size * (1 + (0 if config.tie_embeddings else vocab_size)),
        forward_flops_per_token=forward,
        training_flops_per_token=3 * forward,
        activation_bytes_per_layer=activation_bytes_per_layer(
            config, num_tokens=seq_length, bytes_per_element=bytes_per_element
        ),
    )


def layer_matrix_parameters(config: ModelConfig) -> int:
    """Parameters of one layer's matrices: every one multiplies every token once."""
    attention = config.hidden_size * config.dim_per_head * 2 * (config.num_heads + config.num_kv_heads)
    return attention + 3 * config.hidden_size * config.intermediate_size


def layer_parameters(config: ModelConfig) -> int:
    """Parameters of one layer: its matrices and two norms."""
    return layer_matrix_parameters(config) + 2 * config.hidden_size


def stage_parameters(
    config: ModelConfig, num_layers: int, *, first: bool, last: bool, vocab_size: int
) -> int:
    """Parameters of a stage of `num_layers` layers over the whole tensor axis, without padding.

    The last stage holds a head of its own unless it is tied to an embedding on the same stage.
    """
    table = vocab_size * config.hidden_size
    total = num_layers * layer_parameters(config)
    if first:
        total += table
    if last:
        total += config.hidden_size + (0 if first and config.tie_embeddings else table)
    return total


def layer_forward_flops(config: ModelConfig, *, seq_length: int, causal_halved: bool = True) -> int:
    """Forward FLOPs of one layer per token: 2 for each matrix parameter, and attention's two products."""
    attention = 4 * seq_length * config.num_heads * config.dim_per_head
    return 2 * layer_matrix_parameters(config) + (attention // 2 if causal_halved else attention)


def head_forward_flops(config: ModelConfig, *, vocab_size: int) -> int:
    """Forward FLOPs of the output head per token."""
    return 2 * vocab_size * config.hidden_size


def activation_bytes_per_layer(
    config: ModelConfig,
    *,
    num_tokens: int,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    bytes_per_element: int = 2,
) -> int:
    """Bytes that one layer keeps for the backward of a micro-batch of `num_tokens`, on one rank.

    Kept are, per token: the inputs of the two norms (cut over the tensor axis under sequence parallelism)
    and one fp32 number each; the whole inputs of the two tensor-parallel regions; q, k, v, the output of
    attention and its fp32 log-sum; gate, up, silu(gate) and their product (cut over the axis). Attention is
    taken to be a fused kernel, which keeps no scores, and RMSNorm too.
    """
    cut = tensor_parallel_size if sequence_parallel else 1
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.dim_per_head
    elements = (
        2 * config.hidden_size // cut
        + 2 * config.hidden_size
        + (heads + 4 * config.intermediate_size) // tensor_parallel_size
    )
    numbers = 2 / cut + config.num_heads / tensor_parallel_size
    return round(num_tokens * (elements * bytes_per_element + 4 * numbers))
