"""Moves parameters between the whole model and one rank's slice of it, by their placements."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from counterflow.parallel.parameters import placement_of


def slice_of(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """The part of `whole` that `parameter` holds; zero where it holds padding."""
    placement = placement_of(parameter)
    assert placement.global_shape == tuple(whole.shape)
    if placement.tensor_dim is None:
        return whole
    size = parameter.shape[placement.tensor_dim]
    indices = torch.arange(placement.tensor_start, placement.tensor_start + size)
    inside = indices < whole.shape[placement.tensor_dim]
    out = whole.new_zeros(parameter.shape)
    out.index_copy_(
        placement.tensor_dim,
        torch.nonzero(inside).flatten(),
        whole.index_select(placement.tensor_dim, indices[inside]),
    )
    return out


def fill(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy into `parameter` its slice of `whole`."""
    with torch.no_grad():
        parameter.copy_(slice_of(parameter, whole))


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def assert_close_to_scale(actual: Tensor, expected: Tensor, name: str = "", ulps: float = 64) -> None:
    """Differences of at most `ulps` roundings of the largest expected value, for sums in another order."""
    difference = (actual - expected).abs().max().item()
    limit = ulps * torch.finfo(expected.dtype).eps * expected.abs().max().item()
    assert difference <= limit, f"{name}: differs by {difference:.3g}, limit {limit:.3g}"
