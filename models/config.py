"""Shape of a model (config group `model`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); in force where kv_lora_rank > 0.

    kv_lora_rank: width of the latent that keys and values are made from. q_lora_rank: of the queries'; null: queries
    come straight from the hidden state. qk_nope_head_dim, qk_rope_head_dim: parts of a query or key head without and
    with rotary positions. v_head_dim: of a value head. latent_norm_eps: of the norms of the latents; null: the model's
    norm_eps. DeepSeek's models have 1e-6 there whatever theirs is.
    """

    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    latent_norm_eps: float | None = None

    def __post_init__(self) -> None:
        if self.kv_lora_rank < 0:
            raise ValueError(
                f"model.mla.kv_lora_rank={self.kv_lora_rank}: a width; 0 means grouped-query attention"
            )
        for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.mla.{name}={value}: must be at least 1; set it to 1 or more")
        if self.latent_norm_eps is not None and not self.latent_norm_eps > 0:
            raise ValueError(
                f"model.mla.latent_norm_eps={self.latent_norm_eps}: must be positive; leave it out for model.norm_eps"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"model.mla.qk_rope_head_dim={self.qk_rope_head_dim}: RoPE rotates pairs; use an even number"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """Longer contexts by YaRN (Peng et al., arXiv 2309.00071); in force where factor > 1.

    factor: the context grows so many times over original_seq_length. beta_fast, beta_slow: rotations within the
    original context above which a frequency stays, and below which it is interpolated; truncate: the bounds between
    them are rounded outwards to whole pairs. mscale, mscale_all_dim: of attention's temperature, as DeepSeek-V3's
    configuration has them. attention_factor: what cosines and sines are multiplied by; null: what factor, mscale and
    mscale_all_dim make of it.
    """

    factor: float = 1.0
    original_seq_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(f"model.yarn.factor={self.factor}: 1 (off) or more")
        if self.original_seq_length < 1:
            raise ValueError(f"model.yarn.original_seq_length={self.original_seq_length}: 1 or more")
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(
                f"model.yarn.attention_factor={self.attention_factor}: must be positive; leave it out for the default"
            )
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"model.yarn.beta_fast={self.beta_fast}: must be above model.yarn.beta_slow={self.beta_slow}, and "
                "both above 0; 32 and 1 are usual"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts in place of the MLP; in force where num_experts > 0.

    num_experts, num_experts_per_token: routed experts of a layer, and how many a token goes to.
    expert_intermediate_size: of one expert; null: the model's. num_shared_experts: experts that every token passes,
        run as one MLP of so many times that size. shared_expert_gate: a sigmoid gate on it (Qwen2-MoE).
    num_dense_layers: the first layers keep the dense MLP.
    router: how logits become scores. normalize_weights: the weights of a token's experts add up to one (before
        routed_scaling_factor). With softmax and normalize_weights=false they are the probabilities as they are.
    num_groups, num_groups_per_token: experts in equal groups, a token's experts from so many of them only
        (node-limited routing, DeepSeek-V3, arXiv 2412.19437, section 2.1.2); a group's score is the sum of its two
        best biased scores with a sigmoid router, its best score with softmax.
    bias_update_speed: of the auxiliary-loss-free bias (Wang et al., arXiv 2408.15664), 0: no bias is learned.
    load_balance_loss: weight of the Switch loss (arXiv 2101.03961, eq. 4). load_balance_scope: over which tokens its
        expert fractions are counted: this micro-batch, or the global batch (of the step before).
    sequence_balance_loss: weight of DeepSeek-V3's loss within each sequence. z_loss: of ST-MoE's router z-loss.
    capacity_factor: null: no token is dropped; else an expert takes so many times its even share of a micro-batch's
        tokens, the first to come, and drops the rest.
    """

    num_experts: int = 0
    num_experts_per_token: int = 2
    expert_intermediate_size: int | None = None
    num_shared_experts: int = 0
    shared_expert_gate: bool = False
    num_dense_layers: int = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalize_weights: bool = True
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    num_groups_per_token: int = 1
    bias_update_speed: float = 0.0
    load_balance_loss: float = 0.0
    load_balance_scope: Literal["micro_batch", "global_batch"] = "micro_batch"
    sequence_balance_loss: float = 0.0
    z_loss: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_shared_experts", "num_dense_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.moe.{name}={getattr(self, name)}: a count; set it to 0 or more")
        for name in (
            "num_experts_per_token",
            "expert_intermediate_size",
            "num_groups",
            "num_groups_per_token",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.moe.{name}={value}: must be at least 1; set it to 1 or more")
        for name in ("bias_update_speed", "load_balance_loss", "sequence_balance_loss", "z_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"model.moe.{name}={getattr(self, name)}: 0 (off) or more")
        if not self.routed_scaling_factor > 0:
            raise ValueError(f"model.moe.routed_scaling_factor={self.routed_scaling_factor}: must be above 0")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(
                f"model.moe.capacity_factor={self.capacity_factor}: above 0, or null to drop no token"
            )
        if self.num_experts:
            self._check_routing()

    def _check_routing(self) -> None:
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"model.moe.num_groups={self.num_groups}: must divide model.moe.num_experts={self.num_experts} into "
                "equal groups"
            )
        if self.num_groups_per_token > self.num_groups:
            raise ValueError(
                f"model.moe.num_groups_per_token={self.num_groups_per_token}: there are "
                f"model.moe.num_groups={self.num_groups}; set it to so many at most"
            )
        reachable = self.num_experts // self.num_groups * self.num_groups_per_token
        if self.num_experts_per_token > reachable:
            raise ValueError(
                f"model.moe.num_experts_per_token={self.num_experts_per_token}: a token reaches {reachable} experts "
                f"in model.moe.num_groups_per_token={self.num_groups_per_token} of {self.num_groups} groups; lower it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig:
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules that predict further tokens.

    num_modules: 0: none. loss_weight: of the mean of their losses beside the main loss.
    """

    num_modules: int = 0
    loss_weight: float = 0.3

    def __post_init__(self) -> None:
        if self.num_modules < 0:
            raise ValueError(f"model.mtp.num_modules={self.num_modules}: a count; set it to 0 or more")
        if not self.loss_weight >= 0:
            raise ValueError(f"model.mtp.loss_weight={self.loss_weight}: 0 or more; 0.3 is DeepSeek-V3's")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: by default Llama's (RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases).

    vocab_size: null takes the tokenizer's. head_dim: null is hidden_size / num_heads; with `mla` unused.
    activation: `swiglu` has a gate, `gelu` (tanh form) none. norm: `rms` or `layer`, the latter with a bias.
    position: `rope`, or `learned` with a table of max_seq_length rows.
    max_seq_length: tokens of the sequences that the model is meant for: `counterflow plan` counts FLOPs at it. It is a
        limit with learned positions only.
    qk_norm: RMSNorm on each query and key head (Qwen3). attention_bias: on the query, key and value projections and,
        with mlp_bias, on all linears (GPT-3).
    """

    name: str = "llama"
    vocab_size: int | None = None
    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    activation: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    position: Literal["rope", "learned"] = "rope"
    max_seq_length: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    init_std: float = 0.02
    mla: MLAConfig = field(default_factory=MLAConfig)
    yarn: YarnConfig = field(default_factory=YarnConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "max_seq_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.{name}={value}: must be at least 1; set it to 1 or more")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"model.{name}={getattr(self, name)}: must be positive; leave it out for the default"
                )
        if self.moe.num_experts and self.moe.num_dense_layers > self.num_layers:
            raise ValueError(
                f"model.moe.num_dense_layers={self.moe.num_dense_layers}: there are model.num_layers="
                f"{self.num_layers}; set it to so many at most"
            )
        self._check_together()
        if self.uses_mla:
            return
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
        if self.position == "rope" and self.dim_per_head % 2:
            raise ValueError(f"model.head_dim={self.dim_per_head}: RoPE rotates pairs; use an even head_dim")

    def _check_together(self) -> None:
        refused: dict[str, tuple[bool, str]] = {
            "model.qk_norm=true": (
                self.uses_mla and self.qk_norm,
                "latent attention norms its latents instead",
            ),
            "model.attention_bias=true": (
                self.uses_mla and self.attention_bias,
                "latent attention has no biases",
            ),
            "model.position=learned": (
                self.position == "learned" and (self.uses_mla or self.yarn.factor > 1),
                "latent attention and YaRN are made of rotary positions",
            ),
            f"model.activation={self.activation}": (
                self.activation != "swiglu" and self.moe.num_experts > 0,
                "experts are SwiGLU",
            ),
            "model.mlp_bias=true": (self.mlp_bias and self.moe.num_experts > 0, "experts have no biases"),
        }
        for value, (is_refused, why) in refused.items():
            if is_refused:
                raise ValueError(f"{value}: not with this model: {why}; leave it out for the default")

    @property
    def dim_per_head(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    @property
    def uses_mla(self) -> bool:
        return self.mla.kv_lora_rank > 0

    @property
    def latent_norm_eps(self) -> float:
        return self.norm_eps if self.mla.latent_norm_eps is None else self.mla.latent_norm_eps

    @property
    def expert_intermediate_size(self) -> int:
        found = self.moe.expert_intermediate_size
        return self.intermediate_size if found is None else found

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index`, from 0, has experts; an MTP module's block is like the last layer's."""
        return self.moe.num_experts > 0 and index >= self.moe.num_dense_layers
