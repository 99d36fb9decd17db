"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.parameters import ParameterPlacement, place


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim [.., size], computed in fp32 inside.

    Every tensor-parallel rank holds the whole weight, and it takes no weight decay. Under sequence
    parallelism each rank sees its part of the sequence only, so its gradient is one term of a sum over the
    tensor axis.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        sequence_parallel: bool,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = place(
            nn.Parameter(torch.empty(size, device=device, dtype=dtype)),
            ParameterPlacement(
                global_shape=(size,), partial_over_tensor=sequence_parallel, weight_decay=False, init="ones"
            ),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
