"""The time of a training step: the executed schedule simulated with the times of stages, and what comes before and
after.

A step is the schedule's makespan, the reduction of gradients over data ranks and the gathers of weights as far as
nothing hides them, and the optimizer. Figures with a definition of their own (MFU, throughput, bubble) say which one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from counterflow.framework.planning.cluster import Cluster
from counterflow.framework.planning.kernels import BF16, Efficiencies, Kernels
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.links import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Group, Links
from counterflow.framework.planning.stages import Parameters, Stages, machinery, stages_of
from counterflow.models.config import ModelConfig
from counterflow.models.cost import model_cost
from counterflow.parallel.pipeline.analysis.simulate import Simulation, simulate
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.schedules.registry import generate

# Bytes that an AdamW step with fp32 masters moves for each parameter that a rank owns: gradients made fp32 and
# scaled (8), their norm (4), their clipping (8), masters and two moments read and written with the gradient read
# (28), and weights written back (6).
OPTIMIZER_BYTES = 54


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """A predicted step, in seconds.

    pipeline_s: makespan of the schedule, or its longest span. reduction_s, gather_s: of the data axis, exposed.
    optimizer_s: of the rank with the most parameters. bubble_makespan, bubble_span: see `Simulation`. tokens_per_s:
    of all devices together. model_flops: of a step, attention counted whole and MTP modules not; `mfu` with
    attention's causal half is `mfu_causal`.
    """

    seconds: float
    pipeline_s: float
    reduction_s: float
    gather_s: float
    optimizer_s: float
    bubble_makespan: float
    bubble_span: float
    num_gpus: int
    tokens: int
    model_flops: float
    causal_flops: float
    peak_flops: float
    dollars_per_gpu_hour: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self.model_flops / (self.seconds * self.num_gpus * self.peak_flops)

    @property
    def mfu_causal(self) -> float:
        return self.causal_flops / (self.seconds * self.num_gpus * self.peak_flops)

    def gpu_hours(self, tokens: float) -> float:
        """Of a training run of so many tokens."""
        return tokens / self.tokens_per_s * self.num_gpus / 3600

    def dollars(self, tokens: float) -> float:
        return self.gpu_hours(tokens) * self.dollars_per_gpu_hour


@lru_cache(maxsize=64)
def executed_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None) -> Schedule:
    """The schedule of compute actions that the runtime executes."""
    return generate(name, num_ranks, num_microbatches, num_chunks=num_chunks)


def schedule_of(layout: Layout) -> Schedule:
    """Of `layout`; interleaved_1f1b takes its chunks, other schedules have their own number."""
    if layout.schedule == "interleaved_1f1b":
        return executed_schedule(layout.schedule, layout.pipeline, layout.num_microbatches, layout.num_chunks)
    # Both directions of two-copy DualPipe are one number of micro-batches.
    return executed_schedule(layout.schedule, layout.pipeline, layout.num_microbatches, None)


def estimate_step(
    model: ModelConfig, layout: Layout, cluster: Cluster, share: Efficiencies | None = None
) -> StepEstimate:
    """`simulate_step`, without its simulation. share: in place of the calibrated efficiencies."""
    return simulate_step(model, layout, cluster, share)[0]


def simulate_step(
    model: ModelConfig, layout: Layout, cluster: Cluster, share: Efficiencies | None = None
) -> tuple[StepEstimate, Simulation, Stages]:
    """The step, its timeline, and its stages.

    Raises ValueError: where the layout has other numbers of ranks, or the schedule does not fit it.
    """
    kernels, links = machinery(cluster, share)
    schedule = schedule_of(layout)
    stages = stages_of(model, layout, schedule, kernels, links)
    costs = stages.costs
    if layout.overlap_pipeline:
        costs = replace(costs, message_bytes=0.0)
    simulation = simulate(schedule, costs)
    pipeline = max(simulation.span) if layout.post_validation else simulation.makespan
    held = [
        _together([stages.parameters[index] for index in schedule.stages_of(rank)])
        for rank in range(schedule.num_ranks)
    ]
    reduction, gather = max(
        (_data_axis(layout, rank, links, simulation.makespan) for rank in held), key=sum, default=(0.0, 0.0)
    )
    reduction += _tied_embedding(model, layout, links)
    optimizer = max(_optimizer(layout, rank, kernels) for rank in held)
    flops = {
        halved: model_cost(
            model, seq_length=layout.seq_length, vocab_size=layout.vocab_size, causal_halved=halved
        ).without_mtp.training_flops_per_token
        * layout.step_tokens
        for halved in (False, True)
    }
    return (
        StepEstimate(
            seconds=pipeline + reduction + gather + optimizer,
            pipeline_s=pipeline,
            reduction_s=reduction,
            gather_s=gather,
            optimizer_s=optimizer,
            bubble_makespan=simulation.bubble_makespan,
            bubble_span=simulation.bubble_span,
            num_gpus=layout.num_gpus,
            tokens=layout.step_tokens,
            model_flops=flops[False],
            causal_flops=flops[True],
            peak_flops=cluster.device.bf16_flops,
            dollars_per_gpu_hour=cluster.dollars_per_gpu_hour,
        ),
        simulation,
        stages,
    )


def _together(parameters: list[Parameters]) -> Parameters:
    return Parameters(
        dense=sum(each.dense for each in parameters), experts=sum(each.experts for each in parameters)
    )


def _data_axis(layout: Layout, held: Parameters, links: Links, makespan: float) -> tuple[float, float]:
    """Exposed seconds of reducing gradients, and of gathering weights."""
    per_node = links.cluster.gpus_per_node
    dense = Group.strided(layout.data, layout.tensor, per_node)
    replicas = max(1, layout.data * layout.tensor // layout.expert)
    experts = Group.strided(replicas, layout.expert, per_node)
    operation = ALL_REDUCE if layout.zero_stage == 0 else REDUCE_SCATTER
    reduction = links.collective(operation, held.dense * layout.gradient_bytes, dense)
    reduction += links.collective(operation, held.experts * layout.gradient_bytes, experts)
    gather = 0.0
    if layout.zero_stage:
        gather = links.collective(ALL_GATHER, held.dense * BF16, dense)
        gather += links.collective(ALL_GATHER, held.experts * BF16, experts)
        if layout.zero_stage == 3:
            gather *= 2 * layout.num_microbatches
    if layout.overlap_data:
        # Under the last backward and the first forward: what a micro-batch's share of the makespan hides.
        window = makespan / layout.num_microbatches
        if layout.zero_stage == 3:
            window = makespan
        reduction, gather = max(0.0, reduction - window * 2 / 3), max(0.0, gather - window / 3)
    return reduction, gather


def _tied_embedding(model: ModelConfig, layout: Layout, links: Links) -> float:
    """The first and the last stage add up the gradients of an embedding that they share."""
    if layout.pipeline == 1 or not model.tie_embeddings:
        return 0.0
    size = layout.padded_vocab * model.hidden_size * layout.gradient_bytes / layout.tensor
    return links.collective(ALL_REDUCE, size, Group(size=2, per_node=1))


def _optimizer(layout: Layout, held: Parameters, kernels: Kernels) -> float:
    replicas = max(1, layout.data * layout.tensor // layout.expert)
    owned = held.whole if layout.zero_stage == 0 else held.dense / layout.data + held.experts / replicas
    return kernels.moved(owned * OPTIMIZER_BYTES)
