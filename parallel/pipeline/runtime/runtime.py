"""Runs a schedule: each rank does its list in order, each action by the handler of its kind (handlers.py).

One process with one stage runs through the same handlers; there is no other path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.parallel.collectives import Axis, ByteMeter, all_reduce
from counterflow.parallel.groups import MakeGroup
from counterflow.parallel.offload.offloader import Offloader
from counterflow.parallel.pipeline.analysis.first_use import serial
from counterflow.parallel.pipeline.analysis.passes import forward_only, passes_after, why_not_overlapped
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.trace import Activity, Recorder, Trace
from counterflow.parallel.pipeline.runtime.ahead import forwards_ahead, unused_receives
from counterflow.parallel.pipeline.runtime.handlers import Handlers
from counterflow.parallel.pipeline.runtime.operation import (
    LossFunction,
    Microbatches,
    Operation,
    StepState,
    as_tuple,
    bind,
    random_state,
    set_random_state,
    split_microbatches,
)
from counterflow.parallel.pipeline.runtime.overlap import Interleaver
from counterflow.parallel.pipeline.runtime.p2p import Transport, specs_of
from counterflow.parallel.pipeline.runtime.payload import Payload
from counterflow.parallel.pipeline.runtime.stage import Stage

logger = logging.getLogger(__name__)


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

    stages: this rank's stages by index. group: the ranks of the pipeline, in order; None: one process.
    make_group: makes groups within the pipeline (`Transport.connect`); None: where ranks outside do not follow.
    reschedule: the lowered schedule for another number of micro-batches, for steps that have another.
    uniform_shapes: False where a stage's output shape depends on values; each activation then carries its
    shape, at the price of one more message.
    p2p_chunk_bytes: tensors larger than this travel in chunks (see p2p.py); the same on every rank, None: whole.
    p2p_payload: in what precision tensors travel, the same on every rank; None: in their own.
    interleaver: the communication point of the stages' modules; it runs the halves of a pair together. None: nothing
    travels within a stage, and a pair is a forward and then a backward.
    offloader: does OFFLOAD and RELOAD, and keeps the activations within its budget. None: they stay where they are.
    on_unreached: called after each step with the stages that its loss does not depend on: between stages their gradient
    travels as zeros. None: nobody tells zero from none.

    Raises ValueError: where stages or group do not fit the schedule.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        *,
        group: dist.ProcessGroup | None = None,
        make_group: MakeGroup | None = None,
        device: torch.device | None = None,
        meter: ByteMeter | None = None,
        reschedule: Callable[[int], Schedule] | None = None,
        uniform_shapes: bool = True,
        p2p_chunk_bytes: int | None = None,
        p2p_payload: Payload | None = None,
        interleaver: Interleaver | None = None,
        offloader: Offloader | None = None,
        on_unreached: Callable[[range], None] | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.transport = Transport(
            group,
            device=self.device,
            meter=meter,
            chunk_bytes=p2p_chunk_bytes,
            payload=p2p_payload,
        )
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
        self.interleaver = interleaver
        self.offloader = offloader
        if offloader is not None:
            for stage in self.stages.values():
                stage.lets_go = True
        self._overlaps = interleaver is not None and interleaver.overlap
        is_first = self.rank == 0 and (group is None or dist.get_rank() == 0)
        if self._overlaps and is_first and (reason := why_not_overlapped(schedule)):
            logger.warning("%s", reason)
        self._uniform_shapes, self._on_unreached = uniform_shapes, on_unreached
        self._is_broken = self._is_closed = False
        # Called ahead of each action, by who counts what it takes.
        self.observe: Callable[[object], None] | None = None
        self._reschedule = reschedule
        self._schedules = {schedule.num_microbatches: schedule}
        self._forward_schedules: dict[int, Schedule] = {}
        self._operations: dict[int, tuple[Schedule, tuple[Operation, ...]]] = {}
        self._aheads: dict[int, tuple[int, ...]] = {}
        self._handlers = Handlers(
            self.stages,
            self.transport,
            uniform_shapes=uniform_shapes,
            interleaver=interleaver,
            offloader=offloader,
            recorder=Recorder(self.device),
        )
        self.transport.connect(schedule, make_group)

    def schedule_for(self, num_microbatches: int | None) -> Schedule:
        """The schedule of a step with so many micro-batches (None: as built), made and verified once for each.

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
            made = self._reschedule(num_microbatches)
            verify(made)
            self._schedules[num_microbatches] = made
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
        validate: Callable[[], bool] | None = None,
    ) -> StepResult:
        """Forward and backward of every micro-batch; gradients are accumulated and reduced over copies.

        inputs, targets: one entry a micro-batch, or a tensor cut along dim 0; read on the ranks that hold the
            first (last) stage, ignored elsewhere.
        loss_fn: (output, target) -> scalar, called on the last stage.
        num_microbatches: of this step, the same on every rank; None: as the pipeline was built.
        loss_reduction: `mean` differentiates the mean over micro-batches, `sum` their sum.
        share_losses: every rank of the pipeline gets all losses (one small all-reduce).
        recorder: of a step that has begun and goes on afterwards (the optimizer); None: the step is this call.
        validate: called once, on every rank, ahead of the first action that is not part of a forward, while the
            gradients of the step before are still there; whether it changed the parameters, on all ranks or on
            none. If so the forwards so far are thrown away and done again (Note [Running ahead] in ahead.py).

        Raises ValueError: where inputs or targets do not fit the schedule. PipelineError: where a peer is lost.
        """
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction='{loss_reduction}': must be 'mean' or 'sum'")
        schedule = self.schedule_for(num_microbatches)
        scale = 1.0 / schedule.num_microbatches if loss_reduction == "mean" else 1.0
        recorder = recorder or Recorder(self.device)
        if validate is None:
            self._begin_step()
        return self._run(
            schedule, inputs, targets, loss_fn, scale, share_losses, return_outputs, recorder, validate
        )

    def rehearse(self, inputs: Microbatches, targets: Microbatches, loss_fn: LossFunction) -> None:
        """Run every stage once, one after another: what a device does at first use is done before a step needs it.

        inputs, targets: one micro-batch for each direction of the schedule; see `step`. Every rank calls it. Random
        generators and buffers of the modules are afterwards what they were before, and so are the gradients of plain
        modules; those of sharded ones are cleared by the next step. Activations stay where they are meanwhile.

        Why: Note [First uses] in analysis/first_use.py.
        """
        schedule = serial(self.schedule)
        verify(schedule)
        modules = [stage.module for stage in self.stages.values()]
        kept = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]
        gradients = [(each, each.grad) for module in modules for each in module.parameters()]
        generators = random_state(self.device)
        for parameter, _ in gradients:
            parameter.grad = None
        self._begin_step()
        with self._handlers.without_offloading():
            self._run(schedule, inputs, targets, loss_fn, 1.0, False, False, Recorder(self.device))
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
        set_random_state(self.device, generators)
        del self._operations[id(schedule)]

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

    def close(self) -> None:
        """Let go of the stages' layers and of the communicators that were made for it; nothing runs afterwards.

        It waits for no other rank, and may be called again.
        """
        self._is_closed = True
        for stage in self.stages.values():
            stage.close()
        self.transport.close()
        if self.offloader is not None:
            self.offloader.close()
        self._operations.clear()

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
        validate: Callable[[], bool] | None = None,
    ) -> StepResult:
        if self._is_closed:
            raise RuntimeError("the pipeline has been closed; build it anew")
        if self._is_broken:
            raise RuntimeError(
                "an earlier step failed, so the ranks are out of step; build the pipeline anew"
            )
        count, last = schedule.num_microbatches, schedule.num_stages - 1
        step = StepState(
            schedule=schedule,
            loss_fn=loss_fn,
            loss_scale=scale,
            inputs=split_microbatches("inputs", inputs, count) if 0 in self.stages else (),
            targets=split_microbatches("targets", targets, count) if last in self.stages else (),
            losses=torch.zeros(count, device=self.device),
            outputs={} if return_outputs else None,
        )
        if 0 in self.stages:
            for direction in range(schedule.num_directions):
                shapes = {
                    specs_of(as_tuple(step.inputs[microbatch]))
                    for microbatch in range(count)
                    if schedule.direction_of(microbatch) == direction
                }
                step.uniform[0, direction] = self._uniform_shapes and len(shapes) == 1
        interleaver, offloader = self.interleaver, self.offloader
        self._handlers.begin(step, recorder)
        try:
            with (
                recorder.pipeline(),
                interleaver.step(recorder) if interleaver else nullcontext(),
                offloader.step(recorder) if offloader else nullcontext(),
            ):
                self._execute(schedule, validate)
        except BaseException:
            for stage in self.stages.values():
                stage.discard()
            # Other ranks are somewhere in the step that failed here, and messages are under way.
            self._is_broken = self.transport.size > 1
            raise
        if share_losses and self.group is not None and self.transport.size > 1:
            with recorder.record(Activity.COLLECTIVE_WAIT):
                all_reduce(step.losses, Axis(group=self.group, name="pipeline"))
        if self._on_unreached is not None and torch.is_grad_enabled():
            with recorder.record(Activity.COLLECTIVE_WAIT):
                self._on_unreached(self._unreached(schedule))
        outputs = None if step.outputs is None else tuple(step.outputs.get(index) for index in range(count))
        self._handlers.begin(StepState(), recorder)
        recorder.stop()
        return StepResult(losses=step.losses, outputs=outputs, recorder=recorder)

    def _unreached(self, schedule: Schedule) -> range:
        """Stages of any rank that the loss of the step does not depend on: those before one that passes nothing on."""
        passes_on = torch.zeros(schedule.num_stages, device=self.device)
        for index, stage in self.stages.items():
            passes_on[index] = stage.passes_on
        all_reduce(passes_on, Axis(group=self.group, name="pipeline"))
        flags = cast("list[float]", passes_on.tolist())  # pyright: ignore[reportUnknownMemberType]
        return range(max((index for index in range(1, len(flags)) if not flags[index]), default=0))

    def _begin_step(self) -> None:
        for stage in self.stages.values():
            stage.passes_on = False
            stage.parameters.begin_step()

    def _execute(self, schedule: Schedule, validate: Callable[[], bool] | None) -> None:
        """Every action of this rank, and the end of what they started."""
        operations = self._operations_of(schedule)
        first = 0 if validate is None else self._run_ahead(schedule, operations, validate)
        self._do(schedule, operations[first:])
        begin = self._handlers.recorder.now()
        self.transport.finish_step()
        self._handlers.recorder.add(Activity.SEND_WAIT, -1, None, begin)
        for index, stage in self.stages.items():
            assert stage.num_live == 0, "the schedule left activations behind"
            assert stage.weight_grads.is_empty, "the schedule left weight gradients behind"
            if torch.is_grad_enabled():
                begin = self._handlers.recorder.now()
                stage.parameters.finish_step()
                self._handlers.recorder.add(Activity.REDUCE, index, None, begin)

    def _do(self, schedule: Schedule, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if self.observe is not None:
                self.observe(operation.action)
            try:
                operation.run(operation)
            except Exception as error:
                error.add_note(f"in action {operation.action} of pipeline rank {self.rank} ({schedule.name})")
                raise

    def _run_ahead(
        self, schedule: Schedule, operations: Sequence[Operation], validate: Callable[[], bool]
    ) -> int:
        """Do what may be done before `validate`, and call it; the number of operations done for good."""
        if id(schedule) not in self._aheads:
            self._aheads[id(schedule)] = forwards_ahead(schedule)
        ahead = self._aheads[id(schedule)]
        # What runs ahead has no pairs: an action is an operation.
        count = ahead[self.rank]
        generators = random_state(self.device)
        begin = self._handlers.recorder.num_intervals
        self._do(schedule, operations[:count])
        end = self._handlers.recorder.num_intervals
        if validate():
            self._handlers.recorder.forget(begin, end)
            self._take_back(schedule, ahead, operations[:count])
            set_random_state(self.device, generators)
            count = 0
        self._begin_step()
        return count

    def _take_back(self, schedule: Schedule, ahead: Sequence[int], operations: Sequence[Operation]) -> None:
        """Undo the forwards in `operations`: as if the step had not begun, on this rank and on the wire."""
        receipts = self._handlers.state.receipts
        for action in unused_receives(schedule, ahead, self.rank):
            operation = self._operation(schedule, action)
            if (action.stage, action.kind, operation.microbatch) not in receipts:
                operation.run(operation)
        for receipt in receipts.values():
            self.transport.wait(receipt)
        self.transport.finish_step()
        whole: set[int] = set()
        for operation in operations:
            if operation.action.kind is Kind.UNSHARD:
                whole.add(operation.stage.index)
            elif operation.action.kind is Kind.RESHARD:
                whole.discard(operation.stage.index)
        for index, stage in self.stages.items():
            if index in whole:
                stage.parameters.reshard()
            stage.discard()
        if self.offloader is not None:
            self.offloader.discard()
        self._handlers.state.restart()

    def _operations_of(self, schedule: Schedule) -> tuple[Operation, ...]:
        """This rank's actions with all that can be known before the step, looked up once for each schedule."""
        if id(schedule) not in self._operations:
            actions = schedule.actions[self.rank]
            passes = passes_after(actions)
            made = tuple(
                self._operation(schedule, each, passes.get(index, ()))
                for index, action in enumerate(actions)
                for each in ((action,) if self._overlaps else action.leaves)
            )
            # The schedule is kept with them: its id must not be given to another.
            self._operations[id(schedule)] = (schedule, made)
        return self._operations[id(schedule)][1]

    def _operation(self, schedule: Schedule, action: Action, passes: tuple[Kind, ...] = ()) -> Operation:
        return bind(
            schedule,
            action,
            rank=self.rank,
            stages=self.stages,
            handlers=self._handlers.table,
            passes=passes,
        )
