"""One stage on one rank: its module, the micro-batches in flight, and how its parameters come and go."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from counterflow.parallel.ops.weight_grad import WeightGradStore
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.ir.trace import Recorder
from counterflow.parallel.pipeline.runtime.adoption import Adoption, adopt, release
from counterflow.parallel.pipeline.runtime.boundary import (
    Entrance,
    edges_of,
    enter,
    gradient_of,
    is_floating,
    spec_of,
)


class StageParameters(Protocol):
    """What the runtime asks of a stage's parameters. Sharding, reduction and compression live behind it."""

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that gradients of `parameter` are accumulated in during a step."""
        ...

    def is_watched(self, parameter: nn.Parameter) -> bool:
        """Whether somebody else's hooks are to see the gradient of `parameter`, which then comes through autograd."""
        ...

    def begin_step(self) -> None:
        """Zero the accumulated gradients."""
        ...

    def running(
        self, kind: Kind, stage: int, microbatch: int, recorder: Recorder
    ) -> AbstractContextManager[None]:
        """An F, B, I or W of `stage` runs within; what it waits for goes to `recorder`."""
        ...

    def unshard(self, passes: Sequence[Kind] = ()) -> None:
        """UNSHARD: start gathering the parameters. passes: what reads them before the next RESHARD, in order."""
        ...

    def wait_unshard(self) -> bool:
        """Return once the whole parameters are here; whether there was something to wait for."""
        ...

    def reshard(self) -> None:
        """RESHARD: free the whole parameters."""
        ...

    def reduce_grad(self) -> None:
        """REDUCE_GRAD: start reducing the accumulated gradients over the replicas."""
        ...

    def finish_step(self) -> None:
        """Return once the reduced gradients are here."""
        ...

    def discard(self) -> None:
        """Forget what is under way, after a step that failed or was taken back."""
        ...

    def close(self) -> None:
        """Let go of the module and of groups; the stage runs no more."""
        ...


@dataclass(slots=True)
class _InFlight:
    inputs: tuple[Tensor | Entrance, ...]
    outputs: tuple[Tensor, ...]
    edges: tuple[GradientEdge | None, ...] | None = None
    loss: Tensor | None = None


