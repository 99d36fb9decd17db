"""Gathers of parameters over their replicas: as numbers of the computation, or block-quantised on the wire.

Note [One set of values]
What is quantised is this rank's shard of the fp32 masters, and every rank, its owner too, computes with what the bytes
decode to, so replicas agree to the bit; the masters stay exact. Over the tensor axis the same must hold for what
every rank keeps whole there, beside shards of others that differ: a block with both would round it differently on
each. Such parameters (norms, biases, routers, projections to a latent space) are gathered as they are, in a unit of
their own. They are few. Method: the quantised weight communication of ZeRO++ (Wang et al., arXiv 2306.10209,
section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis, all_gather_into
from counterflow.parallel.compress.codec import Codec, Float8, Integers
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.compress.messages import Messages, exchange, gather, suits
from counterflow.parallel.compress.pieces import PiecewiseCodec, in_pieces
from counterflow.parallel.parameters import placement_of


def weight_codec_of(config: CompressionConfig) -> Codec | None:
    """How `config` has quantised parameters travel; None: as they are."""
    if config.weights == "none":
        return None
    if config.weights == "fp8":
        return Float8(block_size=config.weights_block_size)
    return Integers(block_size=config.weights_block_size, num_bits=8 if config.weights == "int8" else 4)


def is_quantised(parameter: nn.Parameter) -> bool:
    """Whether a gather may round `parameter`: a matrix that no two tensor-parallel ranks hold the same part of.

    Matrices of experts are held alike by tensor-parallel ranks, but gathered over them as well.
    """
    placement = placement_of(parameter)
    return parameter.dim() >= 2 and (placement.tensor_dim is not None or placement.experts is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGather:
    """A gather that has been started. The whole and the shard are its own until `wait` returns.

    sent: kept alive for the transfer. payloads: the bytes of each rank's shard, to be decoded by `codec`; None: what is
    received is `whole`. sent_bytes: by this rank, as ByteMeter counts.
    """

    whole: Tensor
    sent: Tensor
    work: dist.Work | Messages | None
    codec: PiecewiseCodec | None = None
    payloads: tuple[Tensor, ...] = ()
    sent_bytes: int = 0

    def wait(self) -> None:
        """Return once `whole` is filled."""
        if self.work is not None:
            self.work.wait()
        if self.codec is None:
            return
        for payload, part in zip(self.payloads, self.whole.view(len(self.payloads), -1), strict=True):
            for piece in self.codec.pieces:
                part[piece.elements] = self.codec.decode(payload, piece)


class WeightGather:
    """Gathers of one unit's parameters over `axis`; codec: of what travels, None: it travels as it is.

    On an axis of one rank nothing travels, and nothing is rounded.
    """

    def __init__(self, codec: Codec | None, axis: Axis) -> None:
        self._codec, self._axis = (codec if axis.size > 1 else None), axis

    @property
    def is_exact(self) -> bool:
        """Whether what is gathered is what was sharded, but for its dtype."""
        return self._codec is None

    def start(self, whole: Tensor, shard: Tensor) -> PendingGather:
        """Start to fill `whole` [n * M] with the fp32 `shard` [M] of each of the n ranks, in its own dtype.

        They do not overlap. Group: the axis.
        """
        if self._codec is None:
            sent = shard.to(whole.dtype)
            if suits(whole, self._axis):
                work = gather(whole, sent, self._axis)
            else:
                work = all_gather_into(whole, sent, self._axis, async_op=True)
            sent_bytes = (self._axis.size - 1) * sent.nbytes
            return PendingGather(whole=whole, sent=sent, work=work, sent_bytes=sent_bytes)
        codec = in_pieces(self._codec, shard.numel(), shard.device)
        sent = torch.empty(codec.encoded_bytes, dtype=torch.uint8, device=shard.device)
        for piece in codec.pieces:
            sent[piece.payload] = codec.encode(shard[piece.elements])
        rank, received = self._axis.rank, list(sent.new_empty(self._axis.size - 1, sent.numel()))
        work = exchange(received, [sent] * len(received), self._axis)
        payloads = (*received[:rank], sent, *received[rank:])
        return PendingGather(
            whole=whole,
            sent=sent,
            work=work,
            codec=codec,
            payloads=payloads,
            sent_bytes=sent.nbytes * len(received),
        )
