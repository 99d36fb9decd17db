"""Matrix products in fp8, each operand with one scale from its largest value (Micikevicius et al., arXiv 2209.05433).

Weights and activations are e4m3, gradients e5m2, which has more range and fewer bits. Of a linear layer the forward
and the input gradient are such products; the weight gradient is computed from the unrounded operands in their own
precision, and so are embeddings, the head, routers, norms, attention itself and routed experts. torch computes them
on CUDA devices of capability 8.9 and up (Ada, Hopper, Blackwell); that path has not run on a GPU yet. On a CPU it is
an emulation for tests.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

ACTIVATIONS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
# Rows and columns of what the kernels multiply.
MULTIPLE = 16
_CAPABILITY = (8, 9)


def why_no_fp8(device: torch.device) -> str | None:
    """Why products in fp8 cannot be computed on `device`; None: they can."""
    if not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} has no _scaled_mm"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _CAPABILITY:
            name = torch.cuda.get_device_name(device)
            return f"{name} has CUDA capability {capability[0]}.{capability[1]}, and fp8 begins with 8.9"
    return None


def fp8_product(x: Tensor, matrix: Tensor, dtype: torch.dtype = ACTIVATIONS) -> Tensor:
    """x [.., n] times matrix [m, n] transposed -> [.., m] in the dtype of `x`; dtype: what `x` is rounded to.

    n and m are multiples of `MULTIPLE`.
    """
    rows, x_scale = rounded(x.reshape(-1, x.shape[-1]), dtype)
    columns, matrix_scale = rounded(matrix, ACTIVATIONS)
    scaled_mm: Any = getattr(torch, "_scaled_mm")  # noqa: B009 - private, and in no stub
    out = cast(
        Tensor,
        scaled_mm(rows, columns.t(), scale_a=x_scale, scale_b=matrix_scale, out_dtype=x.dtype),
    )
    return out.view(*x.shape[:-1], matrix.shape[0])


def rounded(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`values` in an fp8 `dtype`, contiguous, and the fp32 scale that they are to be multiplied with."""
    exact = values.float()
    largest = exact.abs().amax() if exact.numel() else exact.new_zeros(())
    scale = (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)
    limit = torch.finfo(dtype).max
    return (exact / scale).clamp(-limit, limit).to(dtype).contiguous(), scale
