"""What of a run its step time depends on, beside the model and the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout of ranks and how a step is run on it.

    recompute: nothing, the products and the softmax of attention ("selective", Korthikanti et al., arXiv 2205.05198),
    norms and projections up from latents ("norms", DeepSeek-V3), or all but a layer's input ("full").
    flash: attention is one fused kernel. fused: SwiGLU, RoPE and the loss are. dropout: on attention and on what
    is added to the residual.
    gradient_bytes: of an element as it is reduced. overlap_tensor: the reduction of an input's gradient travels
    under the product of the weight's. overlap_data: gradients are reduced, and weights gathered, under other work.
    overlap_pipeline: messages between stages travel under computation. scatter_messages: tensor ranks each send a
    part of them. zero_stage: 0 all-reduces gradients; from 1 on they are scattered and weights are gathered; at 3
    weights are gathered for each use.
    post_validation: no rank waits for another between steps (zero-bubble's optimizer), so a step takes the longest
    span. layers_per_stage: of each stage; empty: `partition` of equal numbers. node_limit: most nodes that a token
    goes to.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    seq_length: int
    vocab_size: int
    micro_batch_size: int = 1
    num_microbatches: int
    schedule: str = "1f1b"
    num_chunks: int = 1
    layers_per_stage: tuple[int, ...] = ()
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "norms", "full"] = "none"
    flash: bool = True
    fused: bool = True
    dropout: bool = False
    fp8: bool = False
    gradient_bytes: int = 4
    overlap_tensor: bool = False
    overlap_data: bool = False
    overlap_pipeline: bool = False
    scatter_messages: bool = False
    post_validation: bool = False
    zero_stage: int = 0
    node_limit: int | None = None

    def __post_init__(self) -> None:
        sizes = (
            "tensor",
            "pipeline",
            "data",
            "expert",
            "seq_length",
            "micro_batch_size",
            "num_microbatches",
            "num_chunks",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a size; set it to 1 or more")

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch_size * self.seq_length

    @property
    def step_tokens(self) -> int:
        return self.tokens * self.num_microbatches * self.data

    @property
    def padded_vocab(self) -> int:
        """As Megatron-LM pads it."""
        multiple = 128 * self.tensor
        return -(-self.vocab_size // multiple) * multiple
