"""Which linear layers of a model multiply in fp8 (parallel/ops/fp8.py), and which shapes they may have. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterflow.models.config import ModelConfig

if TYPE_CHECKING:
    from counterflow.models.transformer import TransformerStage

_MULTIPLE = 16


def use_fp8(stage: TransformerStage) -> None:
    """Make the linear layers of attention, of MLPs and of shared experts multiply in fp8; not those of routed ones."""
    from counterflow.parallel.tensor.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

    for module in stage.layers.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
            assert all(size % _MULTIPLE == 0 for size in module.weight.shape), "see fp8_sizes"
            module.fp8 = True


def fp8_sizes(model: ModelConfig, tensor_parallel_size: int) -> dict[str, int]:
    """The rows and columns of those layers on one tensor-parallel rank, by what they are: each a multiple of 16."""
    sizes = {"model.hidden_size": model.hidden_size}
    tp = tensor_parallel_size
    if model.uses_mla:
        mla = model.mla
        if mla.q_lora_rank is not None:
            sizes["model.mla.q_lora_rank"] = mla.q_lora_rank
        sizes |= {
            "model.mla.kv_lora_rank": mla.kv_lora_rank,
            "model.mla.kv_lora_rank + qk_rope_head_dim": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "a rank's queries": model.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) // tp,
            "a rank's keys and values": model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) // tp,
            "a rank's heads": model.num_heads * mla.v_head_dim // tp,
        }
    else:
        sizes["a rank's heads"] = model.num_heads * model.dim_per_head // tp
        sizes["a rank's key/value heads"] = model.num_kv_heads * model.dim_per_head // tp
    if not model.is_moe_layer(model.num_layers - 1) or not model.is_moe_layer(0):
        sizes["a rank's model.intermediate_size"] = model.intermediate_size // tp
    if model.moe.num_experts and model.moe.num_shared_experts:
        sizes["a rank's shared experts"] = model.moe.num_shared_experts * model.expert_intermediate_size // tp
    return sizes


def fp8_problems(model: ModelConfig, tensor_parallel_size: int) -> list[str]:
    """The sizes that fp8 does not take, as sentences."""
    return [
        f"precision.linear=fp8: {name} is {size} with parallel.tensor_parallel_size={tensor_parallel_size}, and rows "
        f"and columns of products in fp8 are multiples of {_MULTIPLE}; change the shape, or set "
        "precision.linear=compute"
        for name, size in fp8_sizes(model, tensor_parallel_size).items()
        if size % _MULTIPLE
    ]
