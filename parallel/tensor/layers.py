"""Tensor-parallel layers: linears cut by column and by row or held whole, and an embedding cut by vocabulary.

A tensor-parallel region starts with `enter_tensor_parallel`, once for all the column layers that share its
input, and ends in the row layer (Megatron-LM, arXiv 1909.08053, section 3). Under sequence parallelism the
activations between regions are cut along the sequence over the same axis (Korthikanti et al., arXiv
2205.05198): entering gathers, leaving reduce-scatters.

Every layer can be built on the meta device and tells the place of its parameters in the whole model
(parallel/parameters.py). Every linear goes through `split_linear`, whose weight gradient can be deferred.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterflow.parallel.collectives import (
    Axis,
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from counterflow.parallel.ops.weight_grad import WeightGradSink, split_linear
from counterflow.parallel.parameters import ParameterPlacement, place

SEQUENCE_DIM = 1


def enter_tensor_parallel(tensor: Tensor, axis: Axis, *, sequence_parallel: bool) -> Tensor:
    """Make the input of column layers: every rank holds all of it, [B, S, H].

    Under sequence parallelism `tensor` is [B, S/tp, H]. Forward: all-gather along the sequence; backward:
    reduce-scatter. Without it: identity; all-reduce. Group: `axis`.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel(tensor, axis, SEQUENCE_DIM)
    return copy_to_tensor_parallel(tensor, axis)


def leave_tensor_parallel(tensor: Tensor, axis: Axis, *, sequence_parallel: bool) -> Tensor:
    """Sum the terms that the ranks of a region hold, [B, S, H].

    Under sequence parallelism the result is [B, S/tp, H]. Forward: reduce-scatter along the sequence;
    backward: all-gather. Without it: all-reduce; identity. Group: `axis`.
    """
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel(tensor, axis, SEQUENCE_DIM)
    return reduce_from_tensor_parallel(tensor, axis)


