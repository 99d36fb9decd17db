"""What Megatron-LM's layers allocate on a rank: weights, what is saved for a backward, and their largest moments.

Read off megatron-core 0.16 with TransformerEngine 2.11; framework/memory/megatron.py says under which settings and adds
the layers up.

Note [Tokens]
`tokens` are a micro-batch's, `local` the share of them that a tensor rank holds where activations are cut along the
sequence, and `routed` the rows that a rank's experts see: each token of `local` once for each of its experts.

Note [Moments]
Within a forward or a backward a layer holds more for a moment than it saves. The moments that can be a step's peak are
the end of a layer's forward, the start of the backwards of its MLP and of its attention, the loss, and the gradient
of the embedding. In a backward all that later layers saved is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from counterflow.models.config import ModelConfig

BF16, FP32, INT32 = 2, 4, 4
# `--make-vocab-size-divisible-by`: tables of tokens have a multiple of this many rows on each tensor rank.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """What the estimate needs beside the model and the schedule. vocab_size: the tokenizer's, before padding."""

    seq_length: int
    vocab_size: int
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    micro_batch_size: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 1:
                raise ValueError(f"{each.name}={getattr(self, each.name)}: a size; set it to 1 or more")

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.seq_length

    @property
    def local(self) -> int:
        return self.tokens // self.tensor_parallel_size

    @property
    def vocab_rows(self) -> int:
        """Rows of a table of tokens on one tensor rank."""
        return -(-self.vocab_size // (VOCAB_MULTIPLE * self.tensor_parallel_size)) * VOCAB_MULTIPLE

    @property
    def num_expert_replicas(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size // self.expert_parallel_size


class Moment(NamedTuple):
    """Bytes that one micro-batch holds on a stage. saved: for its backward, so far. The rest as in MegatronMemory."""

    name: str
    saved: int
    loss: int = 0
    exchanged: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        return self.saved + self.loss + self.exchanged + self.transient


class Weight(NamedTuple):
    """A matrix of a linear layer on one rank. copies: how many such there are. is_expert: its replicas are experts'."""

    rows: int
    columns: int
    copies: int = 1
    is_expert: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.copies


def weights_of(model: ModelConfig, layout: MegatronLayout, layer: int) -> Iterator[Weight]:
    """The linear layers of `layer`. Queries, keys and values are one matrix, and so are SwiGLU's two halves."""
    size, hidden = layout.tensor_parallel_size, model.hidden_size
    if model.uses_mla:
        mla, heads = model.mla, model.num_heads // size
        queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        if mla.q_lora_rank is None:
            yield Weight(queries, hidden)
        else:
            # Projections to latents are whole on each tensor rank.
            yield Weight(mla.q_lora_rank, hidden)
            yield Weight(queries, mla.q_lora_rank)
        yield Weight(mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
        yield Weight(heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        yield Weight(hidden, heads * mla.v_head_dim)
    else:
        heads = model.num_heads + 2 * model.num_kv_heads
        yield Weight(heads * model.dim_per_head // size, hidden)
        yield Weight(hidden, model.num_heads * model.dim_per_head // size)
    width = _mlp_width(model, layer) // size
    if width:
        yield Weight(2 * width, hidden)
        yield Weight(hidden, width)
    if model.is_moe_layer(layer):
        count, width = model.moe.num_experts // layout.expert_parallel_size, model.expert_intermediate_size
        yield Weight(2 * width, hidden, count, is_expert=True)
        yield Weight(hidden, width, count, is_expert=True)


def other_parameters(model: ModelConfig, layer: int) -> int:
    """Norms and the router, which are whole on each tensor rank and no linear layers of TransformerEngine."""
    total = 2 * model.hidden_size
    if model.uses_mla:
        total += model.mla.kv_lora_rank + (model.mla.q_lora_rank or 0)
    elif model.qk_norm:
        total += 2 * model.dim_per_head
    return total + (model.moe.num_experts * model.hidden_size if model.is_moe_layer(layer) else 0)


def saved_by_attention(model: ModelConfig, layout: MegatronLayout) -> int:
    tokens, size = layout.tokens, layout.tensor_parallel_size
    heads = model.num_heads // size
    queries, keys, values, output = _head_widths(model, layout)
    # The norm keeps its input and a number per token. The linear layer after it keeps the normalised input, cut along
    # the sequence: the backward gathers it again.
    norm = layout.local * (2 * BF16 * model.hidden_size + FP32)
    # The attention kernel keeps what it is given and gives, and the log-sum of each row. RoPE writes queries and keys
    # anew and values are copied to be contiguous, so that what the linear layer made is gone.
    kept = norm + tokens * (BF16 * (queries + keys + values + output) + FP32 * heads)
    if not model.uses_mla:
        # The norm of each head keeps its input.
        return kept + (tokens * BF16 * (queries + keys) if model.qk_norm else 0)
    mla = model.mla
    # A latent is kept by its norm and, normalised, by the projection up. That of keys is a view into a tensor that
    # holds the rotary part too.
    latents = 2 * mla.kv_lora_rank + mla.qk_rope_head_dim + 2 * (mla.q_lora_rank or 0)
    return kept + layout.local * BF16 * latents


def saved_by_mlp(model: ModelConfig, layout: MegatronLayout, layer: int) -> int:
    """Of the dense MLP or the mixture, with the norm before it."""
    hidden, local = model.hidden_size, layout.local
    norm = local * (2 * BF16 * hidden + FP32)
    # SwiGLU keeps its two inputs, the linear layer after it the result.
    total = norm + layout.tokens * BF16 * 3 * _mlp_width(model, layer) // layout.tensor_parallel_size
    if not model.is_moe_layer(layer):
        return total
    moe = model.moe
    # Experts keep the sorted tokens, and weigh within SwiGLU by an fp32 number of each; their output is kept by nobody.
    total += routed_rows(model, layout) * (BF16 * (hidden + 3 * model.expert_intermediate_size) + FP32)
    # Where each token went and comes back from: one map for both ways, of two columns an expert and one more.
    total += local * INT32 * (2 * moe.num_experts + 1)
    # The router keeps logits, the fp32 scores of the choice and of the balance loss, the weights and two masks.
    return total + local * moe.num_experts * (BF16 + 3 * FP32 + 2)


def saved_by_final_norm(model: ModelConfig, layout: MegatronLayout) -> int:
    """Its input, and its output, which the head keeps."""
    return layout.local * (2 * BF16 * model.hidden_size + FP32)


def routed_rows(model: ModelConfig, layout: MegatronLayout) -> int:
    return layout.local * model.moe.num_experts_per_token


def layer_moments(
    model: ModelConfig, layout: MegatronLayout, layer: int, before: int
) -> tuple[Moment, Moment, Moment]:
    """At the end of the forward of `layer`, and in the backwards of its MLP and its attention.

    before: bytes that the micro-batch has saved on the stage before this layer.
    """
    hidden = BF16 * model.hidden_size
    attention, mlp = saved_by_attention(model, layout), saved_by_mlp(model, layout, layer)
    until_here = before + attention + mlp
    # Row-parallel outputs are whole before they are reduced and scattered; their gradients are gathered first.
    whole = hidden * layout.tokens if layout.tensor_parallel_size > 1 else 0
    gradient = hidden * layout.local
    width = BF16 * _mlp_width(model, layer) * layout.tokens // layout.tensor_parallel_size
    # First the second linear layer makes the gradient of its input. Then SwiGLU makes one of both of its inputs, when
    # what that layer had saved is gone, which was as large as the gradient it had made.
    mlp_gradients = gradient + max(whole + width, 2 * width)
    forward_exchange = backward_exchange = 0
    if model.is_moe_layer(layer):
        copies = _copies_of_routed(model, layout)
        rows = hidden * routed_rows(model, layout)
        forward_exchange, backward_exchange = copies[0] * rows, copies[1] * rows
    queries, *others = _head_widths(model, layout)
    # Gradients of what the kernel was given and gave, and queries' once more in fp32, to be summed in.
    attention_gradients = gradient + layout.tokens * (BF16 * (queries + sum(others)) + FP32 * queries)
    name = f"layer {layer}"
    return (
        Moment(
            f"{name}, end of the forward",
            until_here,
            exchanged=forward_exchange,
            transient=gradient + whole,
        ),
        Moment(
            f"{name}, backward of the MLP",
            until_here,
            exchanged=backward_exchange,
            transient=mlp_gradients,
        ),
        Moment(f"{name}, backward of attention", before + attention, transient=attention_gradients),
    )


def loss_moment(model: ModelConfig, layout: MegatronLayout, saved: int) -> Moment:
    """Logits in bf16, whose gradient is written over them, and what of it goes back into the model."""
    hidden = BF16 * model.hidden_size
    scattered = hidden * layout.local if layout.tensor_parallel_size > 1 else 0
    logits = BF16 * layout.vocab_rows * layout.tokens
    return Moment("loss", saved, loss=logits, transient=hidden * layout.tokens + scattered)


def embedding_moment(model: ModelConfig, layout: MegatronLayout) -> Moment:
    """The gradient of the table is made whole, in bf16, and then added to the fp32 one."""
    table = BF16 * layout.vocab_rows * model.hidden_size
    return Moment("embedding, backward", 0, transient=table + BF16 * model.hidden_size * layout.tokens)


def _copies_of_routed(model: ModelConfig, layout: MegatronLayout) -> tuple[int, int]:
    """Tensors of all routed rows that live together, in a forward and a backward, beside those saved.

    In a forward the tokens as they were sent, and as they came before they were sorted by expert, are held by name
    until the layer returns. Experts' outputs are sorted back and sent back, each time into a new tensor.
    """
    is_sent = layout.expert_parallel_size > 1
    is_sorted = model.moe.num_experts > layout.expert_parallel_size
    entering = is_sent + is_sorted
    leaving = 1 + (is_sent or is_sorted)
    return entering + leaving, leaving


def _head_widths(model: ModelConfig, layout: MegatronLayout) -> tuple[int, int, int, int]:
    """Elements per token of queries, keys, values and attention's output on a tensor rank."""
    heads = model.num_heads // layout.tensor_parallel_size
    if model.uses_mla:
        mla = model.mla
        width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        return heads * width, heads * width, heads * mla.v_head_dim, heads * mla.v_head_dim
    # With fewer groups than tensor ranks, ranks share one.
    groups = max(1, model.num_kv_heads // layout.tensor_parallel_size) * model.dim_per_head
    return heads * model.dim_per_head, groups, groups, heads * model.dim_per_head


def _mlp_width(model: ModelConfig, layer: int) -> int:
    """Intermediate width of the dense MLP, or of all shared experts together."""
    if model.is_moe_layer(layer):
        return model.moe.num_shared_experts * model.expert_intermediate_size
    return model.intermediate_size
