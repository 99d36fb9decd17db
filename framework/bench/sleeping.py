"""Stages that sleep: every F, I and W takes exactly its cost, so that what remains is the runtime's own idle time.

Sleeping ranks run side by side on any number of cores, and their transfers are real. The same stages run under
this project's runtime and under torch.distributed.pipelining, which is the peer that is measured against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.runtime.plain_parameters import PlainParameters
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.pipeline.schedules.registry import generated_schedules

# Where torch has a schedule of the same shape.
TORCH_SCHEDULES: dict[str, Any] = {
    name: getattr(torch_schedules, each.torch_name)
    for name, each in generated_schedules().items()
    if each.torch_name is not None
}
_SINGLE_STAGE = ("gpipe", "1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepCosts:
    """Seconds of one F, I and W of a stage; a full backward is I + W."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float


class Sleeper:
    """Sleeps, and adds up how long it really slept: the kernel wakes a sleeper late."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.slept_s += time.perf_counter() - begin


class SleepingStage(Stage):
    """For this project's runtime: F, I and W sleep; activations and gradients are zeros of one shape."""

    def __init__(self, index: int, costs: SleepCosts, shape: tuple[int, ...], sleeper: Sleeper) -> None:
        module = nn.Identity()
        super().__init__(index, module, PlainParameters(module))
        self._costs, self._value, self._sleep = costs, torch.zeros(shape), sleeper.sleep
        self._live: set[int] = set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def forward(self, microbatch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._sleep(self._costs.forward_s)
        self._live.add(microbatch)
        return (self._value,)

    def outputs_of(self, microbatch: int) -> tuple[Tensor, ...]:
        return (self._value,)

    def set_loss(self, microbatch: int, loss: Tensor) -> None:
        """There is nothing to differentiate."""

    def backward(
        self, microbatch: int, grad_outputs: Sequence[Tensor] | None, *, defer: bool
    ) -> tuple[Tensor, ...]:
        self._live.remove(microbatch)
        self._sleep(self._costs.input_gradient_s + (0.0 if defer else self._costs.weight_gradient_s))
        return (self._value,)

    def weight_backward(self, microbatch: int) -> None:
        self._sleep(self._costs.weight_gradient_s)


class TorchSleepingStage(PipelineStage):
    """For torch's runtime: the same sleeps, where it would run the module and autograd."""

    def __init__(
        self,
        index: int,
        num_stages: int,
        costs: SleepCosts,
        shape: tuple[int, ...],
        group: dist.ProcessGroup,
        sleeper: Sleeper,
    ) -> None:
        value = torch.zeros(shape, requires_grad=True)
        super().__init__(
            nn.Identity(),
            index,
            num_stages,
            torch.device("cpu"),
            input_args=value,
            output_args=value,
            output_grads=None if index == num_stages - 1 else value,
            input_grads=None if index == 0 else value,
            group=group,
            dw_builder=lambda: lambda: sleeper.sleep(costs.weight_gradient_s),
        )
        self._costs, self._value, self._sleep = costs, torch.zeros(shape), sleeper.sleep

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        self._sleep(self._costs.forward_s)
        return self._value

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        # The weight gradient's sleep is dw_builder's, right after this one in a full backward.
        self._sleep(self._costs.input_gradient_s)
        return (None if self.is_first else self._value,), None


def our_step(
    schedule: Schedule,
    costs: SleepCosts,
    shape: tuple[int, ...],
    group: dist.ProcessGroup,
    sleeper: Sleeper,
    *,
    p2p_chunk_bytes: int | None = None,
) -> Callable[[], None]:
    """A step of this project's runtime over sleeping stages; activations have `shape`."""
    lowered = lower(schedule, zero_stage=0, early_sends=True)
    stages: dict[int, Stage] = {}
    for index in schedule.stages_of(dist.get_rank()):
        stages[index] = SleepingStage(index, costs, shape, sleeper)
    runtime = Runtime(stages, lowered, group=group, p2p_chunk_bytes=p2p_chunk_bytes)
    microbatches = [torch.zeros(shape) for _ in range(schedule.num_microbatches)]

    def step() -> None:
        runtime.step(microbatches, microbatches, _zero_loss, share_losses=False)

    return step


def torch_step(
    name: str,
    schedule: Schedule,
    costs: SleepCosts,
    shape: tuple[int, ...],
    group: dist.ProcessGroup,
    sleeper: Sleeper,
) -> Callable[[], None]:
    """A step of torch.distributed.pipelining's schedule of the same name and shape."""
    stages = [
        TorchSleepingStage(index, schedule.num_stages, costs, shape, group, sleeper)
        for index in schedule.stages_of(dist.get_rank())
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
    return torch.zeros(())
