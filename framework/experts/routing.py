"""Mixture-of-experts layers around a training step: what their routers count, report and learn.

A step calls, on every rank:

    begin_step(modules, num_valid_tokens)      before its first forward
    ...                                        all micro-batches, forward and backward
    record = finish_step(modules, config, ..)  after its last backward, before the next step

`modules` are the stages of this rank, both of them where a schedule gives it two; a rank without a layer of experts
takes part too. Evaluation, which is forward only, changes nothing that matters here.

Each token is routed by exactly one rank, so a sum over the world is one over the global batch, whatever the layout,
and every copy of a layer makes the same update from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from counterflow.framework.metrics.record import MoERecord, RoutingRecord
from counterflow.models.config import ModelConfig
from counterflow.models.moe import MoE
from counterflow.models.router import SUMS, updated_bias
from counterflow.parallel.collectives import Axis, all_reduce


def moe_layers(modules: Iterable[nn.Module]) -> list[MoE]:
    """The layers of experts in `modules`, in the order of the model."""
    found = [layer for module in modules for layer in module.modules() if isinstance(layer, MoE)]
    return sorted(found, key=lambda layer: layer.layer)


def begin_step(modules: Iterable[nn.Module], num_valid_tokens: int, loss_scale: float = 1.0) -> None:
    """Start counting anew, and tell the layers what their auxiliary losses are normalised by.

    num_valid_tokens: of the global batch, which the main loss is divided by. loss_scale: what the main loss is
    multiplied with for its backward.
    """
    for layer in moe_layers(modules):
        layer.router.state.begin_step(loss_scale / num_valid_tokens)


@torch.no_grad()
def finish_step(
    modules: Iterable[nn.Module],
    config: ModelConfig,
    *,
    world: Axis,
    expert_parallel_size: int = 1,
    has_copies: bool = False,
    device: torch.device | str = "cpu",
) -> MoERecord:
    """Sum what the routers counted over all ranks and update their biases and fractions; the record of all layers.

    has_copies: some experts are on several ranks, so what ranks have to do does not follow from the loads.
    It is the same on every rank. Group: `world`, all ranks of the job; one all-reduce.
    """
    layers = moe_layers(modules)
    num_experts, num_layers = config.moe.num_experts, config.num_layers + config.mtp.num_modules
    width = num_experts + len(SUMS) + 3
    # fp64 holds counts of up to 2^53 exactly.
    sizes = (num_layers * width, expert_parallel_size**2, has_copies * num_layers * expert_parallel_size)
    table = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    flat_rows, flat_links, flat_pairs = table.split(sizes)
    rows = flat_rows.view(num_layers, width)
    links = flat_links.view(expert_parallel_size, expert_parallel_size)
    pairs = flat_pairs.view(-1, expert_parallel_size)
    for layer in layers:
        state, ep_rank = layer.router.state, layer.expert_parallel.axis.rank
        numbers = torch.tensor([state.num_tokens, sum(state.link_bytes)], device=device)
        rows[layer.layer] += torch.cat((state.load, state.sums, state.num_dropped.view(1), numbers))
        links[ep_rank] += torch.tensor(state.link_bytes, device=device)
        if has_copies:
            pairs[layer.layer] += state.rank_pairs
    all_reduce(table, world)
    values: list[float] = table.tolist()  # at once: the host waits for the device here
    by_layer, by_link, by_pair = (
        [part[start : start + size] for start in range(0, len(part), size)]
        for part, size in (
            (values[: sizes[0]], width),
            (values[sizes[0] : sizes[0] + sizes[1]], expert_parallel_size),
            (values[sizes[0] + sizes[1] :], expert_parallel_size),
        )
    )
    for layer in layers:
        load, state = rows[layer.layer, :num_experts], layer.router.state
        if sum(by_layer[layer.layer][:num_experts]) > 0:
            state.fractions.copy_(load / load.sum())
            if config.moe.bias_update_speed:
                state.bias.copy_(updated_bias(state.bias, load, config.moe.bias_update_speed))
    counted = enumerate(zip(by_layer, by_pair if has_copies else [None] * num_layers, strict=True))
    return MoERecord(
        layers=tuple(
            _routing(index, counts, config, by_rank) for index, (counts, by_rank) in counted if counts[-2] > 0
        ),
        link_bytes=tuple(tuple(map(int, row)) for row in by_link),
    )


def _routing(
    layer: int, values: Sequence[float], config: ModelConfig, rank_pairs: Sequence[float] | None
) -> RoutingRecord:
    moe = config.moe
    load = values[: moe.num_experts]
    sums = dict(zip(SUMS, values[moe.num_experts :], strict=False))
    num_dropped, num_tokens, sent_bytes = values[moe.num_experts + len(SUMS) :]
    total = sum(load)
    losses = {name: sums[name] / num_tokens if getattr(moe, name) else None for name in SUMS[1:]}
    return RoutingRecord(
        layer=layer,
        load=tuple(round(each / total, 6) for each in load),
        imbalance=max(load) * len(load) / total,
        entropy=sums["entropy"] / num_tokens,
        num_dropped=int(num_dropped),
        sent_bytes=int(sent_bytes),
        rank_load=None
        if rank_pairs is None
        else tuple(round(each / sum(rank_pairs), 6) for each in rank_pairs),
        **losses,
    )


def routing_state(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """What a checkpoint keeps of the routers, fp32 [E] each, by `layers.{index}.router.bias` and `..fractions`.

    Every copy of a layer has the same. The tensors are the live ones.
    """
    found: dict[str, Tensor] = {}
    for layer in moe_layers(modules):
        state = layer.router.state
        found |= {_name(layer, "bias"): state.bias, _name(layer, "fractions"): state.fractions}
    return found


def _name(layer: MoE, what: str) -> str:
    return f"layers.{layer.layer}.router.{what}"
