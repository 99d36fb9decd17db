"""A stage whose layers exchange rows with the other ranks of an axis, as expert layers do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis, all_to_all_into
from counterflow.parallel.pipeline.runtime.overlap import Interleaver

WIDTH = 6


class Swap(torch.autograd.Function):
    """Equal parts of the rows to every rank, forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, point: Interleaver) -> Tensor:
        ctx.axis, ctx.point = axis, point
        return exchanged(rows, axis, point)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return exchanged(grads[0], ctx.axis, ctx.point), None, None


def exchanged(rows: Tensor, axis: Axis, point: Interleaver) -> Tensor:
    out = torch.empty_like(rows)
    point.wait(all_to_all_into(out, rows.contiguous(), axis, async_op=True))
    return out


class ToyLayer(nn.Module):
    """attention, dispatch, expert, combine, each the least that can stand for it; x [rows, WIDTH]."""

    def __init__(self, axis: Axis, point: Interleaver) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.expert = make_expert()
        self.axis, self.point = axis, point

    def forward(self, x: Tensor) -> Tensor:
        swap: Any = Swap.apply
        x = x + self.attention(self.norm(x)).tanh()
        rows = swap(x, self.axis, self.point)
        return x + swap(self.expert(rows).tanh(), self.axis, self.point)


def make_expert() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))


def make_stage(index: int, num_layers: int, axis: Axis, point: Interleaver) -> nn.Sequential:
    """Attention is the same on every rank of `axis`, experts are its own."""
    layers: list[nn.Module] = []
    for number in range(num_layers):
        torch.manual_seed(1000 * index + number)
        layer = ToyLayer(axis, point)
        torch.manual_seed(1000 * index + 10 * number + 100_000 * (axis.rank + 1))
        layer.expert = make_expert()
        layers.append(layer)
    return nn.Sequential(*layers)
