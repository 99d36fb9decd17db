"""Runs a schedule: each action kind has one handler, and each rank does its list in order.

One process with one stage runs through the same handlers; there is no other path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import Axis, ByteMeter, all_reduce
from parallel.pipeline.action import RECEIVES, Action, Kind, Schedule
from parallel.pipeline.p2p import Channel, Receipt, Transport, specs_of
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
        self._is_broken = False
        self._reschedule = reschedule
        self._schedules = {schedule.num_microbatches: schedule}
        self._forward_schedules: dict[int, Schedule] = {}
        self._recorder = Recorder(self.device)  # of the step under way
        self._step = _StepState()
        self._operations: dict[int, tuple[Schedule, tuple[_Operation, ...]]] = {}
        self._handlers: dict[Kind, Callable[[_Operation], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weight,
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
        modes = [
            (module, module.training) for stage in self.stages.values() for module in stage.module.modules()
        ]
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
            # One by one: a user may have set some of them to evaluation.
            for module, training in modes:
                module.training = training

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
        if self._is_broken:
            raise RuntimeError(
                "an earlier step failed, so the ranks are out of step; build the pipeline anew"
            )
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
            # Other ranks are somewhere in the step that failed here, and messages are under way.
            self._is_broken = self.transport.size > 1
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
        for operation in self._operations_of(schedule):
            try:
                operation.run(operation)
            except Exception as error:
                error.add_note(f"in action {operation.action} of pipeline rank {self.rank} ({schedule.name})")
                raise
        begin = self._recorder.now()
        self.transport.finish_step()
        self._recorder.add(Activity.SEND_WAIT, -1, None, begin)
        for index, stage in self.stages.items():
            assert stage.num_live == 0, "the schedule left activations behind"
            assert stage.weight_grads.is_empty, "the schedule left weight gradients behind"
            if torch.is_grad_enabled():
                begin = self._recorder.now()
                stage.parameters.finish_step()
                self._recorder.add(Activity.REDUCE, index, None, begin)

    def _operations_of(self, schedule: Schedule) -> tuple[_Operation, ...]:
        """This rank's actions with all that can be known before the step, looked up once for each schedule."""
        if id(schedule) not in self._operations:
            made = tuple(
                self._operation(schedule, leaf)
                for action in schedule.actions[self.rank]
                for leaf in action.leaves
            )
            # The schedule is kept with them: its id must not be given to another.
            self._operations[id(schedule)] = (schedule, made)
        return self._operations[id(schedule)][1]

    def _operation(self, schedule: Schedule, action: Action) -> _Operation:
        index, microbatch = action.stage, -1 if action.microbatch is None else action.microbatch
        neighbour = index + _STEP_TO_NEIGHBOUR.get(action.kind, 0)
        peer = self.rank
        if action.microbatch is not None and 0 <= neighbour < schedule.num_stages:
            peer = schedule.rank_of(neighbour, microbatch)
        receiver = index if action.kind in RECEIVES else neighbour
        is_activation = action.kind in (Kind.SEND_F, Kind.RECV_F)
        return _Operation(
            run=self._handlers[action.kind],
            action=action,
            stage=self.stages[index],
            microbatch=microbatch,
            direction=0 if action.microbatch is None else schedule.direction_of(microbatch),
            is_last=index == schedule.num_stages - 1,
            peer=peer,
            is_peer_here=peer == self.rank,
            channel=Channel(receiver, Kind.SEND_F if is_activation else Kind.SEND_B),
        )

    # What others wait for comes first in each handler: after an idle wait every line costs cache misses.

    def _forward(self, operation: _Operation) -> None:
        step, stage, microbatch = self._step, operation.stage, operation.microbatch
        index, recorder = stage.index, self._recorder
        if index == 0:
            inputs = _as_tuple(step.inputs[microbatch])
        elif receipt := step.receipts.pop((index, Kind.RECV_F, microbatch), None):
            begin = recorder.now()
            inputs = self.transport.wait(receipt)
            recorder.add(Activity.RECEIVE_WAIT, index, microbatch, begin)
            step.uniform[index, operation.direction] = self._uniform_shapes and self.transport.is_uniform(
                receipt.peer, receipt.channel
            )
        else:
            inputs = step.handed.pop((index, Kind.F, microbatch))
            step.uniform[index, operation.direction] = step.uniform[index - 1, operation.direction]
        self._wait_unshard(stage, microbatch)
        begin = recorder.now()
        outputs = stage.forward(microbatch, inputs)
        if operation.is_last:
            self._loss(stage, microbatch, outputs)
        recorder.add(Activity.FORWARD, index, microbatch, begin)
        if not operation.is_last:
            if operation.is_peer_here:
                step.handed[index + 1, Kind.F, microbatch] = tuple(out.detach() for out in outputs)
            else:
                step.to_send[index, Kind.F, microbatch] = outputs
        step.num_live += 1
        recorder.peak_live_activations = max(recorder.peak_live_activations, step.num_live)

    def _loss(self, stage: Stage, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        step = self._step
        loss = step.loss_fn(outputs[0] if len(outputs) == 1 else outputs, step.targets[microbatch])
        if torch.is_grad_enabled():
            stage.set_loss(microbatch, loss if step.loss_scale == 1.0 else loss * step.loss_scale)
        step.losses[microbatch] = loss.detach()
        if step.outputs is not None:
            detached = tuple(out.detach() for out in outputs)
            step.outputs[microbatch] = detached[0] if len(detached) == 1 else detached

    def _backward(self, operation: _Operation) -> None:
        step, stage, microbatch = self._step, operation.stage, operation.microbatch
        index, recorder = stage.index, self._recorder
        grads: tuple[Tensor, ...] | None = None
        receipt: Receipt | None = None
        if not operation.is_last:
            if receipt := step.receipts.pop((index, Kind.RECV_B, microbatch), None):
                begin = recorder.now()
                grads = self.transport.wait(receipt)
                recorder.add(Activity.RECEIVE_WAIT, index, microbatch, begin)
            else:
                grads = step.handed.pop((index, Kind.B, microbatch))
        self._wait_unshard(stage, microbatch)
        defer = operation.action.kind is Kind.I
        begin = recorder.now()
        grad_inputs = stage.backward(microbatch, grads, defer=defer)
        recorder.add(Activity.INPUT_GRADIENT if defer else Activity.BACKWARD, index, microbatch, begin)
        if index > 0:
            if operation.is_peer_here:
                step.handed[index - 1, Kind.B, microbatch] = grad_inputs
            else:
                step.to_send[index, Kind.B, microbatch] = grad_inputs
        step.num_live -= 1
        if receipt is not None:
            step.answers.append((receipt.peer, Channel(index + 1, Kind.SEND_F), microbatch))
        if operation.is_peer_here:
            self._settle()
        if defer:
            held_bytes = sum(held.weight_grads.held_bytes for held in self.stages.values())
            recorder.peak_held_weight_grad_bytes = max(recorder.peak_held_weight_grad_bytes, held_bytes)

    def _weight(self, operation: _Operation) -> None:
        begin = self._recorder.now()
        operation.stage.weight_backward(operation.microbatch)
        self._recorder.add(Activity.WEIGHT_GRADIENT, operation.stage.index, operation.microbatch, begin)

    def _send_activation(self, operation: _Operation) -> None:
        step, index, microbatch = self._step, operation.stage.index, operation.microbatch
        begin = self._recorder.now()
        outputs = step.to_send.pop((index, Kind.F, microbatch))
        uniform = step.uniform[index, operation.direction]
        self.transport.send(operation.peer, operation.channel, microbatch, outputs, uniform=uniform)
        self._settle()
        self._recorder.add(Activity.SEND_WAIT, index, microbatch, begin)

    def _send_gradient(self, operation: _Operation) -> None:
        index, microbatch = operation.stage.index, operation.microbatch
        begin = self._recorder.now()
        grads = self._step.to_send.pop((index, Kind.B, microbatch))
        self.transport.send(operation.peer, operation.channel, microbatch, grads, uniform=True)
        self._settle()
        self._recorder.add(Activity.SEND_WAIT, index, microbatch, begin)

    def _settle(self) -> None:
        """Let go of activations that gradients have answered; it waits for nothing, and others wait for sends."""
        answers = self._step.answers
        while answers:
            self.transport.answered(*answers.pop())

    def _receive_activation(self, operation: _Operation) -> None:
        receipt = self.transport.receive(operation.peer, operation.channel, operation.microbatch, None)
        self._step.receipts[operation.stage.index, Kind.RECV_F, operation.microbatch] = receipt

    def _receive_gradient(self, operation: _Operation) -> None:
        step, stage, microbatch = self._step, operation.stage, operation.microbatch
        specs = tuple(spec for spec in specs_of(stage.outputs_of(microbatch)) if spec.is_differentiable)
        receipt = self.transport.receive(operation.peer, operation.channel, microbatch, specs)
        step.receipts[stage.index, Kind.RECV_B, microbatch] = receipt

    def _unshard(self, operation: _Operation) -> None:
        begin = self._recorder.now()
        operation.stage.parameters.unshard()
        self._recorder.add(Activity.COLLECTIVE_WAIT, operation.stage.index, None, begin)

    def _reshard(self, operation: _Operation) -> None:
        begin = self._recorder.now()
        operation.stage.parameters.reshard()
        self._recorder.add(Activity.COLLECTIVE_WAIT, operation.stage.index, None, begin)

    def _reduce_grad(self, operation: _Operation) -> None:
        begin = self._recorder.now()
        operation.stage.parameters.reduce_grad()
        self._recorder.add(Activity.REDUCE, operation.stage.index, None, begin)

    def _wait_unshard(self, stage: Stage, microbatch: int) -> None:
        begin = self._recorder.now()
        if stage.parameters.wait_unshard():
            self._recorder.add(Activity.COLLECTIVE_WAIT, stage.index, microbatch, begin)


# The stage on the other end of what an action sends, receives or hands on.
_STEP_TO_NEIGHBOUR = {
    Kind.F: 1,
    Kind.B: -1,
    Kind.I: -1,
    Kind.SEND_F: 1,
    Kind.RECV_F: -1,
    Kind.SEND_B: -1,
    Kind.RECV_B: 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """An action of this rank, bound to its handler.

    peer: the rank of the neighbouring stage that the action's result goes to or comes from; itself where there is
    none. channel: of a send or a receive.
    """

    run: Callable[[_Operation], None]
    action: Action
    stage: Stage
    microbatch: int
    direction: int
    is_last: bool
    peer: int
    is_peer_here: bool
    channel: Channel


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
        self.answers: list[tuple[int, Channel, int]] = []
        self.num_live = 0
        self.uniform: dict[tuple[int, int], bool] = {}


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
