"""Multi-token prediction: modules that predict further tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Module k (from 0) sees, at position i, the state that the model (or module k - 1) has of the tokens up to i + k and the
embedding of token i + k + 1, and predicts token i + k + 2 with the model's own head. The modules live on the last
stage, where `targets` are the tokens: targets[i] is token i + 1.

The states handed on are those after the final norm (the model's, then each module's own), as the released DeepSeek-V3
weights expect them; an embedding comes before a state in the projection's input, as there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from counterflow.models.config import ModelConfig
from counterflow.models.norm import hidden_norm
from counterflow.parallel.collectives import Axis
from counterflow.parallel.tensor.layers import ReplicatedLinear, VocabParallelEmbedding

IGNORED = -100


class MTPModule(nn.Module):
    """One further prediction: norm(block(proj([norm(embedding), norm(state)]))).

    In and out [B, S, H], or [B, S/tp, H] under sequence parallelism. block: like the last layer of the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        block: nn.Module,
        sequence_parallel: bool,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return hidden_norm(config, sequence_parallel=sequence_parallel, device=device, dtype=dtype)

        self.embedding_norm = norm()
        self.hidden_norm = norm()
        self.proj = ReplicatedLinear(
            2 * config.hidden_size,
            config.hidden_size,
            sequence_parallel=sequence_parallel,
            init_std=config.init_std,
            device=device,
            dtype=dtype,
        )
        self.block = block
        self.norm = norm()

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        x = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        return self.norm(self.block(self.proj(x)))


class MTP(nn.Module):
    """The modules of a model, and on a last stage that is not the first a copy of the embedding.

    The copy, `embedding.weight`, is placed as tied to the model's `embedding.weight`: their gradients have to be
    summed over the two stages. With tied embeddings it is the parameter of the output head there.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        blocks: list[nn.Module],
        tensor: Axis,
        sequence_parallel: bool,
        vocab_size: int | None,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """vocab_size: None where the model's embedding is on this stage."""
        super().__init__()
        self.embedding: VocabParallelEmbedding | None = None
        if vocab_size is not None:
            self.embedding = VocabParallelEmbedding(
                vocab_size,
                config.hidden_size,
                tensor,
                sequence_parallel=sequence_parallel,
                init_std=config.init_std,
                tied_to="embedding.weight",
                device=device,
                dtype=dtype,
            )
        self.layers = nn.ModuleDict(
            {
                str(index): MTPModule(
                    config, block=block, sequence_parallel=sequence_parallel, device=device, dtype=dtype
                )
                for index, block in enumerate(blocks)
            }
        )

    def forward(
        self, hidden: Tensor, targets: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """For each module its states, [B, S, H] or [B, S/tp, H], and what they predict, int64 [B, S].

        hidden: of the model after its final norm. targets: int64 [B, S]. embed: of tokens [B, S].
        Positions that have no such token, at the end or next to an ignored target, are IGNORED.
        """
        found: list[tuple[Tensor, Tensor]] = []
        known = torch.ones_like(targets, dtype=torch.bool)
        for layer in self.layers.values():
            known = known & (targets != IGNORED)
            # Position i attends to none after it, so what stands at the end in place of a token harms nobody.
            hidden = layer(hidden, embed(targets.masked_fill(targets == IGNORED, 0)))
            targets = shifted(targets)
            found.append((hidden, targets.masked_fill(~known, IGNORED)))
        return found


def shifted(targets: Tensor) -> Tensor:
    """targets [B, S] with each position's replaced by the next one's; the last has none."""
    return torch.nn.functional.pad(targets[:, 1:], (0, 1), value=IGNORED)