def padded_size(size: int, axis: Axis) -> int:
    """`size` rounded up to a multiple of the axis size."""
    return -(-size // axis.size) * axis.size


class ColumnParallelLinear(nn.Module):
    """A linear layer cut along its output features: y_local = x W_local^T (+ b_local).

    Input [.., in_features], whole on every rank (see `enter_tensor_parallel`); output
    [.., out_features / tp], this rank's slice. Weight [out_features / tp, in_features].

    pad: rows of zeros make up an `out_features` that the axis does not divide (the output head).
    Raises ValueError: where the axis does not divide `out_features` and `pad` is not set.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = False,
        pad: bool = False,
        init_std: float = 0.02,
        tied_to: str | None = None,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not pad:
            _check_divisible("out_features", out_features, axis)
        local = padded_size(out_features, axis) // axis.size
        start = axis.rank * local
        self.weight_grad_sink: WeightGradSink | None = None
        self.fp8 = False
        self.weight = place(
            nn.Parameter(torch.empty(local, in_features, device=device, dtype=dtype)),
            ParameterPlacement(
                global_shape=(out_features, in_features),
                tensor_dim=0,
                tensor_start=start,
                init_std=init_std,
                tied_to=tied_to,
            ),
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = place(
                nn.Parameter(torch.empty(local, device=device, dtype=dtype)),
                ParameterPlacement(
                    global_shape=(out_features,),
                    tensor_dim=0,
                    tensor_start=start,
                    weight_decay=False,
                    init="zeros",
                ),
            )

    def deferrable_parameters(self) -> tuple[nn.Parameter, ...]:
        """Those whose gradient goes to `weight_grad_sink`."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def forward(self, tensor: Tensor) -> Tensor:
        return split_linear(tensor, self.weight, self.bias, self.weight_grad_sink, fp8=self.fp8)


class RowParallelLinear(nn.Module):
    """A linear layer cut along its input features: y = sum over ranks of x_local W_local^T (+ b).

    Input [B, S, in_features / tp], this rank's slice; output [B, S, out_features] on every rank, or
    [B, S/tp, out_features] under sequence parallelism. Weight [out_features, in_features / tp].
    The bias is whole on every rank and added once, after the sum.

    Raises ValueError: where the axis does not divide `in_features`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        sequence_parallel: bool,
        bias: bool = False,
        init_std: float = 0.02,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _check_divisible("in_features", in_features, axis)
        local = in_features // axis.size
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.weight_grad_sink: WeightGradSink | None = None
        self.fp8 = False
        self.weight = place(
            nn.Parameter(torch.empty(out_features, local, device=device, dtype=dtype)),
            ParameterPlacement(
                global_shape=(out_features, in_features),
                tensor_dim=1,
                tensor_start=axis.rank * local,
                init_std=init_std,
            ),
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = _whole_bias(out_features, sequence_parallel, device, dtype)

    def deferrable_parameters(self) -> tuple[nn.Parameter, ...]:
        """Those whose gradient goes to `weight_grad_sink`: the bias is added after the sum and is not one."""
        return (self.weight,)

    def forward(self, tensor: Tensor) -> Tensor:
        term = split_linear(tensor, self.weight, None, self.weight_grad_sink, fp8=self.fp8)
        out = leave_tensor_parallel(term, self.axis, sequence_parallel=self.sequence_parallel)
        return out if self.bias is None else out + self.bias


class ReplicatedLinear(nn.Module):
    """A linear layer that every rank of the axis holds whole and applies to what it has: y = x W^T (+ b).

    Input [.., in_features]: a hidden state between tensor-parallel regions, [B, S, H], or [B, S/tp, H] under
    sequence parallelism, where each rank's gradient is then the term of its own tokens.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        bias: bool = False,
        init_std: float = 0.02,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.weight_grad_sink: WeightGradSink | None = None
        self.fp8 = False
        self.weight = place(
            nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype)),
            ParameterPlacement(
                global_shape=(out_features, in_features),
                partial_over_tensor=sequence_parallel,
                init_std=init_std,
            ),
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = _whole_bias(out_features, sequence_parallel, device, dtype)

    def deferrable_parameters(self) -> tuple[nn.Parameter, ...]:
        """Those whose gradient goes to `weight_grad_sink`."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def forward(self, tensor: Tensor) -> Tensor:
        return split_linear(tensor, self.weight, self.bias, self.weight_grad_sink, fp8=self.fp8)


class VocabParallelEmbedding(nn.Module):
    """An embedding cut along the vocabulary, padded with zero rows to a multiple of the axis size.

    Input int64 [B, S], the same on every rank; output [B, S, embedding_dim] on every rank, or
    [B, S/tp, embedding_dim] under sequence parallelism. Weight [padded num_embeddings / tp, embedding_dim].
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        axis: Axis,
        *,
        sequence_parallel: bool,
        init_std: float = 0.02,
        tied_to: str | None = None,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        local = padded_size(num_embeddings, axis) // axis.size
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.start = axis.rank * local
        self.weight = place(
            nn.Parameter(torch.empty(local, embedding_dim, device=device, dtype=dtype)),
            ParameterPlacement(
                global_shape=(num_embeddings, embedding_dim),
                tensor_dim=0,
                tensor_start=self.start,
                init_std=init_std,
                tied_to=tied_to,
            ),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        elsewhere = torch.zeros_like(local, dtype=torch.bool)
        # An id outside the vocabulary is left to the rank at that edge, where the lookup raises; masked on
        # every rank it would embed as zero and nobody would know.
        if self.axis.rank > 0:
            elsewhere |= local < 0
        if self.axis.rank < self.axis.size - 1:
            elsewhere |= local >= self.weight.shape[0]
        term = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        term = term.masked_fill(elsewhere.unsqueeze(-1), 0)
        return leave_tensor_parallel(term, self.axis, sequence_parallel=self.sequence_parallel)


def _whole_bias(
    size: int, sequence_parallel: bool, device: torch.device | str, dtype: torch.dtype
) -> nn.Parameter:
    """A bias [size] that every rank holds; under sequence parallelism a rank's gradient is that of its tokens."""
    return place(
        nn.Parameter(torch.empty(size, device=device, dtype=dtype)),
        ParameterPlacement(
            global_shape=(size,), partial_over_tensor=sequence_parallel, weight_decay=False, init="zeros"
        ),
    )


def _check_divisible(name: str, size: int, axis: Axis) -> None:
    if size % axis.size:
        raise ValueError(
            f"{name}={size}: must be a multiple of the {axis.name} axis size {axis.size}, over which the "
            "layer is cut; change the model's shape or tensor_parallel_size"
        )