class Stage:
    """A stage of the model on this rank.

    `forward` keeps what `backward` of the same micro-batch needs; with `defer` the weight gradients of
    linear layers wait for `weight_backward`. `adoption` says which parameters those are. splits: False where
    every gradient is to come through autograd, for somebody whose hooks wait for it there; nothing is deferred then.
    passes_on: whether a backward of this step has found that the loss depends on an input.
    lets_go: whether inputs and outputs are let go of after the forward, see parallel/pipeline/runtime/boundary.py.
    """

    def __init__(
        self, index: int, module: nn.Module, parameters: StageParameters, *, splits: bool = True
    ) -> None:
        self.index = index
        self.module = module
        self.parameters = parameters
        self.weight_grads = WeightGradStore(parameters.gradient_buffer, parameters.is_watched)
        self.adoption: Adoption = (
            adopt(module, self.weight_grads)
            if splits
            else Adoption(deferred=(), immediate=tuple(name for name, _ in module.named_parameters()))
        )
        self.lets_go = self.passes_on = False
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def num_live(self) -> int:
        """Micro-batches whose activations are held."""
        return len(self._in_flight)

    def forward(self, microbatch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the module on `inputs`; its outputs as a tuple.

        Raises TypeError: where the module returns something else than tensors.
        """
        needs_grad = self.index > 0 and torch.is_grad_enabled()
        if self.lets_go and torch.is_grad_enabled():
            return self._forward_and_let_go(microbatch, inputs, needs_grad)
        entered = tuple(self._entered(tensor, needs_grad) for tensor in inputs)
        outputs = _checked(self.index, self._apply(entered))
        if torch.is_grad_enabled():
            self._in_flight[microbatch] = _InFlight(entered, outputs)
        return outputs

    def _forward_and_let_go(
        self, microbatch: int, inputs: Sequence[Tensor], needs_grad: bool
    ) -> tuple[Tensor, ...]:
        """As `forward`; in flight are shapes and where the graph begins and ends."""
        entered: list[Tensor] = []
        kept: list[Tensor | Entrance] = []
        for tensor in inputs:
            given, entrance = self._entered(tensor, False), spec_of(tensor)
            if needs_grad and tensor.is_floating_point():
                given, entrance = enter(tensor)
            entered.append(given)
            kept.append(entrance)
        outputs = _checked(self.index, self._apply(tuple(entered)))
        self._in_flight[microbatch] = _InFlight(tuple(kept), tuple(map(spec_of, outputs)), edges_of(outputs))
        return outputs

    def _entered(self, tensor: Tensor, needs_grad: bool) -> Tensor:
        """What the module is given for `tensor`. One that needs a gradient itself is the user's: it keeps its graph."""
        if self.index == 0 and tensor.requires_grad:
            return tensor
        return tensor.detach().requires_grad_(needs_grad and tensor.is_floating_point())

    def outputs_of(self, microbatch: int) -> tuple[Tensor, ...]:
        assert microbatch in self._in_flight, (
            f"stage {self.index} has no forward of micro-batch {microbatch} yet"
        )
        return self._in_flight[microbatch].outputs

    def set_loss(self, microbatch: int, loss: Tensor) -> None:
        """On the last stage: backward of `microbatch` starts from `loss` (a scalar)."""
        self._in_flight[microbatch].loss = loss

    def backward(
        self, microbatch: int, grad_outputs: Sequence[Tensor] | None, *, defer: bool
    ) -> tuple[Tensor, ...]:
        """B, or I with `defer`: gradients of the floating-point inputs, in order.

        grad_outputs: one for each floating-point output; None on the last stage.
        """
        state = self._in_flight.pop(microbatch)
        if state.loss is not None:
            roots, grads = [state.loss], None
        else:
            assert grad_outputs is not None
            starts = state.outputs if state.edges is None else state.edges
            floating = [
                (out, start)
                for out, start in zip(state.outputs, starts, strict=True)
                if out.is_floating_point()
            ]
            pairs = [
                (start, grad)
                for (out, start), grad in zip(floating, grad_outputs, strict=True)
                if out.requires_grad and start is not None
            ]
            roots, grads = [start for start, _ in pairs], [grad for _, grad in pairs]
        with self.weight_grads.deferring(microbatch) if defer else nullcontext():
            if any(isinstance(root, GradientEdge) or root.requires_grad for root in roots):
                # Autograd takes edges as well.
                self._differentiate(cast("list[Tensor]", roots), grads)
        floating_inputs = [entered for entered in state.inputs if self.index > 0 and is_floating(entered)]
        self.passes_on |= any(entered.grad is not None for entered in floating_inputs)
        return tuple(map(gradient_of, floating_inputs))

    def _apply(self, inputs: tuple[Tensor, ...]) -> object:
        """The module's outputs; a subclass may have somebody else call it."""
        return self.module(*inputs)

    def _differentiate(self, roots: Sequence[Tensor], grads: Sequence[Tensor] | None) -> None:
        """Backward from `roots`; grads: None where the one root is the loss."""
        torch.autograd.backward(roots, grads)

    def weight_backward(self, microbatch: int) -> None:
        """W: the weight gradients that I of `microbatch` left."""
        self.weight_grads.run(microbatch)

    def weight_backward_so_far(self, microbatch: int) -> int:
        """During I of `microbatch`: the weight gradients it has left until now; how many bytes they kept."""
        return self.weight_grads.run_so_far(microbatch)

    def discard(self) -> None:
        """Drop every micro-batch in flight, after a step that failed or was taken back."""
        self._in_flight.clear()
        self.parameters.discard()
        self.weight_grads.discard()

    def close(self) -> None:
        """Give the module's layers their own forward back; the stage runs no more."""
        self.discard()
        self.parameters.close()
        release(self.module, self.weight_grads)


def _checked(stage: int, outputs: object) -> tuple[Tensor, ...]:
    if isinstance(outputs, Tensor):
        return (outputs,)
    values = cast("tuple[object, ...]", outputs) if isinstance(outputs, tuple) else ()
    tensors = tuple(value for value in values if isinstance(value, Tensor))
    if not tensors or len(tensors) != len(values):
        raise TypeError(
            f"stage {stage} returned a {type(cast(object, outputs)).__name__}; a stage returns a tensor or a "
            "tuple of tensors"
        )
    return tensors
