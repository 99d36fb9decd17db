"""The output head: logits, or the loss without whole ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis
from counterflow.parallel.ops.chunked_loss import chunked_cross_entropy
from counterflow.parallel.tensor.layers import ColumnParallelLinear


class OutputHead(ColumnParallelLinear):
    """A linear layer from hidden states to this rank's slice of the logits, padded so that the axis divides it.

    chunk_tokens: not None: it is called with targets too, and gives the loss, see `chunked_cross_entropy`. The loss is
    computed within this module, so that whoever brings its weight for it does so then.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        axis: Axis,
        *,
        sequence_parallel: bool,
        chunk_tokens: int | None = None,
        init_std: float = 0.02,
        tied_to: str | None = None,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            hidden_size,
            vocab_size,
            axis,
            pad=True,
            init_std=init_std,
            tied_to=tied_to,
            device=device,
            dtype=dtype,
        )
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.vocab_size, self.chunk_tokens = vocab_size, chunk_tokens

    def deferrable_parameters(self) -> tuple[nn.Parameter, ...]:
        return super().deferrable_parameters() if self.chunk_tokens is None else ()

    def forward(
        self,
        tensor: Tensor,
        targets: Tensor | None = None,
        found: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Logits of `tensor`, the gathered hidden states [B, S, H]; or, with targets, the sum of the losses.

        With targets `tensor` is [B, S, H], or [B, S/tp, H] under sequence parallelism. found: see
        `chunked_cross_entropy`.
        """
        if targets is None:
            return super().forward(tensor)
        assert self.chunk_tokens is not None
        assert not self.fp8
        return chunked_cross_entropy(
            tensor,
            self.weight,
            targets,
            self.axis,
            vocab_size=self.vocab_size,
            chunk_tokens=self.chunk_tokens,
            bias=self.bias,
            sequence_parallel=self.sequence_parallel,
            sink=self.weight_grad_sink,
            found=found,
        )
