"""Causal self-attention with grouped queries (Ainslie et al., arXiv 2305.13245) and rotary positions
(Su et al., arXiv 2104.09864).

Shapes: B batch, S sequence, H hidden, N query heads, K key/value heads, D head dim. N and K are those of
this rank: a tensor-parallel rank holds whole heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from parallel.collectives import Axis
from parallel.layers import ColumnParallelLinear, RowParallelLinear, enter_tensor_parallel


class RotaryTable:
    """The cosines and sines of rotary positions 0..length-1, kept per device and dtype.

    Not a buffer: a stage is built on the meta device, where a buffer would have no values, and a checkpoint
    has no use for what is computed. It grows with the longest sequence seen.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self._head_dim = head_dim
        self._theta = theta
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def get(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [length, D] in `dtype`: pair i turns by position * theta^(-2i/D)."""
        found = self._tables.get((device, dtype))
        if found is None or found[0].shape[0] < length:
            # Normal tensors even if an evaluation in inference mode comes first: a backward saves them.
            with torch.inference_mode(False):
                exponents = torch.arange(0, self._head_dim, 2, device=device, dtype=torch.float32)
                frequencies = 1.0 / self._theta ** (exponents / self._head_dim)
                positions = torch.arange(length, device=device, dtype=torch.float32)
                angles = torch.outer(positions, frequencies).repeat(1, 2)
                found = (angles.cos().to(dtype), angles.sin().to(dtype))
            self._tables[device, dtype] = found
        return found[0][:length], found[1][:length]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [B, heads, S, D] by its position; dim i is paired with dim i + D/2, as in HF's Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention; in and out [B, S, H], or [B, S/tp, H] under sequence parallelism.

    Raises ValueError: where the tensor axis does not divide the key/value heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rotary: RotaryTable,
        tensor: Axis,
        sequence_parallel: bool,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if config.num_kv_heads % tensor.size:
            raise ValueError(
                f"model.num_kv_heads={config.num_kv_heads}: must be a multiple of "
                f"parallel.tensor_parallel_size={tensor.size}, which cuts attention by whole heads; use "
                "fewer tensor-parallel ranks or more key/value heads"
            )
        self.tensor = tensor
        self.sequence_parallel = sequence_parallel
        self.head_dim = config.dim_per_head
        self.rotary = rotary

        def column(num_heads: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                config.hidden_size,
                num_heads * config.dim_per_head,
                tensor,
                init_std=config.init_std,
                device=device,
                dtype=dtype,
            )

        self.q_proj = column(config.num_heads)
        self.k_proj = column(config.num_kv_heads)
        self.v_proj = column(config.num_kv_heads)
        self.o_proj = RowParallelLinear(
            config.num_heads * config.dim_per_head,
            config.hidden_size,
            tensor,
            sequence_parallel=sequence_parallel,
            init_std=config.init_std / math.sqrt(2 * config.num_layers),
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = enter_tensor_parallel(x, self.tensor, sequence_parallel=self.sequence_parallel)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rotary.get(x.shape[1], x.device, q.dtype)
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))
