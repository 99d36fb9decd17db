"""Stages of a model under a layout: what the simulator's actions cost, and what a rank holds of parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from counterflow.framework.planning.cluster import Cluster
from counterflow.framework.planning.kernels import BF16, Efficiencies, Kernels, ModelledKernels, efficiencies
from counterflow.framework.planning.layers import LayerModel, Times
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.links import Links
from counterflow.framework.planning.measured import measured_kernels
from counterflow.models.config import ModelConfig
from counterflow.models.cost import stage_parameters
from counterflow.parallel.pipeline.analysis.cost_profile import Link
from counterflow.parallel.pipeline.analysis.costs import Costs, at
from counterflow.parallel.pipeline.ir.action import Schedule

# Of a device's processors, those that DeepSeek-V3 gives to the exchange of tokens while it computes: 20 of 132
# (arXiv 2412.19437, section 3.2.2).
COMMUNICATION_SHARE = 20 / 132
# Of a forward of an unfused layer: four products and two of attention, seven times adding a bias or transposing, two
# norms, softmax, three dropouts, GELU, two residuals, and what slices, views made whole and checkpoints add. A
# backward has twice as many, of them a quarter for weights.
KERNELS_PER_LAYER = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Of a stage on one rank. dense: replicated over data ranks; experts: routed ones, over the rest of them."""

    dense: float
    experts: float

    @property
    def whole(self) -> float:
        return self.dense + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Every stage in order. costs: of the schedule's actions."""

    times: tuple[Times, ...]
    layers: tuple[range, ...]
    parameters: tuple[Parameters, ...]
    costs: Costs


def machinery(cluster: Cluster, share: Efficiencies | None = None) -> tuple[Kernels, Links]:
    """Kernels and links of `cluster`: measured where its device was, and else by the calibrated efficiencies."""
    if cluster.device.measured:
        kernels = measured_kernels(cluster.device)
        # The links of a node with all of its devices in use.
        within = next(iter(reversed([name for name in kernels.network if name != "inter_node"])))
        return kernels, Links(
            cluster=cluster, share=Efficiencies(gemm=1.0), measured=kernels.network[within]["op"]
        )
    share = efficiencies(cluster.device.calibrated) if share is None else share
    return ModelledKernels(device=cluster.device, share=share), Links(cluster=cluster, share=share)


