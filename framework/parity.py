"""Parity: the same model, data and seed in a layout and in one process, and how far they drift apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.assembly import Assembly
from framework.balance_config import BalanceConfig
from framework.build import build, start_process_group
from framework.checkpoint.box import TensorBox, shard_boxes
from framework.checkpoint.storage import load, save
from framework.config import TrainConfig
from framework.run import RunContext
from framework.step import forward_backward, learning_rate_of
from framework.train import seed_everything
from models.recompute import RecomputeConfig
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
    worst_grad, worst_param: the names of those tensors. norm_rel: of the norm that gradients are clipped by, over the
    steps; further_loss_rel: of the loss of MTP modules, None without. different_routing: the first step and layer whose
    experts had other loads, as `step 3, layer 1`; None where all are equal, or there are no experts.
    """

    loss_rel: float
    further_loss_rel: float | None
    norm_rel: float
    grad_rel: float
    param_rel: float
    worst_grad: str
    worst_param: str
    num_steps: int
    num_routed_layers: int
    different_routing: str | None

    @property
    def holds(self) -> bool:
        """Losses, norms and gradients within `FP32_TOLERANCE`, and every token routed alike."""
        numbers = (self.loss_rel, self.further_loss_rel or 0.0, self.norm_rel, self.grad_rel)
        return all(number <= FP32_TOLERANCE for number in numbers) and self.different_routing is None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrail:
    """What a step left behind, over all ranks.

    loads: by layer of experts, each expert's share of the choices, rounded to a millionth: equal shares are equal
    counts in a global batch of less than 500,000 choices.
    """

    loss: float
    further_loss: float
    norm: float
    loads: dict[int, tuple[float, ...]]


def reference_config(config: TrainConfig) -> TrainConfig:
    """`config` in one process: the same global batches, cut into micro-batches of the same size."""
    data_parallel_size = config.parallel.data_parallel_size
    num_microbatches = config.schedule.num_microbatches * data_parallel_size
    ramp = config.training.batch_ramp
    if ramp.start_num_microbatches is not None:
        ramp = replace(
            ramp,
            start_num_microbatches=ramp.start_num_microbatches * data_parallel_size,
            increment=ramp.increment * data_parallel_size,
        )
    return replace(
        config,
        parallel=MeshConfig(),
        zero=ZeroConfig(),
        recompute=RecomputeConfig(),
        balance=BalanceConfig(),
        schedule=ScheduleConfig(name="1f1b", num_microbatches=num_microbatches),
        training=replace(config.training, batch_ramp=ramp),
    )


def train_and_save(
    config: TrainConfig, run: RunContext, folder: Path, device: torch.device
) -> list[StepTrail]:
    """Train `NUM_STEPS` steps and write gradients and parameters to `folder`; what each step left behind.

    torch.distributed is initialised; every rank of the layout calls this.
    """
    assembly, trail = _train(config, run, device)
    save(folder, _boxes(assembly, every_copy=False), {}, group=assembly.mesh.world)
    return trail


def train_and_compare(
    config: TrainConfig, run: RunContext, folder: Path, trail: list[StepTrail], device: torch.device
) -> Parity:
    """Train the reference of `config` in this one process and compare it to what a layout wrote to `folder`."""
    assembly, own_trail = _train(reference_config(config), run, device)
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
        loss_rel=_largest_relative([each.loss for each in trail], [each.loss for each in own_trail]),
        further_loss_rel=_largest_relative(
            [each.further_loss for each in trail], [each.further_loss for each in own_trail]
        )
        if config.model.mtp.num_modules
        else None,
        norm_rel=_largest_relative([each.norm for each in trail], [each.norm for each in own_trail]),
        grad_rel=grad_rel,
        param_rel=param_rel,
        worst_grad=worst_grad,
        worst_param=worst_param,
        num_steps=NUM_STEPS,
        num_routed_layers=len(own_trail[0].loads),
        different_routing=different_routing(trail, own_trail),
    )


def different_routing(first: Sequence[StepTrail], second: Sequence[StepTrail]) -> str | None:
    """The first step and layer whose experts had other loads in one than in the other."""
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        for layer in sorted(one.loads.keys() | other.loads.keys()):
            if one.loads.get(layer) != other.loads.get(layer):
                return f"step {step}, layer {layer}"
    return None


