"""The bytes of a configured run that its schedule moves: messages between stages, parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.memory.recompute import BYTES_PER_ELEMENT, recompute_shares
from counterflow.framework.planning.workload import Workload
from counterflow.models.cost import embedding_parameters, layer_parameters, model_cost, stage_parameters
from counterflow.models.partition import partition
from counterflow.parallel.pipeline.analysis.costs import Costs, at, costs_from
from counterflow.parallel.pipeline.ir.action import Kind, Schedule
from counterflow.parallel.zero.blocks import gathers
from counterflow.parallel.zero.config import ZeroConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Whole sizes on one tensor-parallel rank, by stage: parameters as they are gathered, gradients as reduced.

    Without routed experts, which are replicated over other ranks (the axis `expert_data` of a record).
    blocks: of each stage the parameters of its blocks, in the order of a forward; has_embedding: whether the first of
    them is the embedding, whose backward needs none. A head that MTP modules come back to is counted once.
    """

    parameters: tuple[float, ...]
    gradients: tuple[float, ...]
    blocks: tuple[tuple[float, ...], ...]
    has_embedding: tuple[bool, ...]

    def gathered(self, zero: ZeroConfig) -> Callable[[int, int, Sequence[Kind]], float] | None:
        """What ZeRO-3 gathers on a rank of a stage from an UNSHARD to its RESHARD; None: all of it, once."""
        if not (zero.stage == 3 and zero.has_block_units):
            return None

        def of(rank: int, stage: int, passes: Sequence[Kind]) -> float:
            sizes = self.blocks[stage]
            reads = [index > 0 or not self.has_embedding[stage] for index in range(len(sizes))]
            found = gathers(
                [kind is not Kind.F for kind in passes],
                reads,
                prefetch=zero.prefetch_units,
                reshard_after=zero.reshard_after_of(rank),
            )
            return sum(sizes[block] for block in found)

        return of


def schedule_costs(workload: Workload, schedule: Schedule) -> Costs:
    """The configured costs of `schedule`, with what the run recomputes.

    schedule.costs.recompute stands where it is set, and a profile has measured it; else a stage's is the part of its
    forward that is run again, by FLOPs.
    Raises ValueError: where costs, or the model where it is recomputed, do not fit the schedule.
    """
    config = workload.config
    costs = costs_from(config.schedule.costs, schedule.num_stages)
    is_given = config.schedule.costs.profile is not None or config.schedule.costs.recompute != 0.0
    if config.recompute.mode == "none" or is_given:
        return costs
    shares = recompute_shares(
        config, schedule.num_stages, workload.recompute_plan, vocab_size=workload.vocab_size
    )
    again = tuple(share * at(costs.forward, stage) for stage, share in enumerate(shares))
    return replace(costs, recompute=again)


def message_bytes(config: TrainConfig) -> int:
    """Of the activation of one micro-batch between two stages, [B, S, H], or [B, S/tp, H] with sequence parallelism.

    As it travels: see comm.pipeline_payload.
    """
    num_rows = config.data.micro_batch_size * config.data.seq_length
    if config.parallel.sequence_parallel:
        num_rows //= config.parallel.tensor_parallel_size
    row_bytes = config.model.hidden_size * BYTES_PER_ELEMENT[config.precision.compute]
    if config.comm.pipeline_payload == "bf16":
        row_bytes = min(row_bytes, 2 * config.model.hidden_size)
    elif config.comm.pipeline_payload == "fp8":
        # Here, for it needs torch, and what does not train starts without.
        from counterflow.parallel.pipeline.runtime.payload import fp8_row_bytes

        row_bytes = min(row_bytes, fp8_row_bytes(config.model.hidden_size))
    return num_rows * row_bytes


def stage_bytes(config: TrainConfig, num_stages: int) -> StageBytes | None:
    """None where the model has fewer layers than it has to have for so many stages.

    The vocabulary is the model's or, before the data is prepared, what the tokenizer is asked for. Parameters that
    every tensor-parallel rank has whole (norms) are counted as cut.
    """
    vocab_size = config.expected_vocab_size
    try:
        slices = partition(config.model, num_stages, seq_length=config.data.seq_length, vocab_size=vocab_size)
    except ValueError:
        return None
    cost = model_cost(config.model, seq_length=config.data.seq_length, vocab_size=vocab_size)
    experts = [run.routed_experts for run in cost.layers for _ in range(run.count)]
    counts: list[float] = []
    blocks: list[list[float]] = []
    for cut in slices:
        whole = stage_parameters(
            config.model, cut.layers, first=cut.first, last=cut.last, vocab_size=vocab_size
        )
        indices = (*cut.layers, *(range(config.model.num_layers, len(experts)) if cut.last else ()))
        routed = sum(experts[index] for index in indices)
        counts.append((whole - routed) / config.parallel.tensor_parallel_size)
        layers = [layer_parameters(config.model, index) - experts[index] for index in indices]
        first = embedding_parameters(config.model, vocab_size) if cut.first else 0
        ends = [first] if cut.first else []
        last = [whole - routed - first - sum(layers)] if cut.last else []
        count = len(cut.layers)
        order = [*ends, *layers[:count], *last, *layers[count:]]
        blocks.append([size / config.parallel.tensor_parallel_size for size in order])
    size = BYTES_PER_ELEMENT[config.precision.compute]
    return StageBytes(
        parameters=tuple(count * size for count in counts),
        gradients=tuple(count * BYTES_PER_ELEMENT[config.precision.reduce] for count in counts),
        blocks=tuple(tuple(each * size for each in of_stage) for of_stage in blocks),
        has_embedding=tuple(cut.first for cut in slices),
    )
