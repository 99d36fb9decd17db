"""Peak memory of a rank over a schedule: parameters, gradients and optimizer, and activations by what is under way.

What a micro-batch keeps of a stage lives from its forward to its weight gradient. With a fused attention the bytes
are those of models/cost.py; without one the formulas of Korthikanti et al. (arXiv 2205.05198, table 2) count scores
too.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.framework.planning.kernels import BF16
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.stages import Stages
from counterflow.models.config import ModelConfig
from counterflow.models.cost import activation_bytes_per_layer
from counterflow.parallel.pipeline.ir.action import Kind, Schedule

# An fp32 master and two fp32 moments.
OPTIMIZER_STATE_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on a rank. activations: at the moment when they are the most. transient: of the largest moment of an
    action.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


def layer_bytes(model: ModelConfig, layout: Layout, layer: int) -> float:
    """What a micro-batch keeps of a layer."""
    tensor, tokens, hidden = layout.tensor, layout.tokens, model.hidden_size
    if layout.flash:
        parts: frozenset[str] = frozenset({"block"}) if layout.recompute == "full" else frozenset()
        found = activation_bytes_per_layer(
            model,
            num_tokens=tokens,
            layer=layer,
            tensor_parallel_size=tensor,
            sequence_parallel=layout.sequence_parallel,
            expert_parallel_size=layout.expert,
            recomputed=parts,  # pyright: ignore[reportArgumentType]
        )
        if layout.recompute == "norms":
            found -= _repeated_bytes(model, layout)
        if layout.fp8 and layout.recompute != "full" and model.is_moe_layer(layer):
            found -= _rounded_bytes(model, layout)
        return found
    if layout.recompute == "full":
        return BF16 * tokens * hidden
    spread = 34 / tensor if layout.sequence_parallel else 10 + 24 / tensor
    if layout.recompute != "selective":
        spread += 5 * model.num_heads * layout.seq_length / (hidden * tensor)
    return tokens * hidden * spread


def _repeated_bytes(model: ModelConfig, layout: Layout) -> float:
    """What need not be kept where norms, and projections up from latents, are computed again."""
    tokens = layout.tokens
    found = 2 * BF16 * tokens * model.hidden_size
    if model.uses_mla:
        mla, heads = model.mla, model.num_heads // layout.tensor
        width = 2 * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) + mla.v_head_dim
        found += BF16 * tokens * heads * width
    return found / (layout.tensor if layout.sequence_parallel else 1)


def _rounded_bytes(model: ModelConfig, layout: Layout) -> float:
    """What experts keep less in fp8: their inputs and those of SwiGLU in one byte, and its result not at all
    (DeepSeek-V3, arXiv 2412.19437, section 3.3.3)."""
    local = layout.tokens // (layout.tensor if layout.sequence_parallel else 1)
    routed = local * model.moe.num_experts_per_token
    return routed * (
        model.hidden_size + 2 * model.expert_intermediate_size + BF16 * model.expert_intermediate_size
    )


def stage_bytes(model: ModelConfig, layout: Layout, layers: range, *, first: bool, last: bool) -> float:
    """What a micro-batch keeps of a stage."""
    found = sum(layer_bytes(model, layout, layer) for layer in layers)
    cut = layout.tensor if layout.sequence_parallel else 1
    once = BF16 * layout.tokens * model.hidden_size / cut
    if first:
        found += once / 2 * (1 if layout.dropout else 0) + 8 * layout.tokens
    if last:
        found += 2 * once + _logit_bytes(layout) * (1 + model.mtp.num_modules)
        found += model.mtp.num_modules * layer_bytes(model, layout, model.num_layers - 1)
    return found


def _logit_bytes(layout: Layout) -> float:
    """Logits in fp32; a fused or chunked loss keeps none."""
    return 0.0 if layout.fused else 4 * layout.tokens * layout.padded_vocab / layout.tensor


def rank_memories(
    model: ModelConfig, layout: Layout, schedule: Schedule, stages: Stages
) -> tuple[RankMemory, ...]:
    """Of every pipeline rank."""
    last = schedule.num_stages - 1
    kept = [
        stage_bytes(model, layout, layers, first=index == 0, last=index == last)
        for index, layers in enumerate(stages.layers)
    ]
    replicas = max(1, layout.data * layout.tensor // layout.expert)
    found: list[RankMemory] = []
    for rank in range(schedule.num_ranks):
        held = [stages.parameters[index] for index in schedule.stages_of(rank)]
        dense, experts = sum(each.dense for each in held), sum(each.experts for each in held)
        whole = dense + experts
        owned = dense / layout.data + experts / replicas
        level = layout.zero_stage
        mirror = 2 if len(schedule.placement) > 1 else 1  # a copy's states are shared with its mirror
        layer = max((layer_bytes(model, layout, index) for index in range(model.num_layers)), default=0.0)
        found.append(
            RankMemory(
                weights=BF16 * (owned if level == 3 else whole),
                gradients=layout.gradient_bytes * (owned if level >= 2 else whole),
                optimizer=OPTIMIZER_STATE_BYTES * (owned if level >= 1 else whole) / mirror,
                activations=_most_alive(schedule, rank, kept),
                transient=_transient(model, layout) + (layer if layout.recompute == "full" else 0.0),
            )
        )
    return tuple(found)


def _transient(model: ModelConfig, layout: Layout) -> float:
    """The gradient of a layer's widest tensor while it is made."""
    width = max(model.hidden_size, model.intermediate_size // layout.tensor)
    return 2 * BF16 * layout.tokens * width


def _most_alive(schedule: Schedule, rank: int, kept: list[float]) -> float:
    alive = most = 0.0
    splits = any(leaf.kind is Kind.W for action in schedule.actions[rank] for leaf in action.leaves)
    weights = {
        (leaf.stage, leaf.microbatch)
        for action in (schedule.actions[rank] if splits else ())
        for leaf in action.leaves
        if leaf.kind is Kind.W
    }
    for action in schedule.actions[rank]:
        for leaf in action.leaves:
            if leaf.kind is Kind.F:
                alive += kept[leaf.stage]
        most = max(most, alive)
        for leaf in action.leaves:
            ends = leaf.kind in (Kind.B, Kind.W)
            if ends or (leaf.kind is Kind.I and (leaf.stage, leaf.microbatch) not in weights):
                alive -= kept[leaf.stage]
    return most
