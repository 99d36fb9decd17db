"""Positions: rotary (Su et al., arXiv 2104.09864), stretched by YaRN (Peng et al., arXiv 2309.00071), or learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from counterflow.models.config import ModelConfig, YarnConfig
from counterflow.parallel.collectives import Axis
from counterflow.parallel.parameters import ParameterPlacement, place


class RotaryTable:
    """The cosines and sines of rotary positions 0..length-1, kept per device and dtype.

    Not a buffer: a stage is built on the meta device, where a buffer would have no values, and a checkpoint
    has no use for what is computed. It grows with the longest sequence seen.
    """

    def __init__(self, head_dim: int, theta: float, yarn: YarnConfig | None = None) -> None:
        self._head_dim = head_dim
        self._theta = theta
        self._yarn = yarn or YarnConfig()
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def get(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [length, D] in `dtype`: pair i turns by position * frequency i."""
        found = self._tables.get((device, dtype))
        if found is None or found[0].shape[0] < length:
            # Normal tensors even if an evaluation in inference mode comes first: a backward saves them.
            with torch.inference_mode(False):
                frequencies = rotary_frequencies(self._head_dim, self._theta, self._yarn, device)
                positions = torch.arange(length, device=device, dtype=torch.float32)
                angles = torch.outer(positions, frequencies).repeat(1, 2)
                scale = rotary_scale(self._yarn)
                found = ((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype))
            self._tables[device, dtype] = found
        return found[0][:length], found[1][:length]


def rotary_frequencies(head_dim: int, theta: float, yarn: YarnConfig, device: torch.device) -> Tensor:
    """fp32 [D/2]: radians per position, theta^(-2i/D) for pair i.

    With YaRN, a pair that turns fewer than beta_slow times within the original context turns `factor` times slower,
    one that turns more than beta_fast times stays, and those between are mixed linearly (arXiv 2309.00071, section
    3.2). With `truncate` the bounds are rounded outwards to whole pairs, as published models have them.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (exponents / head_dim)
    if yarn.factor <= 1:
        return frequencies

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that turns so many times within the original context."""
        turns = yarn.original_seq_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, device=device, dtype=torch.float32)
    slowed = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
    return frequencies * (1 - slowed) + frequencies / yarn.factor * slowed


def rotary_scale(yarn: YarnConfig) -> float:
    """What cosines and sines are multiplied by; 1 without YaRN."""
    if yarn.factor > 1 and yarn.attention_factor is not None:
        return yarn.attention_factor
    return _mscale(yarn, yarn.mscale) / _mscale(yarn, yarn.mscale_all_dim)


def softmax_scale(config: ModelConfig) -> float:
    """What scores are multiplied by: 1 / sqrt(D), and with YaRN its temperature over all of a head's dims."""
    mla = config.mla
    size = mla.qk_nope_head_dim + mla.qk_rope_head_dim if config.uses_mla else config.dim_per_head
    return size**-0.5 * _mscale(config.yarn, config.yarn.mscale_all_dim) ** 2


def _mscale(yarn: YarnConfig, weight: float) -> float:
    return 1.0 if yarn.factor <= 1 else 0.1 * weight * math.log(yarn.factor) + 1.0


def rotary_table(config: ModelConfig) -> RotaryTable | None:
    """The table that all layers of a stage share; None with learned positions."""
    if config.position == "learned":
        return None
    size = config.mla.qk_rope_head_dim if config.uses_mla else config.dim_per_head
    return RotaryTable(size, config.rope_theta, config.yarn)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [B, heads, S, D] by its position; dim i is paired with dim i + D/2, as in HF's Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LearnedPositions(nn.Module):
    """Adds row i of a table to position i: x [B, S, H], or this rank's part [B, S/tp, H] under sequence parallelism.

    Raises ValueError: where the sequence is longer than the table.
    """

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
        shape = (config.max_seq_length, config.hidden_size)
        self.weight = place(
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype)),
            # Under sequence parallelism a rank has the gradient of its own rows, and zero for the others.
            ParameterPlacement(
                global_shape=shape, partial_over_tensor=sequence_parallel, init_std=config.init_std
            ),
        )

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        start = self.tensor.rank * length if self.sequence_parallel else 0
        total = length * self.tensor.size if self.sequence_parallel else length
        if total > self.weight.shape[0]:
            raise ValueError(
                f"a sequence of {total} tokens: model.max_seq_length={self.weight.shape[0]} positions are learned; "
                "raise model.max_seq_length, shorten the sequences, or set model.position=rope"
            )
        return x + self.weight[start : start + length]
