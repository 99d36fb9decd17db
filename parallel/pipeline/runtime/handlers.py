"""What each kind of action does: one handler for each, over this rank's stages and the transport between ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from counterflow.parallel.offload.offloader import Offloader
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.ir.trace import Activity, Recorder
from counterflow.parallel.pipeline.runtime.operation import Operation, StepState, as_tuple, half_of
from counterflow.parallel.pipeline.runtime.overlap import Half, Interleaver
from counterflow.parallel.pipeline.runtime.p2p import Channel, Transport, specs_of
from counterflow.parallel.pipeline.runtime.stage import Stage


class Handlers:
    """The handlers of one rank, by kind in `table`; they work on the step that `begin` was called with.

    interleaver, offloader, uniform_shapes: see `Runtime`.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        transport: Transport,
        *,
        uniform_shapes: bool,
        interleaver: Interleaver | None,
        offloader: Offloader | None,
        recorder: Recorder,
    ) -> None:
        self._stages, self._transport, self._uniform_shapes = stages, transport, uniform_shapes
        self._interleaver, self._offloader = interleaver, offloader
        self._overlaps = interleaver is not None and interleaver.overlap
        self.begin(StepState(), recorder)
        self.table: Mapping[Kind, Callable[[Operation], None]] = {
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
            Kind.OFFLOAD: self._offload,
            Kind.RELOAD: self._reload,
        }

    def begin(self, state: StepState, recorder: Recorder) -> None:
        """What follows is of this step."""
        self.state, self.recorder = state, recorder

    @contextmanager
    def without_offloading(self) -> Generator[None]:
        """Activations stay where they are."""
        offloader, self._offloader = self._offloader, None
        try:
            yield
        finally:
            self._offloader = offloader

    # What others wait for comes first in each handler: after an idle wait every line costs cache misses.

    def _forward(self, operation: Operation) -> None:
        inputs = self._inputs_of(operation)
        begin = self.recorder.now()
        if self._interleaver is not None:
            self._interleaver.alone(half_of(operation))
        outputs = self._run_forward(operation, inputs)
        self.recorder.add(Activity.FORWARD, operation.stage.index, operation.microbatch, begin)
        self._pass_on(operation, outputs)

    def _inputs_of(self, operation: Operation) -> tuple[Tensor, ...]:
        """What the forward starts from, once it and the parameters are here."""
        step, stage, microbatch = self.state, operation.stage, operation.microbatch
        index, recorder = stage.index, self.recorder
        if index == 0:
            inputs = as_tuple(step.inputs[microbatch])
        elif receipt := step.receipts.pop((index, Kind.RECV_F, microbatch), None):
            begin = recorder.now()
            inputs = self._transport.wait(receipt)
            recorder.add(Activity.RECEIVE_WAIT, index, microbatch, begin)
            step.uniform[index, operation.direction] = self._uniform_shapes and self._transport.is_uniform(
                receipt.peer, receipt.channel
            )
        else:
            inputs = step.handed.pop((index, Kind.F, microbatch))
            step.uniform[index, operation.direction] = step.uniform[index - 1, operation.direction]
        self._wait_unshard(stage, microbatch)
        if self._offloader is not None and torch.is_grad_enabled():
            begin = recorder.now()
            if self._offloader.reserve(index):
                recorder.add(Activity.OFFLOAD_WAIT, index, microbatch, begin)
        return inputs

    def _run_forward(self, operation: Operation, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        stage, microbatch, offloader = operation.stage, operation.microbatch, self._offloader
        catching = nullcontext()
        if offloader is not None and torch.is_grad_enabled():
            catching = offloader.catching(stage.index, microbatch)
        with self._running(operation), catching:
            outputs = stage.forward(microbatch, inputs)
            if operation.is_last:
                self._loss(stage, microbatch, outputs)
        return outputs

    def _pass_on(self, operation: Operation, outputs: tuple[Tensor, ...]) -> None:
        """What follows a forward: its outputs to the next stage's rank."""
        step, index, microbatch = self.state, operation.stage.index, operation.microbatch
        if not operation.is_last:
            if operation.is_peer_here:
                step.handed[index + 1, Kind.F, microbatch] = tuple(out.detach() for out in outputs)
            else:
                step.to_send[index, Kind.F, microbatch] = outputs
        step.num_live += 1
        self.recorder.peak_live_activations = max(self.recorder.peak_live_activations, step.num_live)

    def _loss(self, stage: Stage, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        step = self.state
        loss = step.loss_fn(outputs[0] if len(outputs) == 1 else outputs, step.targets[microbatch])
        if torch.is_grad_enabled():
            stage.set_loss(microbatch, loss if step.loss_scale == 1.0 else loss * step.loss_scale)
        step.losses[microbatch] = loss.detach()
        if step.outputs is not None:
            detached = tuple(out.detach() for out in outputs)
            step.outputs[microbatch] = detached[0] if len(detached) == 1 else detached

    def _backward(self, operation: Operation) -> None:
        grads = self._grads_of(operation)
        defer = operation.action.kind is Kind.I
        begin = self.recorder.now()
        if self._interleaver is not None:
            self._interleaver.alone(self._backward_half(operation))
        grad_inputs = self._run_backward(operation, grads)
        activity = Activity.INPUT_GRADIENT if defer else Activity.BACKWARD
        self.recorder.add(activity, operation.stage.index, operation.microbatch, begin)
        self._pass_back(operation, grad_inputs)
        if defer:
            self._count_held(0)

    def _pair(self, operation: Operation) -> None:
        """A forward and a backward together, see overlap.py; both wait for what they start from beforehand."""
        assert self._interleaver is not None
        forward, backward = operation.halves
        inputs, grads = self._inputs_of(forward), self._grads_of(backward)
        outputs: list[tuple[Tensor, ...]] = []
        grad_inputs: list[tuple[Tensor, ...]] = []
        self._interleaver.pair(
            half_of(forward, lambda: outputs.append(self._run_forward(forward, inputs))),
            self._backward_half(backward, lambda: grad_inputs.append(self._run_backward(backward, grads))),
        )
        self._pass_on(forward, outputs[0])
        self._pass_back(backward, grad_inputs[0])

    def _grads_of(self, operation: Operation) -> tuple[Tensor, ...] | None:
        """What the backward starts from, once it and the parameters are here; None: from the loss."""
        step, stage, microbatch = self.state, operation.stage, operation.microbatch
        index, recorder = stage.index, self.recorder
        grads: tuple[Tensor, ...] | None = None
        if not operation.is_last:
            if receipt := step.receipts.pop((index, Kind.RECV_B, microbatch), None):
                begin = recorder.now()
                grads = self._transport.wait(receipt)
                recorder.add(Activity.RECEIVE_WAIT, index, microbatch, begin)
                step.answers.append((receipt.peer, Channel(index + 1, Kind.SEND_F), microbatch))
            else:
                grads = step.handed.pop((index, Kind.B, microbatch))
        self._wait_unshard(stage, microbatch)
        if self._offloader is not None:
            begin = recorder.now()
            if self._offloader.fetch(index, microbatch):
                recorder.add(Activity.OFFLOAD_WAIT, index, microbatch, begin)
        return grads

    def _run_backward(self, operation: Operation, grads: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        stage, microbatch = operation.stage, operation.microbatch
        with self._running(operation):
            if operation.action.kind is Kind.I:
                return stage.backward(microbatch, grads, defer=True)
            if not self._fills(stage):
                return stage.backward(microbatch, grads, defer=False)
            grad_inputs = stage.backward(microbatch, grads, defer=True)
            self._count_held(0)
            stage.weight_backward(microbatch)
            return grad_inputs

    def _running(self, operation: Operation) -> AbstractContextManager[None]:
        """The stage's parameters know what runs within."""
        stage = operation.stage
        return stage.parameters.running(
            operation.action.kind, stage.index, operation.microbatch, self.recorder
        )

    def _fills(self, stage: Stage) -> bool:
        """Whether a full backward of `stage` puts its weight gradients off to where it waits for tokens."""
        return self._overlaps and self._interleaver is not None and self._interleaver.has_points(stage.index)

    def _backward_half(self, operation: Operation, run: Callable[[], None] | None = None) -> Half:
        stage, microbatch = operation.stage, operation.microbatch
        if operation.action.kind is Kind.I or not self._fills(stage):
            return half_of(operation, run)

        def fill() -> None:
            self._count_held(stage.weight_backward_so_far(microbatch))

        return half_of(operation, run, fill)

    def _count_held(self, more_bytes: int) -> None:
        """Keep the peak of what weight gradients hold: what they hold by now, and `more_bytes`."""
        held_bytes = more_bytes + sum(stage.weight_grads.held_bytes for stage in self._stages.values())
        recorder = self.recorder
        recorder.peak_held_weight_grad_bytes = max(recorder.peak_held_weight_grad_bytes, held_bytes)

    def _pass_back(self, operation: Operation, grad_inputs: tuple[Tensor, ...]) -> None:
        """What follows a backward: its gradients to the rank of the stage before."""
        step, index, microbatch = self.state, operation.stage.index, operation.microbatch
        if index > 0:
            if operation.is_peer_here:
                step.handed[index - 1, Kind.B, microbatch] = grad_inputs
            else:
                step.to_send[index, Kind.B, microbatch] = grad_inputs
        step.num_live -= 1
        if self._offloader is not None:
            self._offloader.release(index, microbatch)
        if operation.is_peer_here:
            self._settle()

    def _weight(self, operation: Operation) -> None:
        begin = self.recorder.now()
        with self._running(operation):
            operation.stage.weight_backward(operation.microbatch)
        self.recorder.add(Activity.WEIGHT_GRADIENT, operation.stage.index, operation.microbatch, begin)

    def _send_activation(self, operation: Operation) -> None:
        step, index, microbatch = self.state, operation.stage.index, operation.microbatch
        begin = self.recorder.now()
        outputs = step.to_send.pop((index, Kind.F, microbatch))
        uniform = step.uniform[index, operation.direction]
        self._transport.send(operation.peer, operation.channel, microbatch, outputs, uniform=uniform)
        self._settle()
        self.recorder.add(Activity.SEND_WAIT, index, microbatch, begin)

    def _send_gradient(self, operation: Operation) -> None:
        index, microbatch = operation.stage.index, operation.microbatch
        begin = self.recorder.now()
        grads = self.state.to_send.pop((index, Kind.B, microbatch))
        self._transport.send(operation.peer, operation.channel, microbatch, grads, uniform=True)
        self._settle()
        self.recorder.add(Activity.SEND_WAIT, index, microbatch, begin)

    def _settle(self) -> None:
        """Let go of activations that gradients have answered; it waits for nothing, and others wait for sends."""
        answers = self.state.answers
        while answers:
            self._transport.answered(*answers.pop())

    def _receive_activation(self, operation: Operation) -> None:
        receipt = self._transport.receive(operation.peer, operation.channel, operation.microbatch, None)
        self.state.receipts[operation.stage.index, Kind.RECV_F, operation.microbatch] = receipt

    def _receive_gradient(self, operation: Operation) -> None:
        step, stage, microbatch = self.state, operation.stage, operation.microbatch
        specs = tuple(spec for spec in specs_of(stage.outputs_of(microbatch)) if spec.is_differentiable)
        receipt = self._transport.receive(operation.peer, operation.channel, microbatch, specs)
        step.receipts[stage.index, Kind.RECV_B, microbatch] = receipt

    def _unshard(self, operation: Operation) -> None:
        begin = self.recorder.now()
        operation.stage.parameters.unshard(operation.passes)
        self.recorder.add(Activity.GATHER_WAIT, operation.stage.index, None, begin)

    def _reshard(self, operation: Operation) -> None:
        begin = self.recorder.now()
        operation.stage.parameters.reshard()
        self.recorder.add(Activity.GATHER_WAIT, operation.stage.index, None, begin)

    def _reduce_grad(self, operation: Operation) -> None:
        begin = self.recorder.now()
        operation.stage.parameters.reduce_grad()
        self.recorder.add(Activity.REDUCE, operation.stage.index, None, begin)

    def _offload(self, operation: Operation) -> None:
        assert self._offloader is not None, "a schedule with OFFLOAD, and nothing that does it"
        self._offloader.offload(operation.stage.index, operation.microbatch)

    def _reload(self, operation: Operation) -> None:
        assert self._offloader is not None, "a schedule with RELOAD, and nothing that does it"
        self._offloader.reload(operation.stage.index, operation.microbatch)

    def _wait_unshard(self, stage: Stage, microbatch: int) -> None:
        begin = self.recorder.now()
        if stage.parameters.wait_unshard():
            self.recorder.add(Activity.GATHER_WAIT, stage.index, microbatch, begin)
