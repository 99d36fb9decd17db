"""A mixture of experts in place of the MLP: router, experts wherever they are, shared experts.

Shared and fine-grained experts are DeepSeekMoE's (arXiv 2401.06066); the exchange of tokens is in
parallel/expert/exchange.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from counterflow.models.config import ModelConfig
from counterflow.models.mlp import SwiGLU
from counterflow.models.router import Router
from counterflow.parallel.collectives import Axis, gather_from_tensor_parallel, split_to_tensor_parallel
from counterflow.parallel.expert.exchange import (
    ExpertParallel,
    ExpertTable,
    begin_exchange,
    combine,
    dispatch,
    rows_by_slot,
)
from counterflow.parallel.ops.weight_grad import WeightGradSink, split_grouped_linear
from counterflow.parallel.parameters import ParameterPlacement, place, placement_of
from counterflow.parallel.tensor.layers import SEQUENCE_DIM


class GroupedLinear(nn.Module):
    """One linear layer an expert, applied to rows sorted by expert: weight [E here, out, in].

    An expert without rows gets a gradient of zeros.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        experts: ExpertParallel,
        *,
        init_std: float,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        local = experts.local_experts
        self.weight_grad_sink: WeightGradSink | None = None
        self.weight = place(
            nn.Parameter(torch.empty(len(local), out_features, in_features, device=device, dtype=dtype)),
            ParameterPlacement(
                global_shape=(experts.num_experts, out_features, in_features),
                experts=local,
                copies=experts.copies,
                init_std=init_std,
            ),
        )

    def deferrable_parameters(self) -> tuple[nn.Parameter, ...]:
        """Those whose gradient goes to `weight_grad_sink`."""
        return (self.weight,)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [P, in], ends int32 [E here], where each expert's rows end -> [P, out]."""
        return split_grouped_linear(x, self.weight, ends, self.weight_grad_sink)


class Experts(nn.Module):
    """The routed experts of this rank, each a SwiGLU."""

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertParallel,
        *,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.expert_intermediate_size
        down_std = config.init_std / math.sqrt(2 * config.num_layers)
        self.gate_proj = GroupedLinear(
            hidden, inner, experts, init_std=config.init_std, device=device, dtype=dtype
        )
        self.up_proj = GroupedLinear(
            hidden, inner, experts, init_std=config.init_std, device=device, dtype=dtype
        )
        self.down_proj = GroupedLinear(inner, hidden, experts, init_std=down_std, device=device, dtype=dtype)

    def forward(self, rows: Tensor, weights: Tensor, slots: Tensor, num_pairs: int) -> Tensor:
        """For each of R rows the weighted sum over its experts here, [R, H].

        rows [R, H], weights [R, k], slots int32 [R, k], -1 for an expert elsewhere; num_pairs: slots that are not.
        """
        order, ends = rows_by_slot(slots, self.down_proj.weight.shape[0], num_pairs)
        row = order // slots.shape[1]
        x = rows.index_select(0, row)
        # The weight goes in before the last matrix: the inner size is the smaller one, so less is kept for backward.
        apply: Any = _WeightedSwiGLU.apply
        inner = apply(
            self.gate_proj(x, ends), self.up_proj(x, ends), weights.flatten().index_select(0, order)
        )
        apply = _SumByRow.apply
        return apply(self.down_proj(inner, ends), row, len(rows))


