"""ZeRO by DeepSpeed's engine behind the trainer's own stage and optimizer, for one pipeline stage.

`EngineStage` is the runtime's stage whose forward and backward are the engine's; `EngineOptimizer` is the trainer's
optimizer whose step is the engine's. Model, data, schedule, records and evaluation are the ones of every run.

Note [The same numbers]
A micro-batch's loss is its sum over tokens divided by the valid tokens of the global batch, so gradients add up
over micro-batches and data-parallel ranks. DeepSpeed takes the mean over the ranks: the loss it differentiates is
multiplied by their number. Gradients that are terms of a sum over the tensor axis are summed there by a hook, each
time before they are accumulated. Parameters that every tensor-parallel rank holds whole are counted once in the
norm: DeepSpeed does so for those without the attribute `model_parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.deepspeed.config import deepspeed_config
from counterflow.framework.deepspeed.start import start
from counterflow.framework.optim.optimizer import ModelOptimizer, sum_of_squares
from counterflow.framework.optim.step_guard import StepVerdict
from counterflow.framework.optim.updaters.updater import TorchAdamW
from counterflow.parallel.collectives import Axis, all_reduce
from counterflow.parallel.groups import new_groups
from counterflow.parallel.mesh import Mesh
from counterflow.parallel.parameters import initialize, place, placement_of
from counterflow.parallel.pipeline.ir.trace import Recorder
from counterflow.parallel.pipeline.runtime.plain_parameters import PlainParameters
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.zero.layout import PersistentBytes


class ModelParallelUnit:
    """What DeepSpeed asks of a model that is cut by somebody else (its `mpu`)."""

    def __init__(self, tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        self._tensor, self._data = tensor, data

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank()

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return self._data.rank()

    def get_data_parallel_world_size(self) -> int:
        return self._data.size()


def model_parallel_unit(mesh: Mesh) -> ModelParallelUnit:
    """The tensor and replica groups of `mesh`; a rank that is alone on an axis gets a group for it."""

    def group(found: dist.ProcessGroup | None) -> Any:
        if found is not None:
            return found
        # On every rank alike: where one is alone on an axis, all are.
        return new_groups([[rank] for rank in range(dist.get_world_size())], "alone")

    return ModelParallelUnit(group(mesh.tensor), group(mesh.replica))


def materialise(
    module: nn.Module, *, seed: int, dtype: torch.dtype, device: torch.device, tensor: Axis
) -> None:
    """Replace the parameters of `module` by initialised ones, the same values as with every other engine."""
    replaced: dict[int, nn.Parameter] = {}
    for name, old in list(module.named_parameters()):
        placement = placement_of(old)
        values = torch.empty(old.shape, device=device)
        initialize(values, name, placement, seed)
        new = place(nn.Parameter(values.to(dtype)), placement)
        if placement.tensor_dim is not None:
            setattr(new, "model_parallel", True)  # noqa: B010 (DeepSpeed reads it)
        if placement.partial_over_tensor and tensor.size > 1:
            new.register_hook(_SumOver(tensor))
        replaced[id(old)] = new
    for submodule in module.modules():
        for name, parameter in list(submodule.named_parameters(recurse=False)):
            setattr(submodule, name, replaced[id(parameter)])


class _SumOver:
    """A gradient hook: the sum of the gradient over `axis`."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, grad: Tensor) -> Tensor:
        total = grad.contiguous().clone()
        all_reduce(total, self._axis)
        return total


class EngineStage(Stage):
    """The one stage of a pipeline of one rank, run by DeepSpeed: it gathers, reduces and accumulates."""

    def __init__(self, module: nn.Module, engine: Any, num_replicas: int) -> None:
        super().__init__(0, module, PlainParameters(module), splits=False)
        self._engine, self._num_replicas = engine, num_replicas

    def _apply(self, inputs: tuple[Tensor, ...]) -> object:
        return self._engine(*inputs)

    def _differentiate(self, roots: Sequence[Tensor], grads: Sequence[Tensor] | None) -> None:
        assert grads is None, "there is one stage, and it ends with the loss"
        (loss,) = roots
        self._engine.backward(loss * self._num_replicas, scale_wrt_gas=False)


