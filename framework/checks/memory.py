"""What a rank holds between steps, counted and observed, and how much of it a schedule costs over another."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from counterflow.framework.checks.dry_run import held_by
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.memory.activations import saved_bytes
from counterflow.framework.memory.live import LiveBytes, Peak, alive_tensors
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import seed_everything
from counterflow.framework.trainer.process_group import process_group
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import train_step
from counterflow.parallel.pipeline.analysis.simulate import peak_live


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank after a step.

    parameters, gradients, optimizer: bytes that stay between steps. experts: the part of their sum that experts
    are. host, disk: bytes of optimizer and masters that are in memory of the host beside a GPU, and in a file; no other
    figure counts them. observed: bytes of every tensor that is alive then, to hold the count against.
    peak_live_activations: micro-batches held at once during the step, and the simulator's figure for it.
    peak_held_weight_grad_bytes: kept for deferred weight gradients. activations, expected_activations: most bytes that
    autograd kept at once for backwards, and the cost model's figure (see framework/memory/recompute.py); what the
    backward
    half of an overlapped pair runs again is not seen by the first, and with offloading nothing that is run again.
    peak: the most bytes of tensors alive in the step after it, and what they were for.
    """

    parameters: int
    gradients: int
    optimizer: int
    experts: int
    host: int
    disk: int
    observed: int
    peak_live_activations: int
    simulated_peak_activations: int
    peak_held_weight_grad_bytes: int
    activations: int
    expected_activations: int
    peak: Peak

    @property
    def persistent(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def live_tensor_bytes(device: torch.device) -> int:
    """Bytes of the distinct storages of all tensors alive in this process on `device`."""
    gc.collect()
    storages = (tensor.untyped_storage() for tensor in alive_tensors(device))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(config: TrainConfig, run: RunContext, device: torch.device) -> RankMemory:
    """Train one step in the layout of `config` and report this rank's memory; every rank calls this."""
    seed_everything(config.seed, deterministic=config.is_deterministic(device.type))
    before = live_tensor_bytes(device)
    with build(config, run.data, device) as assembly:
        return _measured(config, assembly, device, before)


def _measured(config: TrainConfig, assembly: Assembly, device: torch.device, before: int) -> RankMemory:
    with saved_bytes(nn.ModuleList(assembly.modules)) as meter:
        outcome = train_step(assembly, 0)
    expected = assembly.workload.peak_activation_bytes(assembly.schedule)
    held = assembly.optimizer.persistent_bytes()
    offloader = assembly.runtime.offloader
    kept = 0 if assembly.undo is None else assembly.undo.num_bytes
    mine = outcome.ranks[assembly.mesh.rank]
    observed = live_tensor_bytes(device)
    simulated, _ = peak_live(assembly.schedule.actions[assembly.mesh.coordinate.pipeline])
    return RankMemory(
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=held.optimizer + kept,
        experts=assembly.optimizer.persistent_bytes(experts_only=True).total,
        host=held.host,
        disk=held.disk,
        # Moments in a file are tensors as well, mapped.
        observed=observed - before - (held.disk if device.type == "cpu" else 0),
        peak_live_activations=int(mine.peak_live_activations),
        simulated_peak_activations=simulated,
        peak_held_weight_grad_bytes=sum(
            stage.weight_grads.peak_held_bytes for stage in assembly.runtime.stages.values()
        ),
        activations=meter.peak if offloader is None else offloader.report.peak_bytes,
        expected_activations=expected[assembly.mesh.coordinate.pipeline],
        peak=measured_peak(assembly),
    )


def measured_peak(assembly: Assembly) -> Peak:
    """The peak of this rank in one more step, counted as the dry run does (framework/checks/dry_run.py)."""
    gc.collect()
    with LiveBytes(held_by(assembly)) as live:
        assembly.runtime.observe = live.mark
        try:
            train_step(assembly, 1)
        finally:
            assembly.runtime.observe = None
    return live.peak


def run_memory_rank(config: TrainConfig, run: RunContext, local_rank: int) -> RankMemory:
    """Entry of each rank; the environment describes the process group."""
    with process_group(config, local_rank) as device:
        return measure(config, run, device)


def to_mapping(ranks: list[RankMemory]) -> list[dict[str, Any]]:
    """Plain values, one entry a rank."""
    return [{**asdict(rank), "persistent": rank.persistent} for rank in ranks]