class MoE(nn.Module):
    """Routed and shared experts, without the residual; in and out [B, S, H], or [B, S/tp, H] under sequence
    parallelism.

    layer: index in the whole model; MTP modules come after the layers. experts: who holds which.

    Over the tensor axis each token is routed and sent by one rank: without sequence parallelism the sequence is cut
    for the routed experts and gathered again. The shared experts are a tensor-parallel MLP; they are computed while
    the sizes of the exchange are under way.

    Raises ValueError: where `experts` are not those of the config; in forward, where the axis does not divide the
    sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer: int,
        tensor: Axis,
        sequence_parallel: bool,
        experts: ExpertParallel,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        moe = config.moe
        if experts.num_experts != moe.num_experts:
            raise ValueError(
                f"{experts.num_experts} experts are placed on the ranks, but model.moe.num_experts="
                f"{moe.num_experts}; place as many as there are"
            )
        self.layer = layer
        self.tensor, self.sequence_parallel, self.expert_parallel = tensor, sequence_parallel, experts
        self.router = Router(config, tensor=tensor, ep_size=experts.axis.size, device=device, dtype=dtype)
        self.experts = Experts(config, experts, device=device, dtype=dtype)
        self.shared: SwiGLU | None = None
        self.shared_gate: SharedGate | None = None
        if moe.num_shared_experts:
            self.shared = SwiGLU(
                config,
                tensor=tensor,
                sequence_parallel=sequence_parallel,
                intermediate_size=moe.num_shared_experts * config.expert_intermediate_size,
                device=device,
                dtype=dtype,
            )
            if moe.shared_expert_gate:
                self.shared_gate = SharedGate(
                    config, sequence_parallel=sequence_parallel, device=device, dtype=dtype
                )
        self._table: ExpertTable | None = None

    def forward(self, x: Tensor) -> Tensor:
        own = x if self.sequence_parallel else split_to_tensor_parallel(x, self.tensor, SEQUENCE_DIM)
        routing = self.router(own)
        pending = begin_exchange(
            self.expert_parallel,
            self._locate(x.device),
            routing.choice,
            routing.kept,
            self.router.state.link_bytes,
            self.router.state.rank_pairs,
        )
        # A view: the gradients of `x` are added up in one order, whether the shared experts are recomputed or not.
        shared = None if self.shared is None else self.shared(x.view_as(x))
        if shared is not None and self.shared_gate is not None:
            shared = shared * self.shared_gate(x)
        exchange = pending.finish()
        rows, weights, slots = dispatch(own.flatten(0, 1), routing.weights, exchange)
        rows = self.experts(rows, weights, slots, exchange.num_pairs)
        out = combine(rows, exchange).view_as(own)
        if not self.sequence_parallel:
            out = gather_from_tensor_parallel(out, self.tensor, SEQUENCE_DIM)
        return out if shared is None else out + shared

    def place_experts(self, experts_by_rank: tuple[tuple[int, ...], ...]) -> None:
        """Send tokens to experts that are held elsewhere now; the weights here are to be those of the new ones."""
        self.expert_parallel = replace(self.expert_parallel, experts_by_rank=experts_by_rank)
        self._table = None
        local, copies = self.expert_parallel.local_experts, self.expert_parallel.copies
        for parameter in self.experts.parameters():
            place(parameter, replace(placement_of(parameter), experts=local, copies=copies))

    def _locate(self, device: torch.device) -> ExpertTable:
        if self._table is None or self._table.rank.device != device:
            self._table = self.expert_parallel.locate(device)
        return self._table


class SharedGate(nn.Module):
    """sigmoid(x w), [.., H] -> [.., 1]: how much of the shared experts a token takes (Qwen2-MoE). Weight [1, H]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        sequence_parallel: bool,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        shape = (1, config.hidden_size)
        self.weight = place(
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype)),
            ParameterPlacement(
                global_shape=shape, partial_over_tensor=sequence_parallel, init_std=config.init_std
            ),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).sigmoid()


class _SumByRow(torch.autograd.Function):
    """terms [P, H], row int64 [P], R -> [R, H], the sum of each row's terms. torch's index_add would keep the terms."""

    @staticmethod
    def forward(ctx: Any, terms: Tensor, row: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(row)
        return terms.new_zeros(num_rows, terms.shape[1]).index_add_(0, row, terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (row,) = ctx.saved_tensors
        return grads[0].index_select(0, row), None, None


class _WeightedSwiGLU(torch.autograd.Function):
    """silu(gate) * up * weights[:, None]; gate, up [P, I], weights [P]. Only its inputs are kept for the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        return F.silu(gate).mul_(up).mul_(weights.to(gate.dtype).unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        gate, up, weights = ctx.saved_tensors
        silu = F.silu(gate)
        grad_weights = torch.sum(grad * silu * up, 1, dtype=weights.dtype)
        grad = grad * weights.to(grad.dtype).unsqueeze(1)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, grad.mul_(silu), grad_weights