class _EngineAdamW(TorchAdamW):
    name = "torch fused AdamW in the DeepSpeed engine"


class EngineOptimizer(ModelOptimizer):
    """The engine's step in the place of ours. The engine holds masters and moments, so `owned` is empty."""

    def __init__(
        self, engine: Any, module: nn.Module, config: TrainConfig, *, tensor: Axis, world: Axis
    ) -> None:
        super().__init__(
            (), config.optimizer, tensor=tensor, world=world, updater=_EngineAdamW(config.optimizer)
        )
        self._engine, self._module = engine, module
        self._norm_at_stage_0: float | None = None
        if config.zero.stage == 0:
            engine.optimizer.register_step_pre_hook(self._clip_at_stage_0)

    @torch.no_grad()
    def step(
        self, learning_rate: float, recorder: Recorder | None = None, loss: Tensor | float = 0.0
    ) -> StepVerdict:
        """Reduce what is not reduced yet, clip and update; the norm is that before clipping.

        Raises FloatingPointError: where the norm is not finite. From stage 1 on the engine has updated by then.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = self._norm_at_stage_0
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm} after {self.num_steps} steps of zero.engine=deepspeed, whose parameters "
                "are not sound any more; lower optimizer.base_lr or lengthen the warm-up, and start again"
            )
        self.num_steps += 1
        return StepVerdict(grad_norm=norm)

    def close(self) -> None:
        self._engine.destroy()
        super().close()

    def _clip_at_stage_0(self, *_: Any) -> None:
        """Ahead of AdamW, when gradients are summed: as `ModelOptimizer` clips."""
        gradients = {
            parameter: parameter.grad for parameter in self._module.parameters() if parameter.grad is not None
        }
        squares = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        counted = [
            gradient
            for parameter, gradient in gradients.items()
            if placement_of(parameter).tensor_dim is not None or self._tensor.rank == 0
        ]
        if counted:
            squares += sum_of_squares(counted)
        all_reduce(squares, self._tensor)
        self._norm_at_stage_0 = norm = float(squares.sqrt())
        if math.isfinite(norm) and self._is_clipped(norm):
            for gradient in gradients.values():
                gradient.mul_(self._clip_factor(norm))

    def persistent_bytes(self, *, experts_only: bool = False) -> PersistentBytes:
        """What the engine keeps is not known here; `counterflow memory` refuses it."""
        raise NotImplementedError("zero.engine=deepspeed does not say what it holds")


def build_engine(
    module: nn.Module, config: TrainConfig, mesh: Mesh, *, tensor: Axis, world: Axis, device: torch.device
) -> tuple[EngineStage, EngineOptimizer]:
    """Hand `module` (parameters on the meta device) to `deepspeed.initialize`; every rank calls this.

    Raises RuntimeError: where there is no DeepSpeed (see `start.why_not`).
    """
    deepspeed = start(config.comm.timeout_s)
    dtype = torch.bfloat16 if config.precision.compute == "bf16" else torch.float32
    materialise(module, seed=config.seed, dtype=dtype, device=device, tensor=tensor)
    decayed: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in module.parameters():
        decayed[placement_of(parameter).weight_decay].append(parameter)
    optimizer = config.optimizer
    adamw = torch.optim.AdamW(
        [
            {"params": members, "weight_decay": optimizer.weight_decay if decays else 0.0}
            for decays, members in decayed.items()
            if members
        ],
        lr=optimizer.base_lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        fused=True,
    )
    unit = model_parallel_unit(mesh)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=adamw,
        mpu=unit,
        config=deepspeed_config(config),
        dist_init_required=False,
    )
    return (
        EngineStage(module, engine, unit.get_data_parallel_world_size()),
        EngineOptimizer(engine, module, config, tensor=tensor, world=world),
    )
