"""Experts that move between ranks during training, with their optimizer state, as the recorded loads ask for.

Every rank has the same record of what the routers did, so each decides by itself and all decide alike; copies of a
layer on mirrored or data-parallel ranks make the same moves. What moves are the fp32 masters and the optimizer's
moments, as they are; routers go on choosing by global index. A step computes the same before and after but for
the order in which rows are added up. A copy of an expert is made the same way, from the nearest that there is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from counterflow.framework.experts.config import BalanceConfig
from counterflow.framework.experts.routing import moe_layers
from counterflow.framework.metrics.record import BalanceRecord, MoERecord
from counterflow.parallel.collectives import all_reduce, all_to_all_into
from counterflow.parallel.expert.exchange import even_placement
from counterflow.parallel.expert.placement import (
    ExpertLayout,
    ExpertsByRank,
    aligned,
    imbalance,
    improve,
    place_experts,
)
from counterflow.parallel.expert.relocate import Holding, plan_moves
from counterflow.parallel.mesh import Mesh, expert_ranks, expert_replica_ranks

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig
    from counterflow.framework.trainer.assembly import Assembly


def is_due(config: TrainConfig, step: int) -> bool:
    """Whether experts move after `step`, counted from 0; after the last only for a run that goes on from there."""
    interval, done = config.balance.interval_steps, step + 1
    is_used = done < config.training.num_steps or config.checkpoint.enabled
    return interval > 0 and done % interval == 0 and is_used


def initial_placement(config: BalanceConfig, *, num_experts: int, ep_size: int) -> ExpertsByRank:
    """Where the experts of every layer are before any has moved."""
    return even_placement(num_experts, ep_size, config.spare_slots, config.num_nodes)


def next_placement(
    loads: list[float], before: ExpertsByRank, config: BalanceConfig, num_groups: int
) -> ExpertsByRank:
    """Where the experts of a layer are to be, from the loads of an interval; `before` where nothing better is found."""
    imbalance_before = imbalance(loads, before)
    if imbalance_before <= config.goal:
        return before
    if config.policy == "swap":
        after = improve(
            loads, before, num_nodes=config.num_nodes, goal=config.goal, most_swaps=config.max_swaps
        )
    else:
        layout = ExpertLayout(
            num_experts=len(loads),
            num_ranks=len(before),
            num_slots=len(before[0]),
            num_nodes=config.num_nodes,
            num_groups=num_groups,
        )
        after = aligned(place_experts([loads], layout)[0], before, num_nodes=config.num_nodes)
    return after if imbalance(loads, after) < imbalance_before else before


class Balancer:
    """Where the experts of every layer of the model are, and the loads since they last moved."""

    def __init__(self, config: BalanceConfig, *, num_experts: int, num_groups: int, ep_size: int) -> None:
        self._config, self._num_groups = config, num_groups
        self._initial = initial_placement(config, num_experts=num_experts, ep_size=ep_size)
        self._placements: dict[int, ExpertsByRank] = {}
        self._loads: dict[int, list[float]] = {}

    def placement(self, layer: int) -> ExpertsByRank:
        return self._placements.get(layer, self._initial)

    def observe(self, routing: MoERecord) -> BalanceRecord:
        """Take the loads of a step, of before any later move; its record."""
        for each in routing.layers:
            sums = self._loads.setdefault(each.layer, [0.0] * len(each.load))
            self._loads[each.layer] = [a + b for a, b in zip(sums, each.load, strict=True)]
        return BalanceRecord(
            rank_imbalance=tuple(
                imbalance(each.load, self.placement(each.layer))
                if each.rank_load is None
                else max(each.rank_load) * len(each.rank_load)
                for each in routing.layers
            )
        )

    def rebalance(self, assembly: Assembly, record: BalanceRecord) -> BalanceRecord:
        """Move experts as the loads since the last time ask for; `record` with what was done. All ranks call this."""
        begin = time.perf_counter()
        before = {layer: self.placement(layer) for layer in sorted(self._loads)}
        after = {
            layer: next_placement(self._loads[layer], placed, self._config, self._num_groups)
            for layer, placed in before.items()
        }
        changed = [layer for layer in before if after[layer] != before[layer]]
        sent_bytes = torch.zeros((), dtype=torch.float64, device=assembly.device)
        for layer in changed:
            sent_bytes += _move(assembly, layer, before[layer], after[layer])
        if changed:
            self._place(assembly, {layer: after[layer] for layer in changed})
            for unit in (unit for stage in assembly.stages.values() for unit in stage.units):
                if unit.has_experts:
                    unit.publish()
            all_reduce(sent_bytes, assembly.axes.world)
        moved = replace(
            record,
            interval_before=_mean_imbalance(self._loads, before),
            interval_after=_mean_imbalance(self._loads, after),
            num_moved=sum(_num_moved(before[layer], after[layer]) for layer in changed),
            moved_bytes=int(sent_bytes),
            move_s=time.perf_counter() - begin,
        )
        self._loads.clear()
        return moved

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint: placements and loads by layer."""
        return {
            "placements": {str(layer): placed for layer, placed in self._placements.items()},
            "loads": {str(layer): loads for layer, loads in self._loads.items()},
        }

    def restore(self, state: Mapping[str, Any], assembly: Assembly) -> None:
        """Go on from `state`, before parameters are loaded; where ranks or slots are other ones, experts start anew."""
        self._loads = {int(layer): list(loads) for layer, loads in state["loads"].items()}
        placements = {
            int(layer): tuple(tuple(experts) for experts in placed)
            for layer, placed in state["placements"].items()
        }
        sizes = [len(experts) for experts in self._initial]
        if all([len(experts) for experts in placed] == sizes for placed in placements.values()):
            self._place(assembly, placements)

    def _place(self, assembly: Assembly, placements: Mapping[int, ExpertsByRank]) -> None:
        self._placements.update(placements)
        for layer in moe_layers(assembly.modules):
            if layer.layer in placements:
                layer.place_experts(placements[layer.layer])
        assembly.optimizer.read_placements()


