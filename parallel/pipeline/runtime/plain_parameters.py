"""Parameters of a stage as the user's module holds them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from counterflow.parallel.pipeline.gradient_sum import GradientSum
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.ir.trace import Recorder

logger = logging.getLogger(__name__)

# Where a tensor keeps what watches its gradient.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class PlainParameters:
    """Parameters as the user's module holds them: gradients in `.grad`, summed over `mirror` where given.

    A parameter without part in a step keeps the gradient it had, None mostly, as in plain torch.
    mirror: the group of ranks with a copy of this stage (two-copy schedules).
    apart: parameters that other stages of this rank hold as well; the last of those stages has them as `shared`, and
        sums them over `mirror` when all have added their parts.
    """

    def __init__(
        self,
        module: nn.Module,
        mirror: dist.ProcessGroup | None = None,
        *,
        apart: Collection[nn.Parameter] = (),
        shared: Collection[nn.Parameter] = (),
    ) -> None:
        self._module, self._shared_here = module, tuple(shared)
        self._others = {id(parameter) for parameter in apart}
        self._built = tuple(module.parameters())
        self._without: list[nn.Parameter] = []
        self._hooked: set[int] = set()
        self._own = None if mirror is None else GradientSum(self._own_now(), mirror)
        self._shared = None if mirror is None or not shared else GradientSum(shared, mirror)
        self._before: dict[str, tuple[int, int]] = {}
        self._is_said = False

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:  # of an embedding that a linear is tied to
            parameter.grad = parameter.grad.to_dense()
        return parameter.grad

    def is_watched(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._hooked or any(bool(getattr(parameter, hooks, None)) for hooks in _HOOKS)

    def begin_step(self) -> None:
        """Gradients accumulate until the user's optimizer zeroes them, as in plain torch.

        Raises ValueError: where there are two copies, and the module has other parameters than when they were made.
        """
        if self._own is not None:
            self._require_the_built()
            self._before = _state_of(self._module)
        parameters = (*self._own_now(), *self._shared_here)
        self._without = [parameter for parameter in parameters if parameter.grad is None]
        self._hooked = {id(parameter) for parameter in self._module.parameters() if _is_hooked(parameter)}
        for total in (self._own, self._shared):
            if total is not None:
                total.begin()

    def running(
        self, kind: Kind, stage: int, microbatch: int, recorder: Recorder
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def unshard(self, passes: Sequence[Kind] = ()) -> None: ...

    def wait_unshard(self) -> bool:
        return False

    def reshard(self) -> None: ...

    def reduce_grad(self) -> None:
        if self._own is not None:
            self._own.start()

    def finish_step(self) -> None:
        if self._own is not None:
            self._own.finish()
            self._say_what_drifts()
        if self._shared is not None:
            self._shared.start()
            self._shared.finish()

    def forget_zeros(self) -> None:
        """After a step whose loss does not depend on the stage: gradients that are zero are none, as in plain torch."""
        for parameter in self._without:
            grad = parameter.grad
            if grad is not None and not grad.is_sparse and not grad.any():
                parameter.grad = None

    def discard(self) -> None: ...

    def close(self) -> None:
        """Let go of the mirror's group."""
        self._own = self._shared = None

    def _own_now(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if id(parameter) not in self._others]

    def _require_the_built(self) -> None:
        built = {id(parameter) for parameter in self._built}
        now = {id(parameter): name for name, parameter in self._module.named_parameters()}
        if now.keys() != built:
            new = [name for key, name in now.items() if key not in built]
            raise ValueError(
                f"{', '.join(new) or 'parameters that are gone'}: not a parameter of the module when the pipeline was "
                "built, so the two copies of the stage would train each one of its own; change the module before "
                "build_pipeline, or close the pipeline and build it anew"
            )

    def _say_what_drifts(self) -> None:
        if self._is_said:
            return
        now = _state_of(self._module)
        changed = [name for name, state in now.items() if state != self._before.get(name)]
        if changed:
            self._is_said = True
            logger.warning(
                "the forward changes %s: each of the two copies of a stage has its own, which its own micro-batches "
                "change, so what is computed from them is not what one process computes; a schedule with one copy of "
                "each stage computes that",
                ", ".join(changed),
            )


def _state_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """What changes where somebody changes a buffer or a parameter."""
    tensors = (*module.named_buffers(), *module.named_parameters())
    return {name: (id(tensor), tensor._version) for name, tensor in tensors}


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Whether hooks are on the node that accumulates the gradient of `parameter`.

    A node does not tell its hooks, but a new one is put in the same table as those before it.
    """
    if not parameter.requires_grad:
        return False
    node = get_gradient_edge(parameter).node
    return any(_has_hooks(register) for register in (node.register_prehook, node.register_hook))


def _has_hooks(register: Callable[..., object]) -> bool:
    handle = register(_nothing)
    hooks = cast("dict[int, object] | None", getattr(handle, "hooks_dict_ref")())  # noqa: B009
    count = 0 if hooks is None else len(hooks)
    cast("torch.utils.hooks.RemovableHandle", handle).remove()
    return count > 1


def _nothing(*_: object) -> None: ...
