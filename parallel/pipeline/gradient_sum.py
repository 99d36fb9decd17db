"""Gradients summed over the ranks that hold a copy of the same parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis, all_reduce

# Kinds of a gradient, in the order in which one outweighs another in a sum.
_NONE, _SPARSE, _DENSE = range(3)


class GradientSum:
    """What a step adds to the `.grad` of `parameters`, summed over `group`.

    A parameter that had no gradient on any rank of the group has none afterwards: an optimizer passes it over, as it
    does without copies. Sparse gradients travel dense, and their sum is sparse again. What was in `.grad` before the
    step is a sum already, and is set aside meanwhile.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = tuple(parameters)
        self._axis = Axis(group=group)
        self._earlier: tuple[Tensor | None, ...] = ()
        self._trained: tuple[nn.Parameter, ...] = ()
        self._sums: list[Tensor] = []
        self._took_part = torch.zeros(0)
        self._works: list[dist.Work | None] = []

    def begin(self) -> None:
        """Before the step's first gradient."""
        self._earlier = tuple(parameter.grad for parameter in self._parameters)
        for parameter in self._parameters:
            parameter.grad = None

    def start(self) -> None:
        """After the step's last gradient here: start summing. Every rank of the group calls this in one order."""
        self._trained = tuple(parameter for parameter in self._parameters if parameter.requires_grad)
        if not self._trained:
            return
        self._took_part = torch.tensor(
            [_kind_of(parameter.grad) for parameter in self._trained],
            dtype=torch.uint8,
            device=self._trained[0].device,
        )
        self._works = [all_reduce(self._took_part, self._axis, op=dist.ReduceOp.MAX, async_op=True)]
        for parameter in self._trained:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self._sums.append((grad.to_dense() if grad.is_sparse else grad).contiguous())
            self._works.append(all_reduce(self._sums[-1], self._axis, async_op=True))

    def finish(self) -> None:
        """Return once the sums are in `.grad`."""
        for work in self._works:
            if work is not None:
                work.wait()
        took_part = cast("list[int]", self._took_part.tolist())  # pyright: ignore[reportUnknownMemberType]
        for parameter, total, took in zip(self._trained, self._sums, took_part, strict=True):
            parameter.grad = (total.to_sparse(1) if took == _SPARSE else total) if took else None
        for parameter, earlier in zip(self._parameters, self._earlier, strict=False):
            if earlier is not None:
                # In place: somebody may hold the tensor, an optimizer's flat buffer for one.
                parameter.grad = earlier if parameter.grad is None else _add(earlier, parameter.grad)
        self._earlier, self._trained, self._sums, self._works = (), (), [], []
        self._took_part = torch.zeros(0)


def _kind_of(grad: Tensor | None) -> int:
    if grad is None:
        return _NONE
    return _SPARSE if grad.is_sparse else _DENSE


def _add(earlier: Tensor, grad: Tensor) -> Tensor:
    return grad + earlier if earlier.is_sparse and not grad.is_sparse else earlier.add_(grad)
