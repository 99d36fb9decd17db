"""Shape of a model (config group `model`)."""

from __future__ import annotations

from dataclasses import dataclass

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    vocab_size: null takes the tokenizer's. head_dim: null is hidden_size / num_heads.
    """

    name: str = "llama"
    vocab_size: int | None = None
    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.{name}={value}: must be at least 1; set it to 1 or more")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"model.{name}={getattr(self, name)}: must be positive; leave it out for the default"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads}: must be a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}; each group of query heads shares one key/value head"
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size}: must be a multiple of "
                f"model.num_heads={self.num_heads}, or set model.head_dim"
            )
        if self.dim_per_head % 2:
            raise ValueError(f"model.head_dim={self.dim_per_head}: RoPE rotates pairs; use an even head_dim")

    @property
    def dim_per_head(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads
