"""A pipeline stage of a Llama-family decoder: some of its layers, with the embedding or the head at the ends.

Parameters have the same names in every layout, those of the whole model: `embedding.weight`,
`layers.{index}.attention.q_proj.weight`, .., `norm.weight`, `head.weight`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.attention import Attention, RotaryTable
from models.config import ModelConfig
from models.mlp import SwiGLU
from models.norm import RMSNorm
from parallel.collectives import Axis
from parallel.layers import ColumnParallelLinear, VocabParallelEmbedding, enter_tensor_parallel
from parallel.parameters import initialize, place, placement_of


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); in and out [B, S, H], or [B, S/tp, H]."""

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
        self.attention_norm = _norm(config, sequence_parallel, device, dtype)
        self.attention = Attention(
            config,
            rotary=rotary,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.mlp_norm = _norm(config, sequence_parallel, device, dtype)
        self.mlp = SwiGLU(
            config, tensor=tensor, sequence_parallel=sequence_parallel, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TransformerStage(nn.Module):
    """Layers `layer_range` of the model, on this tensor-parallel rank.

    The first stage takes tokens, int64 [B, S]; the others take hidden states [B, S, H], or [B, S/tp, H] under
    sequence parallelism, which is also what all but the last return. The last returns this rank's slice of
    the logits, [B, S, padded vocab_size / tp]; columns past `vocab_size` are padding (see parallel/loss.py).

    With tied embeddings a stage that is first and last has one parameter, `embedding.weight`, in both places;
    otherwise the last stage has a copy, `head.weight`, placed as tied to `embedding.weight`: their gradients
    have to be summed over the two stages.

    A stage built on the meta device gets its values from `materialize`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_range: range,
        *,
        first: bool,
        last: bool,
        tensor: Axis,
        sequence_parallel: bool,
        vocab_size: int,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        assert 0 <= layer_range.start <= layer_range.stop <= config.num_layers, layer_range
        self.config = config
        self.layer_range = layer_range
        self.tensor = tensor
        self.sequence_parallel = sequence_parallel
        self.embedding: VocabParallelEmbedding | None = None
        if first:
            self.embedding = VocabParallelEmbedding(
                vocab_size,
                config.hidden_size,
                tensor,
                sequence_parallel=sequence_parallel,
                init_std=config.init_std,
                device=device,
                dtype=dtype,
            )
        rotary = RotaryTable(config.dim_per_head, config.rope_theta)
        self.layers = nn.ModuleDict(
            {
                str(index): TransformerBlock(
                    config,
                    rotary=rotary,
                    tensor=tensor,
                    sequence_parallel=sequence_parallel,
                    device=device,
                    dtype=dtype,
                )
                for index in layer_range
            }
        )
        self.norm: RMSNorm | None = None
        self.head: ColumnParallelLinear | None = None
        if last:
            self.norm = _norm(config, sequence_parallel, device, dtype)
            self.head = ColumnParallelLinear(
                config.hidden_size,
                vocab_size,
                tensor,
                pad=True,
                init_std=config.init_std,
                tied_to="embedding.weight" if config.tie_embeddings else None,
                device=device,
                dtype=dtype,
            )
            if config.tie_embeddings and self.embedding is not None:
                self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = enter_tensor_parallel(self.norm(x), self.tensor, sequence_parallel=self.sequence_parallel)
            x = self.head(x)
        return x


def materialize(module: nn.Module, *, device: torch.device | str, seed: int) -> None:
    """Give every parameter of `module` memory on `device` and its initial values, by its global name.

    nn.Module.to_empty would make new parameters without their placements, and two out of a tied one.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        placement = placement_of(parameter)
        new = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        made[parameter] = place(new, placement)
        initialize(new, name, placement, seed)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            setattr(owner, name, made[parameter])


def _norm(
    config: ModelConfig, sequence_parallel: bool, device: torch.device | str, dtype: torch.dtype
) -> RMSNorm:
    return RMSNorm(
        config.hidden_size,
        eps=config.norm_eps,
        sequence_parallel=sequence_parallel,
        device=device,
        dtype=dtype,
    )