@torch.no_grad()
def _move(assembly: Assembly, layer: int, before: ExpertsByRank, after: ExpertsByRank) -> int:
    """Bring masters and moments of a layer's experts to their new slots; the bytes that left this rank.

    Group: all ranks of the job, of which those without the layer send nothing.
    """
    world = assembly.axes.world
    sends: list[list[Tensor]] = [[] for _ in range(world.size)]
    receives: list[list[Tensor]] = [[] for _ in range(world.size)]
    for columns, first, expert_numel, holdings in _stacks(assembly, layer):
        for move in plan_moves(before, after, holdings, expert_numel):
            if move.source == world.rank:
                start = move.source_start - first
                sends[move.target] += [column[start : start + move.length] for column in columns]
            if move.target == world.rank:
                start = move.target_start - first
                receives[move.source] += [column[start : start + move.length] for column in columns]
    outgoing, incoming = (
        [sum(tensor.nbytes for tensor in tensors) for tensors in parts] for parts in (sends, receives)
    )
    empty = torch.empty(0, dtype=torch.uint8, device=assembly.device)
    leaving = torch.cat([empty, *(tensor.view(torch.uint8) for tensors in sends for tensor in tensors)])
    arriving = torch.empty(sum(incoming), dtype=torch.uint8, device=assembly.device)
    all_to_all_into(arriving, leaving, world, output_splits=incoming, input_splits=outgoing)
    position = 0
    for tensor in (tensor for tensors in receives for tensor in tensors):
        tensor.view(torch.uint8).copy_(arriving[position : position + tensor.nbytes])
        position += tensor.nbytes
    return sum(outgoing) - outgoing[world.rank]


def _stacks(assembly: Assembly, layer: int) -> Iterator[tuple[list[Tensor], int, int, dict[int, Holding]]]:
    """Each flat stack of experts of a layer: what this rank has of it, and who has what.

    Yields the columns (master and moments, of the elements that are here), the index of their first element in the
    stack, the elements of an expert, and every rank's holding. Nothing on a rank that has no such layer.
    """
    weights = {
        id(weight)
        for module in moe_layers(assembly.modules)
        if module.layer == layer
        for weight in module.experts.parameters()
    }
    peers = _peers(assembly.mesh, mirrored=assembly.schedule.num_directions > 1) if weights else {}
    for unit in (unit for stage in assembly.stages.values() for unit in stage.units):
        for slot, parameter in zip(unit.slots, unit.parameters.values(), strict=True):
            if id(parameter) not in weights:
                continue
            holdings: dict[int, Holding] = {}
            for rank, (ep_rank, axis, replica_rank) in peers.items():
                start, stop = unit.owned_range(replica_rank)
                holdings[rank] = Holding(
                    ep_rank=ep_rank,
                    axis=axis,
                    start=max(start, slot.start) - slot.start,
                    stop=min(stop, slot.stop) - slot.start,
                )
            columns: list[Tensor] = []
            first = 0
            for owned in assembly.optimizer.owned:
                if owned.unit is unit and owned.fragment.slot.name == slot.name:
                    states = [owned.state[name] for name in sorted(owned.state)]
                    columns, first = [owned.fragment.master, *states], owned.fragment.start
            yield columns, first, (slot.stop - slot.start) // slot.shape[0], holdings


def _peers(mesh: Mesh, *, mirrored: bool) -> dict[int, tuple[int, int, int]]:
    """The ranks that hold this rank's stages: their expert rank, expert axis and index along the expert replicas."""
    config = mesh.config
    found: dict[int, tuple[int, int, int]] = {}
    pipeline = {
        config.coordinate_of(rank).pipeline
        for rank in expert_replica_ranks(config, mesh.coordinate, mirrored=mirrored)
    }
    for rank in range(config.world_size):
        coordinate = config.coordinate_of(rank)
        if coordinate.pipeline in pipeline:
            replicas = expert_replica_ranks(config, coordinate, mirrored=mirrored)
            axis = expert_ranks(config, coordinate)[0]
            found[rank] = (config.expert_rank_of(rank), axis, replicas.index(rank))
    return found


def _num_moved(before: ExpertsByRank, after: ExpertsByRank) -> int:
    """Experts that are on another rank than before."""
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def _mean_imbalance(loads: Mapping[int, list[float]], placements: Mapping[int, ExpertsByRank]) -> float:
    values = [imbalance(loads[layer], placed) for layer, placed in placements.items()]
    return sum(values) / len(values) if values else 1.0