def layer_ranges(model: ModelConfig, layout: Layout, num_stages: int) -> tuple[range, ...]:
    """Layers of each stage: those of the layout, or as equal numbers as there can be, the larger ones in the middle.

    Raises ValueError: numbers that do not add up.
    """
    sizes = layout.layers_per_stage
    if not sizes:
        size, more = divmod(model.num_layers, num_stages)
        # The ends have the embedding and the head besides.
        first = (num_stages - more + 1) // 2
        sizes = tuple(size + (first <= index < first + more) for index in range(num_stages))
    if len(sizes) != num_stages or sum(sizes) != model.num_layers:
        raise ValueError(
            f"layers_per_stage={list(sizes)}: {len(sizes)} stages with {sum(sizes)} layers, and the schedule has "
            f"{num_stages} stages and the model {model.num_layers} layers; give one number for each stage"
        )
    starts = [sum(sizes[:index]) for index in range(num_stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def stages_of(
    model: ModelConfig, layout: Layout, schedule: Schedule, kernels: Kernels, links: Links
) -> Stages:
    """The stages of `schedule`, and what its actions cost."""
    layers = layer_ranges(model, layout, schedule.num_stages)
    build = LayerModel(model=model, layout=layout, kernels=kernels, links=links)
    last = schedule.num_stages - 1
    of_kind: dict[bool, Times] = {}
    times: list[Times] = []
    for stage, its in enumerate(layers):
        found = build.embedding() if stage == 0 else Times()
        for index in its:
            kind = model.is_moe_layer(index)
            if kind not in of_kind:
                of_kind[kind] = build.layer(index)
            found += of_kind[kind]
        if stage == last:
            head = build.head()
            found += head
            for _ in range(model.mtp.num_modules):
                joined = build.linear(2 * model.hidden_size, model.hidden_size)
                found += build.layer(model.num_layers - 1) + head + joined
        times.append(found)
    costs = _costs(layout, times, model.hidden_size, links)
    if links.share.host_s:
        costs = _launched(costs, layout, [len(its) for its in layers], links.share.host_s)
    return Stages(
        times=tuple(times),
        layers=layers,
        parameters=tuple(
            _parameters(model, layout, its, first=index == 0, last=index == last)
            for index, its in enumerate(layers)
        ),
        costs=costs,
    )


def recomputed(times: Times, layout: Layout) -> float:
    """Seconds of a backward that run parts of the forward again."""
    if layout.recompute == "full":
        return times.forward + times.forward_tensor + times.forward_expert
    if layout.recompute == "selective":
        return times.selective
    return times.norms if layout.recompute == "norms" else 0.0


def _hidden_in_pair(times: Times, again: float) -> float:
    """Of a forward and a backward, what their pair saves: each one's exchange travels under the other's computation,
    which meanwhile has the processors that are left."""
    exchange = times.forward_expert + times.backward_expert
    if not exchange:
        return 0.0
    computation = times.forward + times.input_gradient + times.weight_gradient + again
    pair = max(computation / (1 - COMMUNICATION_SHARE), exchange)
    return max(0.0, computation + exchange - pair)


def _costs(layout: Layout, times: list[Times], hidden_size: int, links: Links) -> Costs:
    forward = tuple(each.forward + each.forward_tensor + each.forward_expert for each in times)
    backward = tuple(
        each.input_gradient + each.exposed_tensor(layout.overlap_tensor) + each.backward_expert
        for each in times
    )
    weights = tuple(each.weight_gradient for each in times)
    hidden = sum(_hidden_in_pair(each, recomputed(each, layout)) for each in times)
    shorter = sum(min(one, two + three) for one, two, three in zip(forward, backward, weights, strict=True))
    cluster = links.cluster
    size = layout.tokens * hidden_size * BF16
    same_node_stages = max(1, cluster.gpus_per_node // (layout.tensor * layout.data))
    within = Link(latency_s=cluster.intra_latency_s, bandwidth_bytes_per_s=links.intra_bytes_per_s)
    share = layout.tensor if layout.scatter_messages or layout.sequence_parallel else 1
    between = Link(
        latency_s=cluster.inter_latency_s,
        bandwidth_bytes_per_s=links.inter_bytes_per_s,
    )
    return Costs(
        forward=forward,
        input_gradient=backward,
        weight_gradient=weights,
        recompute=tuple(recomputed(each, layout) for each in times),
        pair_overlap=hidden / shorter if hidden else 0.0,
        latency_s=within.latency_s,
        bandwidth_bytes_per_s=within.bandwidth_bytes_per_s,
        message_bytes=size / share,
        ranks_per_node=same_node_stages,
        between_nodes=between,
    )


def _launched(costs: Costs, layout: Layout, num_layers: list[int], host_s: float) -> Costs:
    """No action ends before the host has launched its kernels: small layers wait for it."""
    floors = [count * KERNELS_PER_LAYER * host_s for count in num_layers]

    def at_least(name: str, times: float) -> tuple[float, ...]:
        return tuple(
            max(at(getattr(costs, name), stage), times * floor) if at(getattr(costs, name), stage) else 0.0
            for stage, floor in enumerate(floors)
        )

    weights = at_least("weight_gradient", 0.5)
    gradients = tuple(
        max(at(costs.input_gradient, stage), 2 * floor - weight)
        for stage, (floor, weight) in enumerate(zip(floors, weights, strict=True))
    )
    return replace(
        costs,
        forward=at_least("forward", 1.0),
        recompute=at_least("recompute", 1.0) if layout.recompute == "full" else costs.recompute,
        input_gradient=gradients,
        weight_gradient=weights,
    )


def _parameters(model: ModelConfig, layout: Layout, layers: range, *, first: bool, last: bool) -> Parameters:
    vocab = layout.padded_vocab
    whole = stage_parameters(model, layers, first=first, last=last, vocab_size=vocab)
    routed = 0.0
    if model.moe.num_experts:
        per_layer = 3 * model.hidden_size * model.expert_intermediate_size * model.moe.num_experts
        routed = per_layer * sum(model.is_moe_layer(index) for index in layers)
        if last and model.mtp.num_modules:
            routed += per_layer * model.mtp.num_modules
    return Parameters(dense=(whole - routed) / layout.tensor, experts=routed / layout.expert)
