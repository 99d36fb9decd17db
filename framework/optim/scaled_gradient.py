"""A loss whose gradient is scaled while its value stays; loss_scale.py decides by how much, without torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_scaled_gradient(loss: Tensor, scale: float) -> Tensor:
    """`loss`, whose gradient is `scale` times its own: what is recorded stays the loss."""
    if scale == 1.0 or not torch.is_grad_enabled():
        return loss
    apply: Any = _ScaleGradient.apply
    return apply(loss, scale)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None
