"""What a stage keeps of its inputs and outputs where their memory is not to stay until the backward.

An ordinary backward starts from the output tensors and ends in the input tensors, which therefore live as long as the
graph between them. Here the graph ends in a node that takes the gradient and keeps no tensor, and is entered by its
edge: what autograd saved for itself can then leave memory (parallel/offload).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(slots=True)
class Entrance:
    """An input without its memory: `spec` is on the meta device. grad: after the backward."""

    spec: Tensor
    device: torch.device
    grad: Tensor | None = None


class _Enter(torch.autograd.Function):
    """anchor, tensor, entrance -> tensor, whose gradient goes to the entrance."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, entrance: Entrance) -> Tensor:
        ctx.entrance = entrance
        return tensor.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.entrance.grad = grads[0]
        return None, None, None


def enter(tensor: Tensor) -> tuple[Tensor, Entrance]:
    """`tensor` as an input that wants a gradient, and where that will be."""
    entrance = Entrance(spec_of(tensor), tensor.device)
    # Something that needs a gradient, so that there is a node.
    anchor = torch.empty(0, requires_grad=True)
    apply = cast(Callable[..., Tensor], _Enter.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(anchor, tensor, entrance), entrance


def gradient_of(entered: Tensor | Entrance) -> Tensor:
    """Of an input, zero where nothing depends on it."""
    if entered.grad is not None:
        return entered.grad
    if isinstance(entered, Entrance):
        return torch.zeros_like(entered.spec, device=entered.device)
    return torch.zeros_like(entered)


def is_floating(entered: Tensor | Entrance) -> bool:
    return (entered.spec if isinstance(entered, Entrance) else entered).is_floating_point()


def spec_of(tensor: Tensor) -> Tensor:
    """Shape and type, without memory."""
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def edges_of(outputs: Sequence[Tensor]) -> tuple[GradientEdge | None, ...]:
    """Where a backward enters the graph of each; None: it has none."""
    return tuple(get_gradient_edge(out) if out.requires_grad else None for out in outputs)
