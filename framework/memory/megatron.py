"""The peak of a step of Megatron-LM, by its own conventions: what that program allocates on a rank, before it runs.

A second mode of the estimate, for layouts that are compared with Megatron-LM or moved from it. It is that program's
distributed optimizer (ZeRO-1) in bf16 with fp32 main gradients, sequence parallelism wherever there is tensor
parallelism, a fused attention kernel, fused RoPE, SwiGLU and cross entropy (TransformerEngine's), tokens exchanged by
all-to-all in even shares, expert weights not cut over the tensor axis, and neither recomputation nor overlapped
communication. Each term is read off what the program's modules save and allocate (megatron_layers.py); nothing is
fitted to a measurement. The result is what torch.cuda.max_memory_allocated reports from the second step on.

Between actions a rank holds weights, gradients, optimizer state, buffers that are never freed, and what micro-batches
under way have saved; the peak is the largest moment within an action on top. A step of the optimizer needs less: it
reduces gradients, updates masters and gathers weights in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.framework.memory.megatron_layers import (
    BF16,
    FP32,
    MegatronLayout,
    Moment,
    Weight,
    embedding_moment,
    layer_moments,
    loss_moment,
    other_parameters,
    saved_by_attention,
    saved_by_final_norm,
    saved_by_mlp,
    weights_of,
)
from counterflow.models.config import ModelConfig
from counterflow.parallel.pipeline.ir.action import Kind, Schedule

__all__ = ["MegatronLayout", "MegatronMemory", "megatron_memory"]

# An fp32 master and two fp32 moments.
OPTIMIZER_BYTES = 3 * FP32
# What TransformerEngine and torch each give cuBLAS from Hopper on; grouped products run on 4 streams, with one each.
GEMM_WORKSPACE_BYTES = 32 * 2**20
GROUPED_GEMM_STREAMS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronMemory:
    """Bytes alive together on a rank at its peak, by part, and when that is.

    weights: bf16. gradients: fp32, whole. optimizer: the rank's share of fp32 masters and moments, experts' over
    experts' replicas. dummy_gradients: see `_dummy_bytes`. workspaces: of matrix products, and the buffer in which the
    head gathers its input. activations: what micro-batches under way have saved for their backwards. loss: logits.
    exchanged: tokens on their way to experts and back. transient: what the moment of the peak needs besides.
    peak_action, peak_moment: the schedule's action, and where in the model it is.
    """

    weights: int
    gradients: int
    optimizer: int
    dummy_gradients: int
    workspaces: int
    activations: int
    loss: int
    exchanged: int
    transient: int
    peak_action: str
    peak_moment: str

    @property
    def peak(self) -> int:
        persistent = self.weights + self.gradients + self.optimizer + self.dummy_gradients + self.workspaces
        return persistent + self.activations + self.loss + self.exchanged + self.transient


def megatron_memory(
    model: ModelConfig, layout: MegatronLayout, schedule: Schedule
) -> tuple[MegatronMemory, ...]:
    """The peak of each pipeline rank; ranks that differ in another axis alone are equal.

    schedule: compute actions. Stages have equal numbers of layers, the first the embedding, the last the head.

    Raises ValueError: where Megatron-LM could not run the layout, or the model has what is not counted here.
    """
    _check_model(model)
    _check_layout(model, layout, schedule)
    stages = [_stage(model, layout, index, schedule.num_stages) for index in range(schedule.num_stages)]
    return tuple(
        _rank_memory(model, layout, schedule, rank, [stages[index] for index in schedule.stages_of(rank)])
        for rank in range(schedule.num_ranks)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage on one rank. replicated, experts: parameters. linears: shapes of its matrices. saved: by a micro-batch
    after its forward. forward, backward: the largest moment of either."""

    index: int
    last: bool
    replicated: int
    experts: int
    linears: frozenset[tuple[int, int]]
    saved: int
    forward: Moment
    backward: Moment


def _stage(model: ModelConfig, layout: MegatronLayout, index: int, num_stages: int) -> _Stage:
    size = model.num_layers // num_stages
    layers = range(index * size, (index + 1) * size)
    first, last = index == 0, index == num_stages - 1
    table = Weight(layout.vocab_rows, model.hidden_size)
    weights = [weight for layer in layers for weight in weights_of(model, layout, layer)]
    replicated = sum(weight.elements for weight in weights if not weight.is_expert)
    replicated += sum(other_parameters(model, layer) for layer in layers)
    if first:
        replicated += table.elements
    if last:
        replicated += model.hidden_size
        # A tied head is the embedding itself where both are on one stage, and else a copy of it.
        replicated += 0 if first and model.tie_embeddings else table.elements
    saved = 0
    forwards: list[Moment] = []
    backwards = [embedding_moment(model, layout)] if first else []
    for layer in layers:
        forward, *backward = layer_moments(model, layout, layer, saved)
        forwards.append(forward)
        backwards.extend(backward)
        saved += saved_by_attention(model, layout) + saved_by_mlp(model, layout, layer)
    if last:
        saved += saved_by_final_norm(model, layout)
        backwards.append(loss_moment(model, layout, saved))
    return _Stage(
        index=index,
        last=last,
        replicated=replicated,
        experts=sum(weight.elements for weight in weights if weight.is_expert),
        linears=frozenset((weight.rows, weight.columns) for weight in [*weights, *([table] if last else [])]),
        saved=saved,
        forward=max(forwards, key=lambda moment: moment.total),
        backward=max(backwards, key=lambda moment: moment.total),
    )


