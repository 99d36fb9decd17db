"""Parity: the same model, data and seed in a layout and in one process, and how far they drift apart.

Note [What parity compares]
Gradients of the first step, before clipping and before any update, are of equal parameters and equal data: they
differ by rounding alone, and each tensor is held to FP32_TOLERANCE of its own norm. A gradient that is zero in
mathematics (a bias of keys, which softmax does not see; a router with one choice) is nothing but rounding, of sums
whose terms are as large as other gradients: a tensor whose norm is below ROUNDING of the whole model's may differ by
that.

Later gradients are of parameters that have drifted, and Adam makes more of rounding than it was: an element moves by
lr u with u = m / (sqrt(v) + eps), both moments corrected for their bias. With m = sum(a_s g_s), v = sum(b_s g_s^2)
over the steps s up to t (a and b add up to 1), |u| <= k = sqrt(sum(a_s^2 / b_s)) by Cauchy and Schwarz, and a
difference of at most d in each g_s changes u by at most

    min(2 k, (1 + k sum(sqrt(b_s))) d / (sqrt(v) + eps)).

Where |g| is near rounding the first holds, so such an element may end up to 2 k lr apart in a right layout. Parameters
are therefore held, tensor by tensor, against the norm of the sum over steps of lr times that, with v of the reference
itself, and d of an element that of its tensor's root mean square: FP32_TOLERANCE of it in the first step, which is
measured, and DRIFT_TOLERANCE later, which the norms of later steps are held to. Losses of all steps are held to
FP32_TOLERANCE: an element whose step is uncertain has next to no gradient, so the loss does not feel it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterflow.framework.checkpoint.shard import TensorShard, tensor_shards
from counterflow.framework.checkpoint.storage import load, save
from counterflow.framework.checks.rules.commands import PARITY_STEPS as NUM_STEPS
from counterflow.framework.config.tree import CheckpointConfig, LoggerConfig, TrainConfig
from counterflow.framework.experts.config import BalanceConfig
from counterflow.framework.optim.offload_config import OptimizerOffloadConfig
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import build, step_undo
from counterflow.framework.trainer.loop import seed_everything, train
from counterflow.framework.trainer.process_group import process_group
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import forward_backward
from counterflow.models.recompute import RecomputeConfig
from counterflow.parallel.mesh import MeshConfig
from counterflow.parallel.offload.config import OffloadConfig
from counterflow.parallel.ops.loss_config import LossConfig
from counterflow.parallel.pipeline.config import ScheduleConfig
from counterflow.parallel.pipeline.ir.trace import Recorder
from counterflow.parallel.zero.config import ZeroConfig

# Loss and gradients in fp32, DESIGN's bound: rounding in another order, nothing more.
FP32_TOLERANCE = 1e-5
# Of the norm of the whole gradient: eight units of the last place of fp32.
ROUNDING = 2.0**-20
# Of gradients after the first update, of parameters that have drifted.
DRIFT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The largest relative differences to one process, see Note [What parity compares].

    loss_rel: over the steps, |a - b| / |b|. grad_rel: of the first step's gradients before clipping: for each tensor
    |a - b| / |b| in the Euclidean norm, then the largest tensor's; one below rounding is taken against the least norm
    at which its bound is the same. param_rel: of the parameters after the last step, |a - b| / |b|; param_of_bound: the
    largest part of a tensor's bound that is used up. worst_grad, worst_param: the names of these tensors.
    first_norm_rel, norm_rel: of the norm that gradients are clipped by, in the first step and over all.
    mtp_loss_rel: of the loss of MTP modules, None without. different_routing: the first step and layer whose
    experts had other loads, as `step 3, layer 1`; None where all are equal, or there are no experts.
    """

    loss_rel: float
    mtp_loss_rel: float | None
    first_norm_rel: float
    norm_rel: float
    grad_rel: float
    param_rel: float
    param_of_bound: float
    worst_grad: str
    worst_param: str
    num_steps: int
    num_routed_layers: int
    different_routing: str | None

    @property
    def holds(self) -> bool:
        """All within their bounds, and every token routed alike."""
        tight = (self.loss_rel, self.mtp_loss_rel or 0.0, self.first_norm_rel, self.grad_rel)
        return (
            all(number <= FP32_TOLERANCE for number in tight)
            and self.norm_rel <= DRIFT_TOLERANCE
            and self.param_of_bound <= 1
            and self.different_routing is None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrail:
    """What a step left behind, over all ranks.

    loads: by layer of experts, each expert's share of the choices, rounded to a millionth: equal shares are equal
    counts in a global batch of less than 500,000 choices.
    """

    loss: float
    mtp_loss: float
    norm: float
    loads: dict[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one process trained: whole tensors by their names.

    gradients: of the first step, before clipping. bounds: by the name of a parameter, of each element.
    """

    trail: list[StepTrail]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    bounds: dict[str, Tensor]
    has_mtp: bool


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
        loss=LossConfig(),
        recompute=RecomputeConfig(),
        balance=BalanceConfig(),
        offload=OffloadConfig(),
        optimizer=replace(
            config.optimizer, post_validation=False, kernel="torch", offload=OptimizerOffloadConfig()
        ),
        schedule=ScheduleConfig(name="1f1b", num_microbatches=num_microbatches),
        training=replace(config.training, batch_ramp=ramp),
    )


def train_and_save(
    config: TrainConfig, run: RunContext, folder: Path, device: torch.device
) -> list[StepTrail]:
    """Train `NUM_STEPS` steps and write gradients and parameters to `folder`; what each step left behind.

    torch.distributed is initialised; every rank of the layout calls this.
    """
    trained = _train(config, run, device, every_copy=False)
    save(folder, [*trained.gradients, *trained.parameters], {}, group=trained.assembly.mesh.world)
    return trained.trail


def train_and_compare(
    config: TrainConfig, run: RunContext, folder: Path, trail: list[StepTrail], device: torch.device
) -> Parity:
    """Train the reference of `config` in this one process and compare it to what a layout wrote to `folder`."""
    return compare(train_reference(config, run, device), folder, trail)


def train_reference(config: TrainConfig, run: RunContext, device: torch.device) -> Reference:
    """Train the reference of `config` in this one process; torch.distributed is initialised."""
    trained = _train(reference_config(config), run, device)
    return Reference(
        trail=trained.trail,
        gradients={shard.name: shard.tensor for shard in trained.gradients},
        parameters={shard.name: shard.tensor for shard in trained.parameters},
        bounds=trained.bounds,
        has_mtp=config.model.mtp.num_modules > 0,
    )


def compare(reference: Reference, folder: Path, trail: list[StepTrail]) -> Parity:
    """What a layout wrote to `folder` beside the reference; this process reads it alone."""
    gradients, parameters = reference.gradients, reference.parameters
    found = {name: torch.empty_like(tensor) for name, tensor in (gradients | parameters).items()}
    shards = [
        TensorShard(name=name, global_shape=tuple(tensor.shape), offsets=(0,) * tensor.dim(), tensor=tensor)
        for name, tensor in found.items()
    ]
    load(folder, shards, group=None)
    whole = math.hypot(*map(norm_of, gradients.values()))
    worst_grad, grad_rel = _worst(
        {name: gradient_difference(found[name], own, whole) for name, own in gradients.items()}
    )
    worst_param, param_of_bound = _worst(
        {
            name: norm_of(found[name] - own) / norm_of(reference.bounds[name])
            for name, own in parameters.items()
        }
    )
    _, param_rel = _worst({name: relative_difference(found[name], own) for name, own in parameters.items()})
    pairs = list(zip(trail, reference.trail, strict=True))
    norms = [_largest_relative([mine.norm], [own.norm]) for mine, own in pairs]
    return Parity(
        loss_rel=_largest_relative([mine.loss for mine, _ in pairs], [own.loss for _, own in pairs]),
        mtp_loss_rel=_largest_relative(
            [mine.mtp_loss for mine, _ in pairs], [own.mtp_loss for _, own in pairs]
        )
        if reference.has_mtp
        else None,
        first_norm_rel=norms[0],
        norm_rel=max(norms),
        grad_rel=grad_rel,
        param_rel=param_rel,
        param_of_bound=param_of_bound,
        worst_grad=worst_grad.removeprefix("gradient."),
        worst_param=worst_param.removeprefix("model."),
        num_steps=NUM_STEPS,
        num_routed_layers=len(reference.trail[0].loads),
        different_routing=different_routing(trail, reference.trail),
    )


def gradient_difference(value: Tensor, reference: Tensor, whole: float) -> float:
    """|value - reference| / |reference|; where that is below rounding, a difference of ROUNDING * whole is the bound.

    whole: the norm of all gradients of the model.
    """
    own = norm_of(reference)
    scale = own if own > ROUNDING * whole else ROUNDING * whole / FP32_TOLERANCE
    return norm_of(value - reference) / scale if scale else norm_of(value)


def update_bound(denominator: Tensor, difference: float, *, step: int, beta1: float, beta2: float) -> Tensor:
    """By how much u of Adam may differ, element by element; see Note [What parity compares].

    denominator: sqrt(v) + eps, v corrected for its bias. difference: d. step: from 1.
    """
    a, b = (
        [(1 - beta) * beta ** (step - each) / (1 - beta**step) for each in range(1, step + 1)]
        for beta in (beta1, beta2)
    )
    most = math.sqrt(sum(x * x / y for x, y in zip(a, b, strict=True)))
    slope = 1 + most * sum(map(math.sqrt, b))
    return (slope * difference / denominator).clamp(max=2 * most)


def different_routing(first: Sequence[StepTrail], second: Sequence[StepTrail]) -> str | None:
    """The first step and layer whose experts had other loads in one than in the other."""
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        for layer in sorted(one.loads.keys() | other.loads.keys()):
            if one.loads.get(layer) != other.loads.get(layer):
                return f"step {step}, layer {layer}"
    return None


def run_layout_rank(config: TrainConfig, run: RunContext, folder: Path, local_rank: int) -> list[StepTrail]:
    """Entry of each rank of the layout; the environment describes the process group."""
    with process_group(config, local_rank) as device:
        return train_and_save(config, run, folder, device)


def run_reference_rank(
    config: TrainConfig, run: RunContext, folder: Path, trail: list[StepTrail], local_rank: int
) -> Parity:
    """Entry of the one reference process."""
    with process_group(config, local_rank) as device:
        return train_and_compare(config, run, folder, trail, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """gradients: of the first step, before clipping. bounds: by the name of a parameter, of each element."""

    assembly: Assembly
    trail: list[StepTrail]
    gradients: list[TensorShard]
    parameters: list[TensorShard]
    bounds: dict[str, Tensor]


def _train(
    config: TrainConfig, run: RunContext, device: torch.device, *, every_copy: bool = True
) -> _Trained:
    """Train `NUM_STEPS` steps as `counterflow train` does, with all that a step may do."""
    config = replace(
        config,
        training=replace(config.training, num_steps=NUM_STEPS),
        data=replace(config.data, validation_batches=0),
        logger=LoggerConfig(name="none"),
        checkpoint=CheckpointConfig(enabled=False),
    )
    seed_everything(config.seed, deterministic=config.is_deterministic(device.type))
    assembly = build(config, run.data, device)
    gradients = _first_gradients(assembly, every_copy=every_copy)
    bounds = [torch.zeros_like(owned.fragment.master) for owned in assembly.optimizer.owned]
    trail: list[StepTrail] = []
    for record in train(assembly, 0):
        layers = () if record.moe is None else record.moe.layers
        trail.append(
            StepTrail(
                loss=record.loss,
                mtp_loss=record.mtp_loss or 0.0,
                norm=record.grad_norm,
                loads={layer.layer: layer.load for layer in layers},
            )
        )
        if every_copy:  # the reference, whose fragments are whole tensors
            _widen(bounds, assembly, record.step, record.learning_rate)
    parameters = _shards(
        assembly,
        "model",
        [owned.fragment.master for owned in assembly.optimizer.owned],
        every_copy=every_copy,
    )
    boxed = _shards(assembly, "model", bounds, every_copy=every_copy)
    return _Trained(
        assembly=assembly,
        trail=trail,
        gradients=gradients,
        parameters=parameters,
        bounds={shard.name: shard.tensor for shard in boxed},
    )


def _first_gradients(assembly: Assembly, *, every_copy: bool) -> list[TensorShard]:
    """Those of the first step, which is then made as if this had not been."""
    undo = step_undo(assembly.stages.values(), assembly.modules)
    undo.keep()
    forward_backward(assembly, 0, Recorder(assembly.device))
    found = [owned.fragment.grad.clone() for owned in assembly.optimizer.owned]
    undo.restore()
    return _shards(assembly, "gradient", found, every_copy=every_copy)


def _widen(bounds: Sequence[Tensor], assembly: Assembly, step: int, rate: float) -> None:
    """Add to `bounds` by how much the update that was just made may differ, and the rounding of the parameters."""
    config, owned = assembly.config.optimizer, assembly.optimizer.owned
    norms = [norm_of(each.fragment.grad) for each in owned]
    rounding = ROUNDING * math.hypot(*norms)
    share = DRIFT_TOLERANCE if step else FP32_TOLERANCE
    for bound, norm, each in zip(bounds, norms, owned, strict=True):
        master = each.fragment.master
        seen = each.state["exp_avg_sq"] / (1 - config.beta2 ** (step + 1))
        bound += rate * update_bound(
            seen.sqrt() + config.eps,
            max(share * norm, rounding) / math.sqrt(master.numel()),
            step=step + 1,
            beta1=config.beta1,
            beta2=config.beta2,
        )
        bound += torch.finfo(master.dtype).eps * master.abs()


def _shards(assembly: Assembly, key: str, flats: Sequence[Tensor], *, every_copy: bool) -> list[TensorShard]:
    """flats: one for each fragment of the optimizer."""
    shards: list[TensorShard] = []
    for owned, flat in zip(assembly.optimizer.owned, flats, strict=True):
        slot = owned.fragment.slot
        name = slot.placement.tied_to or slot.name
        shards += tensor_shards(
            f"{key}.{name}", flat, owned.fragment.start, slot.shape, slot.placement, every_copy=every_copy
        )
    return shards


def _worst(differences: Mapping[str, float]) -> tuple[str, float]:
    name = max(differences, key=lambda key: (math.isnan(differences[key]), differences[key]))
    return name, differences[name]


def norm_of(tensor: Tensor) -> float:
    """The Euclidean norm, in fp64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


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
        "mtp_loss_rel": parity.mtp_loss_rel,
        "first_norm_rel": parity.first_norm_rel,
        "norm_rel": parity.norm_rel,
        "grad_rel": parity.grad_rel,
        "param_rel": parity.param_rel,
        "param_of_bound": parity.param_of_bound,
        "worst_grad": parity.worst_grad,
        "worst_param": parity.worst_param,
        "num_steps": parity.num_steps,
        "num_routed_layers": parity.num_routed_layers,
        "routing_equal": parity.different_routing is None,
        "different_routing": parity.different_routing,
        "tolerance": FP32_TOLERANCE,
        "holds": parity.holds,
    }
