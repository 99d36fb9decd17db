"""Causal self-attention: grouped queries (Ainslie et al., arXiv 2305.13245), and multi-head latent attention
(DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shapes: B batch, S sequence, H hidden, N query heads, K key/value heads, D head dim. N and K are those of
this rank: a tensor-parallel rank holds whole heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterflow.models.config import ModelConfig
from counterflow.models.norm import RMSNorm
from counterflow.models.positions import RotaryTable, rotate, softmax_scale
from counterflow.parallel.collectives import Axis
from counterflow.parallel.tensor.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    enter_tensor_parallel,
)


class Attention(nn.Module):
    """Grouped-query attention; in and out [B, S, H], or [B, S/tp, H] under sequence parallelism.

    rotary: None where positions are learned.
    Raises ValueError: where the tensor axis does not divide the key/value heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rotary: RotaryTable | None,
        tensor: Axis,
        sequence_parallel: bool,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _check_heads("model.num_kv_heads", config.num_kv_heads, tensor)
        self.tensor = tensor
        self.sequence_parallel = sequence_parallel
        self.head_dim = config.dim_per_head
        self.rotary = rotary
        self.scale = softmax_scale(config)

        def column(num_heads: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                config.hidden_size,
                num_heads * config.dim_per_head,
                tensor,
                bias=config.attention_bias,
                init_std=config.init_std,
                device=device,
                dtype=dtype,
            )

        def head_norm() -> RMSNorm:
            # All heads share the weight, and this rank sees its own heads only.
            return RMSNorm(
                config.dim_per_head,
                eps=config.norm_eps,
                partial_over_tensor=True,
                device=device,
                dtype=dtype,
            )

        self.q_proj = column(config.num_heads)
        self.k_proj = column(config.num_kv_heads)
        self.v_proj = column(config.num_kv_heads)
        self.q_norm = head_norm() if config.qk_norm else None
        self.k_norm = head_norm() if config.qk_norm else None
        self.o_proj = _output(
            config, config.num_heads * config.dim_per_head, tensor, sequence_parallel, device, dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        x = enter_tensor_parallel(x, self.tensor, sequence_parallel=self.sequence_parallel)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.rotary is not None:
            cos, sin = self.rotary.get(x.shape[1], x.device, q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Attention whose keys and values are made from one narrow latent of each token, and its queries from another.

    In and out [B, S, H], or [B, S/tp, H] under sequence parallelism. Every tensor-parallel rank makes the latents
    and norms them outside of the tensor-parallel region, of the tokens it has; they, not the hidden state, enter the
    region (one all-gather of q_lora_rank + kv_lora_rank + D_rope numbers a token). Within it the heads are cut over
    the axis. One rotary part of the key serves all heads.

    Raises ValueError: where the tensor axis does not divide the heads.
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
        _check_heads("model.num_heads", config.num_heads, tensor)
        mla = config.mla
        self.mla = mla
        self.tensor = tensor
        self.sequence_parallel = sequence_parallel
        self.rotary = rotary
        self.scale = softmax_scale(config)
        self.q_size = config.hidden_size if mla.q_lora_rank is None else mla.q_lora_rank

        def down(size: int) -> ReplicatedLinear:
            return ReplicatedLinear(
                config.hidden_size,
                size,
                sequence_parallel=sequence_parallel,
                init_std=config.init_std,
                device=device,
                dtype=dtype,
            )

        def norm(size: int) -> RMSNorm:
            return RMSNorm(
                size,
                eps=config.latent_norm_eps,
                partial_over_tensor=sequence_parallel,
                device=device,
                dtype=dtype,
            )

        def up(in_features: int, size_per_head: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                in_features,
                config.num_heads * size_per_head,
                tensor,
                init_std=config.init_std,
                device=device,
                dtype=dtype,
            )

        has_q_latent = mla.q_lora_rank is not None
        self.q_down_proj = down(self.q_size) if has_q_latent else None
        self.q_latent_norm = norm(self.q_size) if has_q_latent else None
        self.q_up_proj = up(self.q_size, mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        self.kv_down_proj = down(mla.kv_lora_rank + mla.qk_rope_head_dim)
        self.kv_latent_norm = norm(mla.kv_lora_rank)
        self.kv_up_proj = up(mla.kv_lora_rank, mla.qk_nope_head_dim + mla.v_head_dim)
        self.o_proj = _output(
            config, config.num_heads * mla.v_head_dim, tensor, sequence_parallel, device, dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        mla = self.mla
        q_latent = x
        if self.q_down_proj is not None and self.q_latent_norm is not None:
            q_latent = self.q_latent_norm(self.q_down_proj(x))
        kv_latent, k_rope = self.kv_down_proj(x).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        entering = torch.cat((q_latent, self.kv_latent_norm(kv_latent), k_rope), dim=-1)
        entering = enter_tensor_parallel(entering, self.tensor, sequence_parallel=self.sequence_parallel)
        q_latent, kv_latent, k_rope = entering.split(
            (self.q_size, mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1
        )

        q = self.q_up_proj(q_latent).unflatten(-1, (-1, mla.qk_nope_head_dim + mla.qk_rope_head_dim))
        kv = self.kv_up_proj(kv_latent).unflatten(-1, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        q_nope, q_rope = q.transpose(1, 2).split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        k_nope, v = kv.transpose(1, 2).split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        cos, sin = self.rotary.get(entering.shape[1], x.device, q.dtype)
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin).expand(-1, k_nope.shape[1], -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        # torch's fused kernel for CPUs has one size for all heads; with two it would fall back to one that keeps S x S
        # scores for the backward (four times slower at S = 1024).
        missing = max(0, mla.qk_nope_head_dim + mla.qk_rope_head_dim - mla.v_head_dim) if v.is_cpu else 0
        padded = F.pad(v, (0, missing)) if missing else v
        out = F.scaled_dot_product_attention(q, k, padded, is_causal=True, scale=self.scale)
        out = out[..., : mla.v_head_dim]
        return self.o_proj(out.transpose(1, 2).flatten(2))


def attention(
    config: ModelConfig,
    *,
    rotary: RotaryTable | None,
    tensor: Axis,
    sequence_parallel: bool,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
) -> Attention | LatentAttention:
    """The attention of a layer of `config`."""
    if not config.uses_mla:
        return Attention(
            config,
            rotary=rotary,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
    assert rotary is not None, "latent attention has rotary positions"
    return LatentAttention(
        config, rotary=rotary, tensor=tensor, sequence_parallel=sequence_parallel, device=device, dtype=dtype
    )


def _output(
    config: ModelConfig,
    in_features: int,
    tensor: Axis,
    sequence_parallel: bool,
    device: torch.device | str,
    dtype: torch.dtype,
) -> RowParallelLinear:
    return RowParallelLinear(
        in_features,
        config.hidden_size,
        tensor,
        sequence_parallel=sequence_parallel,
        bias=config.attention_bias and config.mlp_bias,
        init_std=config.init_std / math.sqrt(2 * config.num_layers),
        device=device,
        dtype=dtype,
    )


def _check_heads(name: str, num_heads: int, tensor: Axis) -> None:
    if num_heads % tensor.size:
        raise ValueError(
            f"{name}={num_heads}: must be a multiple of parallel.tensor_parallel_size={tensor.size}, which cuts "
            "attention by whole heads; use fewer tensor-parallel ranks or more "
            f"{'heads' if name == 'model.num_heads' else 'key/value heads'}"
        )
