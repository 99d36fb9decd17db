"""Normalisation: root-mean-square (Zhang and Sennrich, arXiv 1910.07467) and layer (Ba et al., arXiv 1607.06450).

Every tensor-parallel rank holds the whole parameters, and they take no weight decay. `partial_over_tensor`: this
rank's gradient is one term of a sum over the tensor axis. So it is between tensor-parallel regions under sequence
parallelism, where a rank sees its part of the sequence, and within a region on heads, where it sees its heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterflow.models.config import ModelConfig
from counterflow.parallel.parameters import ParameterPlacement, place

# (x, weight, bias, eps) -> the norm over the last dim; another implementation of the same, by another library.
NormKernel = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim [.., size], computed in fp32 inside."""

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        partial_over_tensor: bool,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.kernel: NormKernel | None = None
        self.weight = _parameter(size, "ones", partial_over_tensor, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x, self.weight, None, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim [.., size]."""

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        partial_over_tensor: bool,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.kernel: NormKernel | None = None
        self.weight = _parameter(size, "ones", partial_over_tensor, device, dtype)
        self.bias = _parameter(size, "zeros", partial_over_tensor, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x, self.weight, self.bias, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def hidden_norm(
    config: ModelConfig,
    *,
    sequence_parallel: bool,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
) -> RMSNorm | LayerNorm:
    """The model's norm of hidden states between tensor-parallel regions."""
    cls = RMSNorm if config.norm == "rms" else LayerNorm
    return cls(
        config.hidden_size,
        eps=config.norm_eps,
        partial_over_tensor=sequence_parallel,
        device=device,
        dtype=dtype,
    )


def _parameter(
    size: int,
    init: Literal["ones", "zeros"],
    partial_over_tensor: bool,
    device: torch.device | str,
    dtype: torch.dtype,
) -> nn.Parameter:
    return place(
        nn.Parameter(torch.empty(size, device=device, dtype=dtype)),
        ParameterPlacement(
            global_shape=(size,), partial_over_tensor=partial_over_tensor, weight_decay=False, init=init
        ),
    )
