"""The feed-forward part of a block: SwiGLU (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from parallel.collectives import Axis
from parallel.layers import ColumnParallelLinear, RowParallelLinear, enter_tensor_parallel


class SwiGLU(nn.Module):
    """y = down(silu(gate(x)) * up(x)); in and out [B, S, H], or [B, S/tp, H] under sequence parallelism."""

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

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(
                config.hidden_size,
                config.intermediate_size,
                tensor,
                init_std=config.init_std,
                device=device,
                dtype=dtype,
            )

        self.gate_proj = column()
        self.up_proj = column()
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            tensor,
            sequence_parallel=sequence_parallel,
            init_std=config.init_std / math.sqrt(2 * config.num_layers),
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = enter_tensor_parallel(x, self.tensor, sequence_parallel=self.sequence_parallel)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
