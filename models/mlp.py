"""The feed-forward part of a block: SwiGLU (Shazeer, arXiv 2002.05202), or GELU (arXiv 1606.08415)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterflow.models.config import ModelConfig
from counterflow.parallel.collectives import Axis
from counterflow.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, enter_tensor_parallel


class SwiGLU(nn.Module):
    """y = down(silu(gate(x)) * up(x)); in and out [B, S, H], or [B, S/tp, H] under sequence parallelism.

    intermediate_size: None takes the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tensor: Axis,
        sequence_parallel: bool,
        intermediate_size: int | None = None,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.tensor = tensor
        self.sequence_parallel = sequence_parallel
        size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = _up(config, size, tensor, device, dtype)
        self.up_proj = _up(config, size, tensor, device, dtype)
        self.down_proj = _down(config, size, tensor, sequence_parallel, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = enter_tensor_parallel(x, self.tensor, sequence_parallel=self.sequence_parallel)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GELUMLP(nn.Module):
    """y = down(gelu(up(x))), GELU in its tanh form; shapes as SwiGLU's."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tensor: Axis,
        sequence_parallel: bool,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.tensor = tensor
        self.sequence_parallel = sequence_parallel
        self.up_proj = _up(config, config.intermediate_size, tensor, device, dtype)
        self.down_proj = _down(config, config.intermediate_size, tensor, sequence_parallel, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = enter_tensor_parallel(x, self.tensor, sequence_parallel=self.sequence_parallel)
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


def dense_mlp(
    config: ModelConfig,
    *,
    tensor: Axis,
    sequence_parallel: bool,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
) -> SwiGLU | GELUMLP:
    """The MLP of a layer without experts."""
    cls = SwiGLU if config.activation == "swiglu" else GELUMLP
    return cls(config, tensor=tensor, sequence_parallel=sequence_parallel, device=device, dtype=dtype)


def _up(
    config: ModelConfig, size: int, tensor: Axis, device: torch.device | str, dtype: torch.dtype
) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        config.hidden_size,
        size,
        tensor,
        bias=config.mlp_bias,
        init_std=config.init_std,
        device=device,
        dtype=dtype,
    )


def _down(
    config: ModelConfig,
    size: int,
    tensor: Axis,
    sequence_parallel: bool,
    device: torch.device | str,
    dtype: torch.dtype,
) -> RowParallelLinear:
    return RowParallelLinear(
        size,
        config.hidden_size,
        tensor,
        sequence_parallel=sequence_parallel,
        bias=config.mlp_bias,
        init_std=config.init_std / math.sqrt(2 * config.num_layers),
        device=device,
        dtype=dtype,
    )
