"""A pipeline stage of a decoder: some of its layers, with the embedding or the head at the ends.

Parameters have the same names in every layout, those of the whole model: `embedding.weight`,
`layers.{index}.attention.q_proj.weight`, .., `norm.weight`, `head.weight`, `mtp.layers.{index}.proj.weight`, ..
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from counterflow.models.attention import attention
from counterflow.models.config import ModelConfig
from counterflow.models.head import OutputHead
from counterflow.models.mlp import dense_mlp
from counterflow.models.moe import MoE
from counterflow.models.mtp import MTP
from counterflow.models.norm import LayerNorm, RMSNorm, hidden_norm
from counterflow.models.positions import LearnedPositions, RotaryTable, rotary_table
from counterflow.models.recompute import NOTHING, Parts, Plan
from counterflow.parallel.collectives import Axis
from counterflow.parallel.expert.exchange import ExpertParallel, even_placement
from counterflow.parallel.ops.recompute import recompute, recompute_module
from counterflow.parallel.parameters import initialize, place, placement_of
from counterflow.parallel.tensor.layers import VocabParallelEmbedding, enter_tensor_parallel
from counterflow.parallel.zero.blocks import Block


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); in and out [B, S, H], or [B, S/tp, H].

    layer: index in the whole model, which decides whether `mlp` is dense or a mixture of experts.
    recomputed: what is run again in the backward instead of being kept for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer: int = 0,
        rotary: RotaryTable | None,
        tensor: Axis,
        sequence_parallel: bool,
        experts: ExpertParallel | None = None,
        recomputed: Parts = NOTHING,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.attention_norm = hidden_norm(
            config, sequence_parallel=sequence_parallel, device=device, dtype=dtype
        )
        self.attention = attention(
            config,
            rotary=rotary,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.mlp_norm = hidden_norm(config, sequence_parallel=sequence_parallel, device=device, dtype=dtype)
        self.mlp: nn.Module
        if config.is_moe_layer(layer):
            self.mlp = MoE(
                config,
                layer=layer,
                tensor=tensor,
                sequence_parallel=sequence_parallel,
                experts=experts or _all_experts_here(config),
                device=device,
                dtype=dtype,
            )
        else:
            self.mlp = dense_mlp(
                config, tensor=tensor, sequence_parallel=sequence_parallel, device=device, dtype=dtype
            )
        if isinstance(self.mlp, MoE):
            if "experts" in recomputed:
                recompute_module(self.mlp.experts)
            if "shared_experts" in recomputed and self.mlp.shared is not None:
                recompute_module(self.mlp.shared)

    def forward(self, x: Tensor) -> Tensor:
        return recompute(self._run, x) if "block" in self.recomputed else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        x = recompute(self._attend, x) if "attention" in self.recomputed else self._attend(x)
        is_recomputed = not self.recomputed.isdisjoint(("mlp", "moe"))
        return recompute(self._feed_forward, x) if is_recomputed else self._feed_forward(x)

    # With the residual in it, for the gradients of `x` to be added up in one order, recomputed or not.
    def _attend(self, x: Tensor) -> Tensor:
        return x + self.attention(self.attention_norm(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.mlp_norm(x))


class TransformerStage(nn.Module):
    """Layers `layer_range` of the model, on this tensor-parallel rank.

    The first stage takes tokens, int64 [B, S]; the others take hidden states [B, S, H], or [B, S/tp, H] under
    sequence parallelism, which is also what all but the last return. The last returns this rank's slice of
    the logits, [B, S, padded vocab_size / tp]; columns past `vocab_size` are padding (see parallel/ops/loss.py).

    With tied embeddings a stage that is first and last has one parameter, `embedding.weight`, in both places;
    otherwise the last stage has a copy, `head.weight`, placed as tied to `embedding.weight`: their gradients
    have to be summed over the two stages.

    With MTP modules the last stage returns the logits and the hidden states [B, S, H] or [B, S/tp, H] after its
    norm, which `mtp_predictions` takes. Where it is not the first, it has a copy of the embedding too,
    `mtp.embedding.weight` (or, with tied embeddings, `head.weight` is that copy).

    loss_chunk_tokens: not None: the last stage returns the hidden states only, which `token_loss` takes, and so does
    it those of `further_states`; there are no whole logits.
    experts: where the experts of mixture layers are; None: all of them here (one process).
    recomputed: of the layers and MTP modules, what is run again in the backward.

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
        experts: ExpertParallel | None = None,
        recomputed: Plan | None = None,
        loss_chunk_tokens: int | None = None,
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
        self.positions: LearnedPositions | None = None
        if first and config.position == "learned":
            self.positions = LearnedPositions(
                config, tensor=tensor, sequence_parallel=sequence_parallel, device=device, dtype=dtype
            )
        rotary = rotary_table(config)

        def block(index: int) -> TransformerBlock:
            return TransformerBlock(
                config,
                layer=index,
                rotary=rotary,
                tensor=tensor,
                sequence_parallel=sequence_parallel,
                experts=experts,
                recomputed=(recomputed or {}).get(index, NOTHING),
                device=device,
                dtype=dtype,
            )

        self.layers = nn.ModuleDict({str(index): block(index) for index in layer_range})
        self.norm: RMSNorm | LayerNorm | None = None
        self.head: OutputHead | None = None
        if last:
            self.norm = hidden_norm(config, sequence_parallel=sequence_parallel, device=device, dtype=dtype)
            self.head = OutputHead(
                config.hidden_size,
                vocab_size,
                tensor,
                sequence_parallel=sequence_parallel,
                chunk_tokens=loss_chunk_tokens,
                init_std=config.init_std,
                tied_to="embedding.weight" if config.tie_embeddings else None,
                device=device,
                dtype=dtype,
            )
            if config.tie_embeddings and self.embedding is not None:
                self.head.weight = self.embedding.weight
        self.mtp: MTP | None = None
        if last and config.mtp.num_modules:
            self.mtp = MTP(
                config,
                blocks=[block(config.num_layers + index) for index in range(config.mtp.num_modules)],
                tensor=tensor,
                sequence_parallel=sequence_parallel,
                vocab_size=None if first else vocab_size,
                device=device,
                dtype=dtype,
            )
            if config.tie_embeddings and self.mtp.embedding is not None and self.head is not None:
                self.mtp.embedding.weight = self.head.weight

    def blocks(self) -> list[Block]:
        """What of the stage comes and goes together under ZeRO, in the order of a forward."""
        mtp = self.mtp
        ends: list[tuple[str, tuple[nn.Module | None, ...], bool]] = [
            ("embedding", (self.embedding, self.positions), False),
            *((f"layers.{index}", (layer,), True) for index, layer in self.layers.items()),
            ("head", (self.norm, self.head), True),
        ]
        if mtp is not None:
            ends.append(("mtp.embedding", (mtp.embedding,), False))
            ends += [(f"mtp.layers.{index}", (layer,), True) for index, layer in mtp.layers.items()]
        found: list[Block] = []
        for name, parts, reads_in_backward in ends:
            modules = tuple(module for module in parts if module is not None)
            if modules:
                is_revisited = mtp is not None and name in ("head", "embedding", "mtp.embedding")
                found.append(
                    Block(
                        name=name,
                        modules=modules,
                        reads_in_backward=reads_in_backward,
                        is_revisited=is_revisited,
                        defers=reads_in_backward and (name != "head" or not self.has_chunked_loss),
                    )
                )
        return found

    @property
    def has_chunked_loss(self) -> bool:
        """Whether its head computes the loss in chunks of tokens."""
        return self.head is not None and self.head.chunk_tokens is not None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.embedding is not None:
            x = self.embedding(x)
        if self.positions is not None:
            x = self.positions(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is None:
            return x
        hidden = self.norm(x)
        if self.has_chunked_loss:
            return hidden
        logits = self._logits(hidden)
        return logits if self.mtp is None else (logits, hidden)

    def mtp_predictions(self, hidden: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of each MTP module: logits, as `forward` returns them, and their targets, int64 [B, S].

        hidden: the second result of `forward`. targets: int64 [B, S], the token after each position.
        """
        return [(self._logits(state), wanted) for state, wanted in self.further_states(hidden, targets)]

    def further_states(self, hidden: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of each MTP module: hidden states, [B, S, H] or [B, S/tp, H], and what they predict; as above."""
        assert self.mtp is not None
        embed = self.mtp.embedding or self.embedding
        assert embed is not None
        return self.mtp(hidden, targets, embed)

    def token_loss(
        self, hidden: Tensor, targets: Tensor, found: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """The sum of the tokens' losses, with `loss_chunk_tokens`; see `chunked_cross_entropy`, also for `found`.

        hidden: as `forward` or `further_states` returns it. targets: int64 [B, S].
        """
        assert self.head is not None
        return self.head(hidden, targets, found)

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(enter_tensor_parallel(hidden, self.tensor, sequence_parallel=self.sequence_parallel))


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


def _all_experts_here(config: ModelConfig) -> ExpertParallel:
    return ExpertParallel(axis=Axis(name="expert"), experts_by_rank=even_placement(config.moe.num_experts, 1))
