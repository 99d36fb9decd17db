"""Config of compression between replicas (config group `compression`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["none", "onebit", "int8", "int4", "fp8", "topk", "powersgd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionConfig:
    """How gradients and parameters travel between the replicas of a stage, and between those of its experts.

    method: `none` is fp32; `onebit` signs with a scale for each block; `int8`, `int4` and `fp8` numbers of so many
        bits with a scale for each block; `topk` the largest of each block with their indices; `powersgd` factors of
        low rank of each matrix.
    block_size: numbers that share a scale; of `topk`, that the largest are picked from.
    density: of `topk`, the share that is sent. rank: of `powersgd`.
    error_feedback: what a rank's compression left out is added to its next gradient.
    warmup_steps: first steps of a run whose gradients are not compressed.
    weights: how ZeRO 1 to 3 gathers matrices: `none` is in the precision of the computation; `int8`, `int4` and `fp8`
        numbers of so many bits with a scale for each weights_block_size of them. Masters stay exact.
    """

    method: Method = "none"
    block_size: int = 256
    density: float = 0.01
    rank: int = 4
    error_feedback: bool = True
    warmup_steps: int = 0
    weights: Literal["none", "int8", "int4", "fp8"] = "none"
    weights_block_size: int = 256

    def __post_init__(self) -> None:
        for name in ("block_size", "weights_block_size"):
            size = getattr(self, name)
            if not 8 <= size <= 32768 or size % 8:
                raise ValueError(
                    f"compression.{name}={size}: a multiple of 8 from 8 to 32768; 256 is the default"
                )
        if not 0 < self.density <= 0.5:
            raise ValueError(
                f"compression.density={self.density}: above 0 and at most 0.5, beyond which indices and values are no "
                "smaller than the gradient; 0.01 is the default"
            )
        if self.rank < 1:
            raise ValueError(f"compression.rank={self.rank}: a matrix has a rank of 1 or more; 4 is usual")
        if self.warmup_steps < 0:
            raise ValueError(
                f"compression.warmup_steps={self.warmup_steps}: a number of steps; set it to 0 or more"
            )