def run_layout_rank(config: TrainConfig, run: RunContext, local_rank: int, folder: Path) -> list[StepTrail]:
    """Entry of each rank of the layout; the environment describes the process group."""
    device = start_process_group(config, local_rank)
    try:
        return train_and_save(config, run, folder, device)
    finally:
        dist.destroy_process_group()


def run_reference_rank(
    config: TrainConfig, run: RunContext, local_rank: int, folder: Path, trail: list[StepTrail]
) -> Parity:
    """Entry of the one reference process."""
    device = start_process_group(config, local_rank)
    try:
        return train_and_compare(config, run, folder, trail, device)
    finally:
        dist.destroy_process_group()


def _train(config: TrainConfig, run: RunContext, device: torch.device) -> tuple[Assembly, list[StepTrail]]:
    """The assembly after `NUM_STEPS` steps, the last step's gradients still unclipped in its fragments."""
    seed_everything(config.seed, deterministic=config.deterministic)
    assembly = build(config, run.data, device)
    trail: list[StepTrail] = []
    gradients: list[Tensor] = []
    for step in range(NUM_STEPS):
        batch = forward_backward(assembly, step, Recorder(device))
        losses = torch.tensor([batch.loss, batch.further_loss], dtype=torch.float64, device=device)
        all_reduce(losses, assembly.axes.world)
        rate = learning_rate_of(config, step, NUM_STEPS)
        gradients = [owned.fragment.grad.clone() for owned in assembly.optimizer.owned]
        norm = assembly.optimizer.step(rate)
        loads = {} if batch.moe is None else {layer.layer: layer.load for layer in batch.moe.layers}
        trail.append(StepTrail(loss=float(losses[0]), further_loss=float(losses[1]), norm=norm, loads=loads))
    for owned, gradient in zip(assembly.optimizer.owned, gradients, strict=True):
        owned.fragment.grad.copy_(gradient)
    return assembly, trail


def _boxes(assembly: Assembly, *, every_copy: bool = True) -> list[TensorBox]:
    boxes: list[TensorBox] = []
    for owned in assembly.optimizer.owned:
        slot = owned.fragment.slot
        name = slot.placement.tied_to or slot.name
        for key, flat in (("model", owned.fragment.master), ("gradient", owned.fragment.grad)):
            boxes += shard_boxes(
                f"{key}.{name}",
                flat,
                owned.fragment.start,
                slot.shape,
                slot.placement,
                every_copy=every_copy,
            )
    return boxes


def _worst(prefix: str, own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[str, float]:
    differences = {
        name: relative_difference(theirs[name], tensor)
        for name, tensor in own.items()
        if name.startswith(prefix)
    }
    name = max(differences, key=lambda key: (math.isnan(differences[key]), differences[key]))
    return name.removeprefix(prefix), differences[name]


def _largest_relative(values: Sequence[float], references: Sequence[float]) -> float:
    return max(
        relative_difference(
            torch.tensor(value, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
        )
        for value, reference in zip(values, references, strict=True)
    )


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| in the Euclidean norm; the plain difference where the reference is zero."""
    scale = float(torch.linalg.vector_norm(reference, dtype=torch.float64))
    difference = float(torch.linalg.vector_norm(value - reference, dtype=torch.float64))
    return difference if scale == 0.0 else difference / scale


def to_mapping(parity: Parity) -> dict[str, Any]:
    """Plain values, as printed by `counterflow parity --json`."""
    return {
        "loss_rel": parity.loss_rel,
        "further_loss_rel": parity.further_loss_rel,
        "norm_rel": parity.norm_rel,
        "grad_rel": parity.grad_rel,
        "param_rel": parity.param_rel,
        "worst_grad": parity.worst_grad,
        "worst_param": parity.worst_param,
        "num_steps": parity.num_steps,
        "num_routed_layers": parity.num_routed_layers,
        "routing_equal": parity.different_routing is None,
        "different_routing": parity.different_routing,
        "tolerance": FP32_TOLERANCE,
        "holds": parity.holds,
    }
