"""RMSNorm against its formula in fp64."""

from __future__ import annotations

import pytest
import torch

from counterflow.models.norm import RMSNorm
from counterflow.models.transformer import materialize
from counterflow.parallel.parameters import placement_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_values_are_the_formula_rounded_once(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(2)
    norm = RMSNorm(64, eps=1e-5, partial_over_tensor=False, dtype=dtype)
    materialize(norm, device="cpu", seed=0)
    with torch.no_grad():
        norm.weight.add_(torch.randn(64).to(dtype))
    x = (scale * torch.randn(3, 5, 64)).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    y = norm(x)
    assert y.dtype == dtype
    # Summed in bf16 the mean square would be off by several roundings.
    torch.testing.assert_close(
        y.double(),
        expected,
        rtol=4 * torch.finfo(torch.float32).eps
        if dtype == torch.float32
        else torch.finfo(dtype).eps / 2 * 1.01,
        atol=0,
    )


def test_placement() -> None:
    for sequence_parallel in (False, True):
        placement = placement_of(RMSNorm(8, eps=1e-5, partial_over_tensor=sequence_parallel).weight)
        assert placement.partial_over_tensor == sequence_parallel
        assert not placement.weight_decay
        assert placement.init == "ones"
