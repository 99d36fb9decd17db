"""Stages that sleep: every F, I and W takes exactly its cost, so that what remains is the runtime's own idle time.

Sleeping ranks run side by side on any number of cores, and their transfers are real. The same stages run under
this project's runtime and under torch.distributed.pipelining, which is the peer that is measured against.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from parallel.pipeline.action import Schedule
from parallel.pipeline.passes import lower
from parallel.pipeline.runtime import Runtime
from parallel.pipeline.stage import PlainParameters, Stage
from parallel.pipeline.weight_grad import WeightGradSink

# Where torch has a schedule of the same shape.
TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zb1p": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}
_SINGLE_STAGE = ("gpipe", "1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepCosts:
    """Seconds of one F, I and W of a stage; a full backward is I + W."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float


class _SleepInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad_outputs[0], None, None


class _SleepWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_s)
        return grad_outputs[0], None


class _SinkWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: SleepingStage) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        sink, weight = ctx.module.weight_grad_sink, ctx.module.weight
        assert sink is not None
        flat = grad_outputs[0].reshape(-1, 1)[:1]
        sink.add(weight, None, flat, flat)
        return grad_outputs[0], None


class TorchSleepingStage(nn.Module):
    """For torch's runtime: the input's node sleeps I, the weight's node sleeps W."""

    def __init__(self, costs: SleepCosts) -> None:
        super().__init__()
        self.costs = costs
        self.weight = nn.Parameter(torch.zeros(1))
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad and torch.is_grad_enabled():
            x = (
                x + self.anchor
            )  # the first stage: something to differentiate, so that I takes its time there too
        moved = cast(Tensor, _SleepInput.apply(x, self.costs.forward_s, self.costs.input_gradient_s))
        return moved + cast(Tensor, _SleepWeight.apply(self.weight, self.costs.weight_gradient_s))


class SleepingStage(nn.Module):
    """For this project's runtime: a layer whose weight gradient is deferred through its sink."""

    def __init__(self, costs: SleepCosts) -> None:
        super().__init__()
        self.costs = costs
        self.weight_grad_sink: WeightGradSink | None = None
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def deferrable_parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,)

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad and torch.is_grad_enabled():
            x = x + self.weight.sum()  # the first stage: something to differentiate
        moved = cast(Tensor, _SleepInput.apply(x, self.costs.forward_s, self.costs.input_gradient_s))
        return cast(Tensor, _SinkWeight.apply(moved, self))


class SleepingParameters(PlainParameters):
    """Sleeps W where a weight gradient is added."""

    def __init__(self, module: SleepingStage) -> None:
        super().__init__(module)
        self._module = module

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        time.sleep(self._module.costs.weight_gradient_s)
        return super().gradient_buffer(parameter)


def our_step(
    schedule: Schedule,
    costs: SleepCosts,
    shape: tuple[int, ...],
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
) -> Callable[[], None]:
    """A step of this project's runtime over sleeping stages; activations have `shape`."""
    lowered = lower(schedule, zero_stage=0)
    stages: dict[int, Stage] = {}
    for index in schedule.stages_of(dist.get_rank()):
        module = SleepingStage(costs)
        stages[index] = Stage(index, module, SleepingParameters(module))
    runtime = Runtime(stages, lowered, group=groups[0], reverse_group=groups[1])
    microbatches = [torch.zeros(shape) for _ in range(schedule.num_microbatches)]

    def step() -> None:
        runtime.step(microbatches, microbatches, _zero_loss, share_losses=False)

    return step


def torch_step(
    name: str, schedule: Schedule, costs: SleepCosts, shape: tuple[int, ...], group: dist.ProcessGroup
) -> Callable[[], None]:
    """A step of torch.distributed.pipelining's schedule of the same name and shape."""
    rank, device = dist.get_rank(), torch.device("cpu")
    stages = [
        PipelineStage(TorchSleepingStage(costs), index, schedule.num_stages, device, group=group)
        for index in schedule.stages_of(rank)
    ]
    maker = TORCH_SCHEDULES[name]
    runner = maker(
        stages[0] if name in _SINGLE_STAGE else stages,
        n_microbatches=schedule.num_microbatches,
        loss_fn=_zero_loss,
    )
    first = any(stage.is_first for stage in stages)
    last = any(stage.is_last for stage in stages)
    # Its batches are cut along dim 0.
    whole = torch.zeros(schedule.num_microbatches * shape[0], *shape[1:])
    target = whole if last else None

    def step() -> None:
        if first:
            runner.step(whole, target=target)
        else:
            runner.step(target=target)

    return step


def _zero_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()
