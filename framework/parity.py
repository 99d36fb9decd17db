"""Parity: the same model, data and seed in a layout and in one process, and how far they drift apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.build import Assembly, build, start_process_group
from framework.checkpoint.box import TensorBox, shard_boxes
from framework.checkpoint.storage import load, save
from framework.config import TrainConfig
from framework.lr import learning_rate
from framework.run import RunContext
from framework.train import forward_backward, seed_everything
from parallel.collectives import all_reduce
from parallel.mesh import MeshConfig
from parallel.pipeline.config import ScheduleConfig
from parallel.pipeline.trace import Recorder
from parallel.zero_config import ZeroConfig

NUM_STEPS = 5
# Loss and gradients in fp32, DESIGN's bound: rounding in another order, nothing more.
FP32_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The largest relative differences to one process.

    loss_rel: over the steps, |a - b| / |b|. grad_rel: of the last step's gradients before clipping; param_rel:
    of the parameters after it; for each tensor |a - b| / |b| in the Euclidean norm, then the largest tensor's. (Not
    the largest element: Adam divides by the root of a running square, so an element whose gradient is next to
    zero turns rounding into a step of ordinary size.)
    worst_grad, worst_param: the names of those tensors.
    """

    loss_rel: float
    grad_rel: float
    param_rel: float
    worst_grad: str
    worst_param: str
    num_steps: int

    @property
    def holds(self) -> bool:
        """Loss and gradients within `FP32_TOLERANCE`."""
        return self.loss_rel <= FP32_TOLERANCE and self.grad_rel <= FP32_TOLERANCE


def reference_config(config: TrainConfig) -> TrainConfig:
    """`config` in one process: the same global batches, cut into micro-batches of the same size."""
    num_microbatches = config.schedule.num_microbatches * config.parallel.data_parallel_size
    return replace(
        config,
        parallel=MeshConfig(),
        zero=ZeroConfig(),
        schedule=ScheduleConfig(name="1f1b", num_microbatches=num_microbatches),
    )


def train_and_save(config: TrainConfig, run: RunContext, folder: Path, device: torch.device) -> list[float]:
    """Train `NUM_STEPS` steps and write gradients and parameters to `folder`; the loss of each step.

    torch.distributed is initialised; every rank of the layout calls this.
    """
    assembly, losses = _train(config, run, device)
    save(folder, _boxes(assembly), {}, group=assembly.mesh.world)
    return losses


def train_and_compare(
    config: TrainConfig, run: RunContext, folder: Path, losses: list[float], device: torch.device
) -> Parity:
    """Train the reference of `config` in this one process and compare it to what a layout wrote to `folder`."""
    assembly, own_losses = _train(reference_config(config), run, device)
    own = {box.name: box.tensor for box in _boxes(assembly)}
    theirs = [
        TensorBox(
            name=box.name,
            global_shape=box.global_shape,
            offsets=box.offsets,
            tensor=torch.empty_like(box.tensor),
        )
        for box in _boxes(assembly)
    ]
    load(folder, theirs, group=assembly.mesh.world)
    found = {box.name: box.tensor for box in theirs}
    worst_grad, grad_rel = _worst("gradient.", own, found)
    worst_param, param_rel = _worst("model.", own, found)
    return Parity(
        loss_rel=max(abs(a - b) / abs(b) for a, b in zip(losses, own_losses, strict=True)),
        grad_rel=grad_rel,
        param_rel=param_rel,
        worst_grad=worst_grad,
        worst_param=worst_param,
        num_steps=NUM_STEPS,
    )


def run_layout_rank(config: TrainConfig, run: RunContext, local_rank: int, folder: Path) -> list[float]:
    """Entry of each rank of the layout; the environment describes the process group."""
    device = start_process_group(config, local_rank)
    try:
        return train_and_save(config, run, folder, device)
    finally:
        dist.destroy_process_group()


def run_reference_rank(
    config: TrainConfig, run: RunContext, local_rank: int, folder: Path, losses: list[float]
) -> Parity:
    """Entry of the one reference process."""
    device = start_process_group(config, local_rank)
    try:
        return train_and_compare(config, run, folder, losses, device)
    finally:
        dist.destroy_process_group()


def _train(config: TrainConfig, run: RunContext, device: torch.device) -> tuple[Assembly, list[float]]:
    """The assembly after `NUM_STEPS` steps, the last step's gradients still unclipped in its fragments."""
    seed_everything(config.seed, deterministic=config.deterministic)
    assembly = build(config, run.data, device)
    losses: list[float] = []
    gradients: list[Tensor] = []
    for step in range(NUM_STEPS):
        part = forward_backward(assembly, step, Recorder(device))
        loss = torch.tensor(part, dtype=torch.float64, device=device)
        all_reduce(loss, assembly.axes.world)
        losses.append(float(loss))
        rate = learning_rate(
            config.optimizer.lr_schedule,
            step,
            NUM_STEPS,
            config.optimizer.base_lr,
            config.parallel.data_parallel_size,
        )
        gradients = [owned.fragment.grad.clone() for owned in assembly.optimizer.owned]
        assembly.optimizer.step(rate)
    for owned, gradient in zip(assembly.optimizer.owned, gradients, strict=True):
        owned.fragment.grad.copy_(gradient)
    return assembly, losses


def _boxes(assembly: Assembly) -> list[TensorBox]:
    boxes: list[TensorBox] = []
    for owned in assembly.optimizer.owned:
        slot = owned.fragment.slot
        name = slot.placement.tied_to or slot.name
        for key, flat in (("model", owned.fragment.master), ("gradient", owned.fragment.grad)):
            boxes += shard_boxes(f"{key}.{name}", flat, owned.fragment.start, slot.shape, slot.placement)
    return boxes


def _worst(prefix: str, own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[str, float]:
    differences = {
        name: relative_difference(theirs[name], tensor)
        for name, tensor in own.items()
        if name.startswith(prefix)
    }
    name = max(differences, key=lambda key: (math.isnan(differences[key]), differences[key]))
    return name.removeprefix(prefix), differences[name]


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| in the Euclidean norm; the plain difference where the reference is zero."""
    scale = float(torch.linalg.vector_norm(reference, dtype=torch.float64))
    difference = float(torch.linalg.vector_norm(value - reference, dtype=torch.float64))
    return difference if scale == 0.0 else difference / scale


def to_mapping(parity: Parity) -> dict[str, Any]:
    """Plain values, as printed by `counterflow parity --json`."""
    return {
        "loss_rel": parity.loss_rel,
        "grad_rel": parity.grad_rel,
        "param_rel": parity.param_rel,
        "worst_grad": parity.worst_grad,
        "worst_param": parity.worst_param,
        "num_steps": parity.num_steps,
        "tolerance": FP32_TOLERANCE,
        "holds": parity.holds,
    }
