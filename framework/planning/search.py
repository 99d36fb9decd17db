"""Searches the layout of a training run: every candidate within the rules, ranked by its simulated throughput.

Candidates are bounded from above first: no bubble, no exposed communication between stages or of data ranks. They are
simulated from the best bound on, until no bound beats the layouts found. A long step is simulated with fewer
micro-batches at two lengths and continued at the rate between them, which is exact once a schedule has come to its
steady part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from counterflow.framework.planning.cluster import Cluster
from counterflow.framework.planning.kernels import Kernels
from counterflow.framework.planning.layers import LayerModel
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.links import Links
from counterflow.framework.planning.memory import RankMemory, layer_bytes, rank_memories
from counterflow.framework.planning.stages import machinery, recomputed, stages_of
from counterflow.framework.planning.step import StepEstimate, schedule_of, simulate_step
from counterflow.models.config import ModelConfig
from counterflow.models.cost import model_cost
from counterflow.models.partition import partition
from counterflow.parallel.pipeline.schedules.registry import generated_schedules

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipe", "dualpipe_v")
# Of a device's memory, what is left to the allocator's fragments, NCCL and the context.
MEMORY_MARGIN = 0.08
# Most micro-batches that are simulated of a step, by pipeline ranks.
LONGEST = 6
NUM_NEARLY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for. global_batch: sequences of a step. budget: most layouts that are simulated."""

    model: ModelConfig
    cluster: Cluster
    seq_length: int
    vocab_size: int
    global_batch: int
    fp8: bool = False
    budget: int = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout that fits, its step, and the memory of its fullest rank."""

    layout: Layout
    step: StepEstimate
    memory: RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """plans: the best first. nearly: layouts with good bounds that memory excludes by the least, with the
    bytes they need.

    num_candidates: within the rules; num_simulated: of them.
    """

    plans: tuple[Plan, ...]
    nearly: tuple[tuple[Layout, float], ...]
    num_candidates: int
    num_simulated: int


def search(request: Request, *, keep: int = 10, progress: Callable[[int, int], None] | None = None) -> Search:
    """The `keep` best layouts.

    Raises ValueError: where no layout follows the rules, or none fits into memory.
    """
    kernels, links = machinery(request.cluster)
    bound = _Bounds(request, kernels, links)
    candidates = sorted(
        ((bound.seconds(layout), layout) for layout in layouts(request)), key=lambda each: each[0]
    )
    if not candidates:
        raise ValueError(
            f"{request.cluster.num_gpus} devices and a global batch of {request.global_batch} sequences: no layout "
            f"shares them out over {request.model.name}; choose sizes with more common factors"
        )
    usable = request.cluster.device.memory_bytes * (1 - MEMORY_MARGIN)
    plans: list[Plan] = []
    nearly: list[tuple[Layout, float]] = []
    num_simulated = 0
    for seconds, layout in candidates:
        if (
            len(plans) >= keep and seconds >= plans[keep - 1].step.seconds
        ) or num_simulated >= request.budget:
            break
        if bound.least_bytes(layout) > usable:
            continue
        num_simulated += 1
        if progress is not None:
            progress(num_simulated, min(request.budget, len(candidates)))
        try:
            plan = evaluate(request, layout, usable)
        except ValueError:  # sizes that the schedule does not take
            continue
        if not isinstance(plan, Plan):
            nearly.append((layout, plan))
            continue
        plans = sorted([*plans, plan], key=lambda each: each.step.seconds)
    if not plans:
        raise ValueError(
            f"cluster={request.cluster.name}: no layout of {request.model.name} fits into "
            f"{usable / 2**30:.0f} GiB of a device; take more devices, a smaller batch of a step, or shorter sequences"
        )
    return Search(
        plans=tuple(plans[:keep]),
        nearly=tuple(sorted(nearly, key=lambda each: each[1])[:NUM_NEARLY]),
        num_candidates=len(candidates),
        num_simulated=num_simulated,
    )


def layouts(request: Request) -> Iterator[Layout]:
    """Every layout within the rules: tensor ranks within a node, sizes that divide, experts over the ranks of a
    stage.
    """
    model, gpus = request.model, request.cluster.num_gpus
    ends = model.num_layers + 2
    for tensor in _divisors(min(request.cluster.gpus_per_node, gpus)):
        if model.num_heads % tensor or (not model.uses_mla and model.num_kv_heads % tensor):
            continue
        for pipeline in (each for each in _divisors(gpus // tensor) if each <= ends):
            data = gpus // (tensor * pipeline)
            for micro in (1, 2, 4, 8):
                if request.global_batch % (data * micro):
                    continue
                for expert in _expert_sizes(model, data * tensor):
                    base = Layout(
                        tensor=tensor,
                        pipeline=pipeline,
                        data=data,
                        expert=expert,
                        seq_length=request.seq_length,
                        vocab_size=request.vocab_size,
                        micro_batch_size=micro,
                        num_microbatches=request.global_batch // (data * micro),
                        sequence_parallel=tensor > 1,
                        overlap_tensor=tensor > 1,
                        overlap_data=True,
                        overlap_pipeline=True,
                        fp8=request.fp8,
                        zero_stage=1 if pipeline > 1 else 3,
                        node_limit=model.moe.num_groups_per_token if model.moe.num_groups > 1 else None,
                    )
                    yield from _schedules(request, base)


def _schedules(request: Request, base: Layout) -> Iterator[Layout]:
    names = SCHEDULES if base.pipeline > 1 else ("1f1b",)
    for name in names:
        definition = generated_schedules()[name]
        try:
            definition.validate(base.pipeline, base.num_microbatches)
        except ValueError:
            continue
        num_stages = base.pipeline * definition.num_chunks
        if (sizes := _cut(request.model, num_stages, request.seq_length, request.vocab_size)) is None:
            continue
        for recompute in ("none", "full"):
            yield replace(
                base,
                schedule=name,
                num_chunks=definition.num_chunks,
                layers_per_stage=sizes,
                recompute=recompute,
            )


@lru_cache(maxsize=256)
def _cut(model: ModelConfig, num_stages: int, seq_length: int, vocab_size: int) -> tuple[int, ...] | None:
    """Layers of each stage as training cuts them; None: there are too few."""
    try:
        slices = partition(model, num_stages, seq_length=seq_length, vocab_size=vocab_size)
    except ValueError:
        return None
    return tuple(len(each.layers) for each in slices)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _expert_sizes(model: ModelConfig, ranks: int) -> tuple[int, ...]:
    if not model.moe.num_experts:
        return (1,)
    return tuple(each for each in _divisors(model.moe.num_experts) if ranks % each == 0)


def evaluate(request: Request, layout: Layout, usable: float) -> Plan | float:
    """The step of `layout`, and the memory of its fullest rank; that memory alone where it is above `usable`.

    Raises ValueError: where the schedule does not take the sizes.
    """
    model, cluster = request.model, request.cluster
    ranks = max(2, layout.pipeline)
    is_long = layout.num_microbatches > LONGEST * ranks
    # Even numbers, and multiples of the ranks, which every schedule takes.
    shown = replace(layout, num_microbatches=(LONGEST - 2) * ranks) if is_long else layout
    schedule = schedule_of(shown)
    kernels, links = machinery(cluster)
    stages = stages_of(model, shown, schedule, kernels, links)
    memory = max(rank_memories(model, shown, schedule, stages), key=lambda each: each.peak)
    if memory.peak > usable:
        return memory.peak
    step, *_ = simulate_step(model, shown, cluster)
    if is_long:
        shorter = replace(layout, num_microbatches=(LONGEST - 4) * ranks)
        before, *_ = simulate_step(model, shorter, cluster)
        more = (layout.num_microbatches - shown.num_microbatches) / (
            shown.num_microbatches - shorter.num_microbatches
        )
        step = _continued(before, step, more, layout)
    return Plan(layout=layout, step=step, memory=memory)


def _continued(shorter: StepEstimate, longer: StepEstimate, more: float, layout: Layout) -> StepEstimate:
    """The step of a schedule that goes on as it did between the two."""
    pipeline = longer.pipeline_s + more * (longer.pipeline_s - shorter.pipeline_s)
    idle = longer.bubble_makespan * longer.pipeline_s
    idle += more * (idle - shorter.bubble_makespan * shorter.pipeline_s)
    factor = layout.step_tokens / longer.tokens
    return replace(
        longer,
        seconds=longer.seconds - longer.pipeline_s + pipeline,
        pipeline_s=pipeline,
        bubble_makespan=max(0.0, idle / pipeline),
        bubble_span=max(0.0, idle / pipeline),
        tokens=layout.step_tokens,
        model_flops=longer.model_flops * factor,
        causal_flops=longer.causal_flops * factor,
    )


class _Bounds:
    """What no layout of these sizes can do better."""

    def __init__(self, request: Request, kernels: Kernels, links: Links) -> None:
        self._request, self._kernels, self._links = request, kernels, links
        self._known: dict[tuple[object, ...], float] = {}
        cost = model_cost(request.model, seq_length=request.seq_length, vocab_size=request.vocab_size)
        routed = sum(run.routed_experts * run.count for run in cost.layers)
        self._dense, self._experts = cost.parameters - routed, float(routed)

    def seconds(self, layout: Layout) -> float:
        """All of a step's computation, shared out evenly, with what no schedule hides."""
        key = (layout.tensor, layout.expert, layout.micro_batch_size, layout.recompute)
        if key not in self._known:
            self._known[key] = self._of_microbatch(layout)
        return self._known[key] * layout.num_microbatches / layout.pipeline

    def _of_microbatch(self, layout: Layout) -> float:
        model = self._request.model
        build = LayerModel(model=model, layout=layout, kernels=self._kernels, links=self._links)
        counts = {
            kind: sum(model.is_moe_layer(index) == kind for index in range(model.num_layers))
            for kind in (0, 1)
        }
        total = 0.0
        for kind, count in counts.items():
            if count:
                times = build.layer(model.num_layers - 1 if kind else 0)
                total += count * (
                    times.forward
                    + times.input_gradient
                    + times.weight_gradient
                    + times.forward_tensor
                    + times.exposed_tensor(True)
                    + recomputed(times, layout)
                    - (times.forward_expert if layout.recompute == "full" else 0.0)
                )
        return total

    def least_bytes(self, layout: Layout) -> float:
        """Weights, gradients and optimizer of an even share, and activations: in every schedule the fullest rank
        holds as many micro-batches of its stages as there are ranks, which together are the model's once."""
        key = (layout.tensor, layout.expert, layout.micro_batch_size, layout.recompute, "bytes")
        if key not in self._known:
            layers = range(self._request.model.num_layers)
            self._known[key] = sum(layer_bytes(self._request.model, layout, index) for index in layers)
        # Of an uneven cut the fullest rank may have a little less.
        kept = 0.9 * self._known[key] * min(1.0, layout.num_microbatches / layout.pipeline)
        copies = 2 if layout.schedule == "dualpipe" else 1
        dense = self._dense / (layout.tensor * layout.pipeline)
        experts = self._experts / (layout.expert * layout.pipeline)
        if layout.zero_stage == 3:
            return kept
        owned = dense / layout.data + experts * layout.expert / (layout.data * layout.tensor)
        return (2 + layout.gradient_bytes) * copies * (dense + experts) + 12 * owned + kept


def overrides_of(layout: Layout) -> tuple[str, ...]:
    """The words of `counterflow train` that run `layout`, but for the model's."""
    found = [
        f"parallel.tensor_parallel_size={layout.tensor}",
        f"parallel.pipeline_parallel_size={layout.pipeline}",
        f"parallel.data_parallel_size={layout.data}",
        f"parallel.expert_parallel_size={layout.expert}",
        f"schedule={layout.schedule}",
        f"schedule.num_microbatches={layout.num_microbatches}",
        f"data.micro_batch_size={layout.micro_batch_size}",
        f"data.seq_length={layout.seq_length}",
        f"zero.stage={layout.zero_stage}",
        f"recompute.mode={layout.recompute}",
        "precision=bf16",
    ]
    return tuple(found)
