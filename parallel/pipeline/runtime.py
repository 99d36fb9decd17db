"""Runs a schedule: each action kind has one handler, and each rank does its list in order.

One process with one stage runs through the same handlers; there is no other path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import Axis, ByteMeter, all_reduce
from parallel.pipeline.action import Action, Kind, Schedule
from parallel.pipeline.p2p import Channel, Receipt, TensorSpec, Transport, specs_of
from parallel.pipeline.passes import forward_only
from parallel.pipeline.stage import Stage
from parallel.pipeline.trace import Activity, Recorder, Trace

LossFunction = Callable[[Any, Any], Tensor]
Microbatches = Tensor | Sequence[Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step computed on this rank.

    losses: [num_microbatches] fp32, in micro-batch order, not scaled; zero for micro-batches whose last stage
        is elsewhere, unless losses were shared.
    outputs: the last stage's outputs in micro-batch order where asked for; None for those computed elsewhere.
    recorder: what was measured.
    """

    losses: Tensor
    outputs: tuple[Any, ...] | None
    recorder: Recorder

    @property
    def trace(self) -> Trace:
        """What this rank did, and when. On CUDA reading it waits for the device."""
        return self.recorder.trace()


class Runtime:
    """Executes a lowered schedule over this rank's stages.

    stages: this rank's stages by index. group, reverse_group: the ranks of the pipeline, in order, for
    messages to higher and to lower ranks; None: one process.
    reschedule: the lowered schedule for another number of micro-batches, for steps that have another.
    uniform_shapes: False where a stage's output shape depends on values; each activation then carries its
    shape, at the price of one more message.

    Raises ValueError: where stages or group do not fit the schedule.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        *,
        group: dist.ProcessGroup | None = None,
        reverse_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        meter: ByteMeter | None = None,
        reschedule: Callable[[int], Schedule] | None = None,
        uniform_shapes: bool = True,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.transport = Transport(group, reverse_group or group, device=self.device, meter=meter)
        self.rank = self.transport.rank
        self.group = group
        if schedule.num_ranks != self.transport.size:
            raise ValueError(
                f"the schedule '{schedule.name}' is for {schedule.num_ranks} ranks and the process group has "
                f"{self.transport.size}; generate it for the size of the group"
            )
        if set(stages) != set(schedule.stages_of(self.rank)):
            raise ValueError(
                f"pipeline rank {self.rank} was given stages {sorted(stages)}, but '{schedule.name}' places stages "
                f"{sorted(schedule.stages_of(self.rank))} here; pass a module for each of them"
            )
        self.stages = dict(stages)
        self.schedule = schedule
        self._uniform_shapes = uniform_shapes
        self._reschedule = reschedule
        self._schedules = {schedule.num_microbatches: schedule}
        self._forward_schedules: dict[int, Schedule] = {}
        self._recorder = Recorder(self.device)  # of the step under way
        self._step = _StepState()
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weight,
            Kind.OVERLAP_F_B: self._pair,
            Kind.SEND_F: self._send_activation,
            Kind.RECV_F: self._receive_activation,
            Kind.SEND_B: self._send_gradient,
            Kind.RECV_B: self._receive_gradient,
            Kind.UNSHARD: self._unshard,
            Kind.RESHARD: self._reshard,
            Kind.REDUCE_GRAD: self._reduce_grad,
        }
        self.transport.connect(schedule)

    def schedule_for(self, num_microbatches: int | None) -> Schedule:
        """The schedule of a step with so many micro-batches (None: as built), made once for each number.

        Raises ValueError: where the runtime cannot make one, or the schedule does not fit the number.
        """
        if num_microbatches is None:
            return self.schedule
        if num_microbatches not in self._schedules:
            if self._reschedule is None:
                raise ValueError(
                    f"num_microbatches={num_microbatches}: this pipeline was built from a schedule of "
                    f"{self.schedule.num_microbatches}; build it by the schedule's name to change the number"
                )
            self._schedules[num_microbatches] = self._reschedule(num_microbatches)
        return self._schedules[num_microbatches]

    def step(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        loss_fn: LossFunction,
        *,
        num_microbatches: int | None = None,
        loss_reduction: str = "mean",
        share_losses: bool = True,
        return_outputs: bool = False,
        recorder: Recorder | None = None,
    ) -> StepResult:
        """Forward and backward of every micro-batch; gradients are accumulated and reduced over copies.

        inputs, targets: one entry a micro-batch, or a tensor cut along dim 0; read on the ranks that hold the
            first (last) stage, ignored elsewhere.
        loss_fn: (output, target) -> scalar, called on the last stage.
        num_microbatches: of this step, the same on every rank; None: as the pipeline was built.
        loss_reduction: `mean` differentiates the mean over micro-batches, `sum` their sum.
        share_losses: every rank of the pipeline gets all losses (one small all-reduce).
        recorder: of a step that has begun and goes on afterwards (the optimizer); None: the step is this call.

        Raises ValueError: where inputs or targets do not fit the schedule. PipelineError: where a peer is lost.
        """
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction='{loss_reduction}': must be 'mean' or 'sum'")
        schedule = self.schedule_for(num_microbatches)
        scale = 1.0 / schedule.num_microbatches if loss_reduction == "mean" else 1.0
        recorder = recorder or Recorder(self.device)
        for stage in self.stages.values():
            stage.parameters.begin_step()
        return self._run(schedule, inputs, targets, loss_fn, scale, share_losses, return_outputs, recorder)

    def evaluate(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        loss_fn: LossFunction,
        *,
        num_microbatches: int | None = None,
        share_losses: bool = True,
        return_outputs: bool = False,
    ) -> StepResult:
        """Forward only, under no_grad and in evaluation mode; as `step` otherwise."""
        modes = {index: stage.module.training for index, stage in self.stages.items()}
        for stage in self.stages.values():
            stage.module.eval()
        try:
            with torch.no_grad():
                count = num_microbatches or self.schedule.num_microbatches
                if count not in self._forward_schedules:
                    self._forward_schedules[count] = forward_only(self.schedule_for(count))
                return self._run(
                    self._forward_schedules[count],
                    inputs,
                    targets,
                    loss_fn,
                    1.0,
                    share_losses,
                    return_outputs,
                    Recorder(self.device),
                )
        finally:
            for index, stage in self.stages.items():
                stage.module.train(modes[index])

    def _run(
        self,
        schedule: Schedule,
        inputs: Microbatches,
        targets: Microbatches,
        loss_fn: LossFunction,
        scale: float,
        share_losses: bool,
        return_outputs: bool,
        recorder: Recorder,
    ) -> StepResult:
        count, last = schedule.num_microbatches, schedule.num_stages - 1
        self._step = step = _StepState(
            schedule=schedule,
            loss_fn=loss_fn,
            loss_scale=scale,
            inputs=_split("inputs", inputs, count) if 0 in self.stages else (),
            targets=_split("targets", targets, count) if last in self.stages else (),
            losses=torch.zeros(count, device=self.device),
            outputs={} if return_outputs else None,
        )
        if 0 in self.stages:
            for direction in range(schedule.num_directions):
                shapes = {
                    specs_of(_as_tuple(step.inputs[microbatch]))
                    for microbatch in range(count)
                    if schedule.direction_of(microbatch) == direction
                }
                step.uniform[0, direction] = self._uniform_shapes and len(shapes) == 1
        self._recorder = recorder
        try:
            with recorder.pipeline():
                self._execute(schedule)
        except BaseException:
            for stage in self.stages.values():
                stage.discard()
            raise
        if share_losses and self.group is not None and self.transport.size > 1:
            with recorder.record(Activity.COLLECTIVE_WAIT):
                all_reduce(step.losses, Axis(group=self.group))
        outputs = None if step.outputs is None else tuple(step.outputs.get(index) for index in range(count))
        self._step = _StepState()
        recorder.stop()
        return StepResult(losses=step.losses, outputs=outputs, recorder=recorder)

    def _execute(self, schedule: Schedule) -> None:
        """Every action of this rank, and the end of what they started."""
        for action in schedule.actions[self.rank]:
            try:
                self._handlers[action.kind](action)
            except Exception as error:
                error.add_note(f"in action {action} of pipeline rank {self.rank} ({schedule.name})")
                raise
        with self._recorder.record(Activity.SEND_WAIT):
            self.transport.finish_step()
        for index, stage in self.stages.items():
            assert stage.num_live == 0, "the schedule left activations behind"
            assert stage.weight_grads.is_empty, "the schedule left weight gradients behind"
            if torch.is_grad_enabled():
                with self._recorder.record(Activity.REDUCE, index):
                    stage.parameters.finish_step()

    def _forward(self, action: Action) -> None:
        step, stage, microbatch = self._step, self.stages[action.stage], _microbatch(action)
        direction = step.schedule.direction_of(microbatch)
        if stage.index == 0:
            inputs = _as_tuple(step.inputs[microbatch])
        elif receipt := step.receipts.pop((stage.index, Kind.RECV_F, microbatch), None):
            with self._recorder.record(Activity.RECEIVE_WAIT, stage.index, microbatch):
                inputs = self.transport.wait(receipt)
            step.uniform[stage.index, direction] = self._uniform_shapes and self.transport.is_uniform(
                receipt.peer, receipt.channel
            )
        else:
            inputs = step.handed.pop((stage.index, Kind.F, microbatch))
            step.uniform[stage.index, direction] = step.uniform[stage.index - 1, direction]
        self._wait_unshard(stage, microbatch)
        is_last = stage.index == step.schedule.num_stages - 1
        with self._recorder.record(Activity.FORWARD, stage.index, microbatch):
            outputs = stage.forward(microbatch, inputs)
            if is_last:
                self._loss(stage, microbatch, outputs)
        if not is_last:
            if torch.is_grad_enabled():
                step.output_specs[stage.index, microbatch] = specs_of(outputs)
                self._post_gradients(stage.index)
            if step.schedule.rank_of(stage.index + 1, microbatch) == self.rank:
                step.handed[stage.index + 1, Kind.F, microbatch] = tuple(out.detach() for out in outputs)
            else:
                step.to_send[stage.index, Kind.F, microbatch] = outputs
        live = sum(held.num_live for held in self.stages.values())
        self._recorder.peak_live_activations = max(self._recorder.peak_live_activations, live)

    def _loss(self, stage: Stage, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        step = self._step
        loss = step.loss_fn(outputs[0] if len(outputs) == 1 else outputs, step.targets[microbatch])
        if torch.is_grad_enabled():
            stage.set_loss(microbatch, loss if step.loss_scale == 1.0 else loss * step.loss_scale)
        step.losses[microbatch] = loss.detach()
        if step.outputs is not None:
            detached = tuple(out.detach() for out in outputs)
            step.outputs[microbatch] = detached[0] if len(detached) == 1 else detached

    def _backward(self, action: Action) -> None:
        step, stage, microbatch = self._step, self.stages[action.stage], _microbatch(action)
        grads: tuple[Tensor, ...] | None = None
        if stage.index < step.schedule.num_stages - 1:
            if receipt := step.receipts.pop((stage.index, Kind.RECV_B, microbatch), None):
                with self._recorder.record(Activity.RECEIVE_WAIT, stage.index, microbatch):
                    grads = self.transport.wait(receipt)
                with self._recorder.record(Activity.SEND_WAIT, stage.index, microbatch):
                    self.transport.answered(receipt.peer, Channel(stage.index + 1, Kind.SEND_F), microbatch)
            else:
                grads = step.handed.pop((stage.index, Kind.B, microbatch))
            del step.output_specs[stage.index, microbatch]
        self._wait_unshard(stage, microbatch)
        defer = action.kind is Kind.I
        with self._recorder.record(
            Activity.INPUT_GRADIENT if defer else Activity.BACKWARD, stage.index, microbatch
        ):
            grad_inputs = stage.backward(microbatch, grads, defer=defer)
        if defer:
            held_bytes = sum(held.weight_grads.held_bytes for held in self.stages.values())
            peak = max(self._recorder.peak_held_weight_grad_bytes, held_bytes)
            self._recorder.peak_held_weight_grad_bytes = peak
        if stage.index > 0:
            if step.schedule.rank_of(stage.index - 1, microbatch) == self.rank:
                step.handed[stage.index - 1, Kind.B, microbatch] = grad_inputs
            else:
                step.to_send[stage.index, Kind.B, microbatch] = grad_inputs

    def _weight(self, action: Action) -> None:
        microbatch = _microbatch(action)
        with self._recorder.record(Activity.WEIGHT_GRADIENT, action.stage, microbatch):
            self.stages[action.stage].weight_backward(microbatch)

    def _pair(self, action: Action) -> None:
        for part in action.parts:
            self._handlers[part.kind](part)

    def _send_activation(self, action: Action) -> None:
        step, microbatch = self._step, _microbatch(action)
        outputs = step.to_send.pop((action.stage, Kind.F, microbatch))
        with self._recorder.record(Activity.SEND_WAIT, action.stage, microbatch):
            self.transport.send(
                step.schedule.rank_of(action.stage + 1, microbatch),
                Channel(action.stage + 1, Kind.SEND_F),
                microbatch,
                outputs,
                uniform=step.uniform[action.stage, step.schedule.direction_of(microbatch)],
            )

    def _receive_activation(self, action: Action) -> None:
        step, microbatch = self._step, _microbatch(action)
        peer = step.schedule.rank_of(action.stage - 1, microbatch)
        receipt = self.transport.receive(peer, Channel(action.stage, Kind.SEND_F), microbatch, None)
        step.receipts[action.stage, Kind.RECV_F, microbatch] = receipt

    def _send_gradient(self, action: Action) -> None:
        step, microbatch = self._step, _microbatch(action)
        with self._recorder.record(Activity.SEND_WAIT, action.stage, microbatch):
            self.transport.send(
                step.schedule.rank_of(action.stage - 1, microbatch),
                Channel(action.stage - 1, Kind.SEND_B),
                microbatch,
                step.to_send.pop((action.stage, Kind.B, microbatch)),
                uniform=True,
            )

    def _receive_gradient(self, action: Action) -> None:
        peer = self._step.schedule.rank_of(action.stage + 1, _microbatch(action))
        self._step.unposted.setdefault((action.stage, peer), deque()).append(_microbatch(action))
        self._post_gradients(action.stage)

    def _post_gradients(self, stage: int) -> None:
        """Post the gradient receives whose shapes are known, in the order of their channel.

        A schedule may ask for the gradient of a micro-batch before its forward has run here.
        """
        step = self._step
        for (receiver, peer), unposted in step.unposted.items():
            if receiver != stage:
                continue
            while unposted and (specs := step.output_specs.get((stage, unposted[0]))) is not None:
                microbatch = unposted.popleft()
                differentiable = tuple(spec for spec in specs if spec.is_differentiable)
                step.receipts[stage, Kind.RECV_B, microbatch] = self.transport.receive(
                    peer, Channel(stage, Kind.SEND_B), microbatch, differentiable
                )

    def _unshard(self, action: Action) -> None:
        with self._recorder.record(Activity.COLLECTIVE_WAIT, action.stage):
            self.stages[action.stage].parameters.unshard()

    def _reshard(self, action: Action) -> None:
        with self._recorder.record(Activity.COLLECTIVE_WAIT, action.stage):
            self.stages[action.stage].parameters.reshard()

    def _reduce_grad(self, action: Action) -> None:
        with self._recorder.record(Activity.REDUCE, action.stage):
            self.stages[action.stage].parameters.reduce_grad()

    def _wait_unshard(self, stage: Stage, microbatch: int) -> None:
        with self._recorder.record(Activity.COLLECTIVE_WAIT, stage.index, microbatch):
            stage.parameters.wait_unshard()


class _StepState:
    """What lives for one step only."""

    def __init__(
        self,
        *,
        schedule: Schedule | None = None,
        loss_fn: LossFunction | None = None,
        loss_scale: float = 1.0,
        inputs: tuple[Any, ...] = (),
        targets: tuple[Any, ...] = (),
        losses: Tensor | None = None,
        outputs: dict[int, Any] | None = None,
    ) -> None:
        if schedule is not None and loss_fn is not None and losses is not None:
            self.schedule, self.loss_fn, self.losses = schedule, loss_fn, losses
        self.loss_scale, self.inputs, self.targets, self.outputs = loss_scale, inputs, targets, outputs
        self.receipts: dict[tuple[int, Kind, int], Receipt] = {}
        self.handed: dict[tuple[int, Kind, int], tuple[Tensor, ...]] = {}
        self.to_send: dict[tuple[int, Kind, int], tuple[Tensor, ...]] = {}
        self.output_specs: dict[tuple[int, int], tuple[TensorSpec, ...]] = {}
        self.unposted: dict[tuple[int, int], deque[int]] = {}
        self.uniform: dict[tuple[int, int], bool] = {}


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None, f"{action} needs a micro-batch"
    return action.microbatch


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", value) if isinstance(value, tuple) else (cast(Tensor, value),)


def _split(name: str, values: Microbatches, count: int) -> tuple[Any, ...]:
    """One entry a micro-batch.

    Raises ValueError: where there are not `count` of them.
    """
    if values is None:
        raise ValueError(f"{name} is None on a rank that needs them; pass {count} micro-batches")
    if isinstance(values, Tensor):
        if values.shape[0] % count:
            raise ValueError(
                f"{name} has {values.shape[0]} rows, which {count} micro-batches do not divide; pass a list with one "
                "entry a micro-batch"
            )
        return tuple(values.chunk(count))
    if len(values) != count:
        raise ValueError(
            f"{name} has {len(values)} entries and the schedule {count} micro-batches; pass one for each"
        )
    return tuple(values)