def _rank_memory(
    model: ModelConfig, layout: MegatronLayout, schedule: Schedule, rank: int, stages: list[_Stage]
) -> MegatronMemory:
    replicated = sum(stage.replicated for stage in stages)
    experts = sum(stage.experts for stage in stages)
    owned = -(-replicated // layout.data_parallel_size) + -(-experts // layout.num_expert_replicas)
    others, action, moment = _largest_moment(stages, schedule, rank)
    return MegatronMemory(
        weights=BF16 * (replicated + experts),
        gradients=FP32 * (replicated + experts),
        optimizer=OPTIMIZER_BYTES * owned,
        dummy_gradients=_dummy_bytes(stages),
        workspaces=_workspace_bytes(model, layout, stages),
        activations=others + moment.saved,
        loss=moment.loss,
        exchanged=moment.exchanged,
        transient=moment.transient,
        peak_action=action,
        peak_moment=moment.name,
    )


def _largest_moment(stages: list[_Stage], schedule: Schedule, rank: int) -> tuple[int, str, Moment]:
    """What other micro-batches have saved, the action, and its moment: where the two are the most together."""
    by_index = {stage.index: stage for stage in stages}
    alive = 0
    found = (0, "", Moment("", 0))
    for action in schedule.actions[rank]:
        stage = by_index[action.stage]
        is_forward = action.kind is Kind.F
        others = alive if is_forward else alive - stage.saved
        moment = stage.forward if is_forward else stage.backward
        if others + moment.total > found[0] + found[2].total:
            found = (others, str(action), moment)
        alive = others + (stage.saved if is_forward else 0)
    return found


def _dummy_bytes(stages: list[_Stage]) -> int:
    """The product that computes a weight gradient adds it to the fp32 buffer. Autograd is given a tensor that nobody
    reads, so that its hooks run: one in bf16 for each shape of matrix, made at the first backward and kept for good."""
    shapes = frozenset[tuple[int, int]]().union(*(stage.linears for stage in stages))
    return BF16 * sum(rows * columns for rows, columns in shapes)


def _workspace_bytes(model: ModelConfig, layout: MegatronLayout, stages: list[_Stage]) -> int:
    has_head, has_experts = any(stage.last for stage in stages), any(stage.experts for stage in stages)
    # TransformerEngine has one for its products, torch one for the head's and routers'.
    num_workspaces = 1 + (has_head or has_experts) + (GROUPED_GEMM_STREAMS if has_experts else 0)
    total = num_workspaces * GEMM_WORKSPACE_BYTES
    if has_head and layout.tensor_parallel_size > 1:
        # The head gathers the sequence into a buffer of the process, which is never freed.
        total += BF16 * model.hidden_size * layout.tokens
    return total


def _check_model(model: ModelConfig) -> None:
    for name, value, rule in (
        ("activation", model.activation, "swiglu"),
        ("norm", model.norm, "rms"),
        ("position", model.position, "rope"),
        ("attention_bias", model.attention_bias, False),
        ("mlp_bias", model.mlp_bias, False),
        ("moe.shared_expert_gate", model.moe.shared_expert_gate, False),
        ("mtp.num_modules", model.mtp.num_modules, 0),
    ):
        if value != rule:
            raise ValueError(
                f"model.{name}={value}: Megatron-LM's memory is not counted with it; set model.{name}={rule}"
            )


def _check_layout(model: ModelConfig, layout: MegatronLayout, schedule: Schedule) -> None:
    size, experts = layout.tensor_parallel_size, layout.expert_parallel_size
    if {action.kind for actions in schedule.actions for action in actions} - {Kind.F, Kind.B}:
        raise ValueError(
            f"schedule={schedule.name}: Megatron-LM runs whole backwards, one action at a time; choose 1f1b or "
            "interleaved_1f1b"
        )
    for name, value, what, divisor in (
        ("model.num_layers", model.num_layers, "stages", schedule.num_stages),
        ("data.seq_length", layout.seq_length, "tensor ranks", size),
        ("model.num_heads", model.num_heads, "tensor ranks", size),
        ("model.intermediate_size", model.intermediate_size, "tensor ranks", size),
        ("model.moe.num_experts", model.moe.num_experts, "expert ranks", experts),
        ("data and tensor ranks", layout.data_parallel_size * size, "expert ranks", experts),
    ):
        if value % divisor:
            raise ValueError(
                f"{name}={value}: Megatron-LM shares them out evenly over {divisor} {what}; make it a multiple"
            )
    if not model.uses_mla and model.num_kv_heads % size and size % model.num_kv_heads:
        raise ValueError(
            f"model.num_kv_heads={model.num_kv_heads}: Megatron-LM shares them out evenly over {size} tensor ranks, or "
            "each to equally many of them; make one a multiple of the other"
        )
    if experts > 1 and not model.moe.num_experts:
        raise ValueError(f"parallel.expert_parallel_size={experts}: the model has no experts; set it to 1")
