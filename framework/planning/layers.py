"""The time of each part of a model on one rank: forward, input gradient, weight gradient, and what travels meanwhile.

Note [What a layer reads and writes]
Bytes of operators that memory bounds, in 2-byte elements, by reading each module: a norm reads and writes its input
(4 bytes an element; its backward reads the gradient and the input, and writes: 8 with the sums for its weights),
adding to the residual reads both and writes (6; with dropout a mask more: 7, backward 5), GELU with bias reads and
writes (4; backward 6), SwiGLU reads two and writes one (6; backward 10). Softmax over scores reads and writes them
(4; backward 6), dropout of them too, with a mask (5; backward 5).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from counterflow.framework.planning.kernels import (
    BF16,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Kernels,
    ModelledKernels,
)
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.links import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Group,
    Links,
)
from counterflow.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a micro-batch on one rank. forward, input_gradient, weight_gradient: computation. *_tensor,
    *_expert: communication of an axis in a forward or a backward; backward_gather: before the product of an input's
    gradient, which waits for it. selective, norms: parts of `forward` that recomputation repeats."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    forward_tensor: float = 0.0
    backward_tensor: float = 0.0
    backward_gather: float = 0.0
    forward_expert: float = 0.0
    backward_expert: float = 0.0
    selective: float = 0.0
    norms: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(
            **{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(Times)}
        )

    def exposed_tensor(self, is_hidden: bool) -> float:
        """Of a backward, where weight gradients hide what does not have to come first."""
        rest = max(0.0, self.backward_tensor - self.weight_gradient) if is_hidden else self.backward_tensor
        return self.backward_gather + rest


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModel:
    """Times of the parts of `model` under `layout`."""

    model: ModelConfig
    layout: Layout
    kernels: Kernels
    links: Links

    def linear(self, inputs: int, outputs: int, *, tokens: int | None = None) -> Times:
        """A product of `tokens` rows with a weight of this rank, and its two gradients."""
        rows, fp8 = self.layout.tokens if tokens is None else tokens, self.layout.fp8
        return self._rounded(rows * inputs, rows * outputs) + Times(
            forward=self.kernels.gemm(rows, inputs, outputs, FORWARD, fp8=fp8),
            input_gradient=self.kernels.gemm(rows, outputs, inputs, INPUT_GRADIENT, fp8=fp8),
            weight_gradient=self.kernels.gemm(outputs, rows, inputs, WEIGHT_GRADIENT, fp8=fp8),
        )

    def moved(self, elements: float, forward: float, backward: float, kernels: int = 1) -> Times:
        """Elements read and written with so many bytes each, forward and backward."""
        once, again = (
            self.kernels.moved(elements * each, num_kernels=kernels) if each else 0.0
            for each in (forward, backward)
        )
        return Times(forward=once, input_gradient=again)

    def norm(self, elements: float | None = None) -> Times:
        found = self.moved(self.local_elements if elements is None else elements, 4, 8)
        return found + Times(norms=found.forward)

    @property
    def local_elements(self) -> float:
        """Of the hidden state where it is not cut by heads: along the sequence with sequence parallelism."""
        whole = self.layout.tokens * self.model.hidden_size
        return whole / (self.layout.tensor if self.layout.sequence_parallel else 1)

    def residual(self) -> Times:
        return self.moved(
            self.local_elements, 7 if self.layout.dropout else 6, 5 if self.layout.dropout else 4
        )

    def tensor_region(self) -> Times:
        """Entering and leaving a pair of a column- and a row-parallel linear."""
        layout = self.layout
        if layout.tensor == 1:
            return Times()
        group = Group.strided(layout.tensor, 1, self.links.cluster.gpus_per_node)
        size = layout.tokens * self.model.hidden_size * BF16
        if not layout.sequence_parallel:
            once = self.links.collective(ALL_REDUCE, size, group)
            return Times(forward_tensor=once, backward_tensor=once)
        gather = self.links.collective(ALL_GATHER, size, group)
        scatter = self.links.collective(REDUCE_SCATTER, size, group)
        # The backward gathers the output's gradient first, and the region's input once more for its weight gradient.
        return Times(
            forward_tensor=gather + scatter, backward_gather=gather, backward_tensor=gather + scatter
        )

    def layer(self, index: int) -> Times:
        mlp = self.experts() if self.model.is_moe_layer(index) else self.dense_mlp()
        attention = self.latent_attention() if self.model.uses_mla else self.attention()
        return self.norm() + attention + self.residual() + self.norm() + mlp + self.residual()

    def attention(self) -> Times:
        model, layout = self.model, self.layout
        heads = model.num_heads // layout.tensor
        kv_heads = max(1, model.num_kv_heads // layout.tensor)
        width = model.dim_per_head
        found = self.linear(model.hidden_size, (heads + 2 * kv_heads) * width)
        found += self.linear(heads * width, model.hidden_size)
        found += self.tensor_region()
        if model.position == "rope":
            found += self.moved(layout.tokens * (heads + kv_heads) * width, 4, 4)
        if model.qk_norm:
            found += self.norm(layout.tokens * (heads + kv_heads) * width)
        return found + self.core_attention(heads, kv_heads, width, width)

    def core_attention(self, heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> Times:
        layout, batch, seq = self.layout, self.layout.micro_batch_size, self.layout.seq_length
        if layout.flash or not isinstance(self.kernels, ModelledKernels):
            sizes = (batch, seq, heads, kv_heads, qk_dim, v_dim)
            forward = self.kernels.attention(*sizes, backward=False)
            return Times(
                forward=forward,
                input_gradient=self.kernels.attention(*sizes, backward=True),
                selective=forward,
            )
        product = self.kernels.batched_gemm
        scores = product(batch * heads, seq, qk_dim, seq)
        context = product(batch * heads, seq, seq, v_dim)
        elements = batch * heads * seq * seq
        found = self.moved(elements, 4, 6)  # scaled and masked softmax, fused
        if layout.dropout:
            found += self.moved(elements, 5, 5)
        # Heads are brought to the front and back: queries, keys, values, and what comes of them.
        found += self.moved(2 * batch * seq * heads * (qk_dim + v_dim) / 2, 4, 4, 2)
        found += Times(
            forward=scores + context,
            input_gradient=2 * (product(batch * heads, seq, seq, qk_dim) + context),
        )
        return found + Times(selective=found.forward)

    def latent_attention(self) -> Times:
        model, layout, mla = self.model, self.layout, self.model.mla
        heads = model.num_heads // layout.tensor
        tokens = layout.tokens
        local = tokens // (layout.tensor if layout.sequence_parallel else 1)
        qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        up = Times()
        if mla.q_lora_rank is None:
            found = self.linear(model.hidden_size, heads * qk_dim)
        else:
            found = self.linear(model.hidden_size, mla.q_lora_rank, tokens=local)
            found += self.norm(local * mla.q_lora_rank)
            up += self.linear(mla.q_lora_rank, heads * qk_dim)
        found += self.linear(model.hidden_size, mla.kv_lora_rank + mla.qk_rope_head_dim, tokens=local)
        found += self.norm(local * mla.kv_lora_rank)
        up += self.linear(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        found += up + Times(norms=up.forward)
        # Rotary parts are turned, and joined to the others: queries and keys are written once more.
        found += self.moved(tokens * heads * 2 * qk_dim, 4, 4, 2)
        found += self.linear(heads * mla.v_head_dim, model.hidden_size)
        found += self.tensor_region()
        return found + self.core_attention(heads, heads, qk_dim, mla.v_head_dim)

    def dense_mlp(self) -> Times:
        return self.mlp(self.model.intermediate_size) + self.tensor_region()

    def mlp(self, intermediate_size: int) -> Times:
        model, layout = self.model, self.layout
        size = intermediate_size // layout.tensor
        gated = model.activation == "swiglu"
        found = self.linear(model.hidden_size, 2 * size if gated else size)
        found += self.linear(size, model.hidden_size)
        return found + self.moved(layout.tokens * size, *((6, 10) if gated else (4, 6)))

    def experts(self) -> Times:
        """Routed experts in even shares, exchanged by all-to-all, and shared ones."""
        model, layout, moe = self.model, self.layout, self.model.moe
        local = layout.tokens // (layout.tensor if layout.sequence_parallel else 1)
        routed = local * moe.num_experts_per_token
        hidden, size = model.hidden_size, model.expert_intermediate_size
        found = self.linear(hidden, moe.num_experts, tokens=local)
        # Scores of tokens, the choice among them, and its maps: of fp32, some ten passes.
        found += self.moved(local * moe.num_experts, 40, 20, 8)
        for _ in range(2):  # to the experts and back
            found += self._permuted(routed * hidden)
        groups = moe.num_experts // layout.expert
        rows = max(1, round(routed * layout.expert / moe.num_experts))
        found += self.grouped_linear(groups, rows, hidden, 2 * size) + self.grouped_linear(
            groups, rows, size, hidden
        )
        found += self.moved(routed * size, 6, 10)
        if moe.num_shared_experts:
            found += self.mlp(moe.num_shared_experts * size)
        if layout.tensor > 1:
            found += self.tensor_region() if moe.num_shared_experts else Times()
        return found + self._exchanged(local, routed)

    def grouped_linear(self, groups: int, rows: int, inputs: int, outputs: int) -> Times:
        product, fp8 = self.kernels.grouped_gemm, self.layout.fp8
        return self._rounded(groups * rows * inputs, groups * rows * outputs) + Times(
            forward=product(groups, rows, inputs, outputs, FORWARD, fp8=fp8),
            input_gradient=product(groups, rows, outputs, inputs, INPUT_GRADIENT, fp8=fp8),
            weight_gradient=product(groups, rows, inputs, outputs, WEIGHT_GRADIENT, fp8=fp8),
        )

    def _rounded(self, inputs: float, outputs: float) -> Times:
        """Operands rounded to fp8 in blocks: inputs for the forward, and along the other side for the weight gradient,
        the output's gradient both ways; 2 bytes are read and 1 is written."""
        if not self.layout.fp8:
            return Times()
        return self.moved(inputs, 3, 3) + self.moved(outputs, 0, 6)

    def _permuted(self, elements: float) -> Times:
        return Times(
            forward=self.kernels.moved(elements * 4, "permute_fwd"),
            input_gradient=self.kernels.moved(elements * 4, "permute_bwd"),
        )

    def _exchanged(self, local: int, routed: int) -> Times:
        layout, cluster = self.layout, self.links.cluster
        if layout.expert == 1:
            return Times()
        group = Group.strided(layout.expert, 1, cluster.gpus_per_node)
        rows = float(routed)
        if group.num_nodes > 1 and layout.node_limit is not None:
            # A token crosses to each of its nodes once, and is handed on inside of it.
            rows = local * min(routed / local, float(layout.node_limit))
        width = self.model.hidden_size
        dispatch = self.links.collective(ALL_TO_ALL, rows * width * (1 if layout.fp8 else BF16), group)
        combine = self.links.collective(ALL_TO_ALL, rows * width * BF16, group)
        return Times(forward_expert=dispatch + combine, backward_expert=dispatch + combine)

    def embedding(self) -> Times:
        """A look-up, and its gradient added up."""
        found = self.moved(self.local_elements, 4, 8)
        if self.model.position == "learned":
            found += self.moved(self.local_elements, 6, 4)
        if self.layout.dropout:
            found += self.moved(self.local_elements, 5, 5)
        group = Group.strided(self.layout.tensor, 1, self.links.cluster.gpus_per_node)
        size = self.layout.tokens * self.model.hidden_size * BF16
        once = self.links.collective(
            REDUCE_SCATTER if self.layout.sequence_parallel else ALL_REDUCE, size, group
        )
        return found + Times(forward_tensor=once)

    def head(self) -> Times:
        """The last norm, the product with the vocabulary, and the loss, which reads logits in fp32 where not
        fused.
        """
        layout = self.layout
        columns = layout.padded_vocab // layout.tensor
        logits = layout.tokens * columns
        found = self.norm() + self.linear(self.model.hidden_size, columns)
        loss = "ce_fusion" if layout.fused else "ce"
        found += Times(
            forward=self.kernels.moved(logits * (4 if layout.fused else 22), loss),
            input_gradient=self.kernels.moved(logits * (4 if layout.fused else 12), loss),
        )
        region = self.tensor_region()
        return found + Times(
            forward_tensor=region.forward_tensor / 2, backward_tensor=region.backward_tensor / 2
        )
