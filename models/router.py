"""The router of a mixture of experts: which experts a token goes to, with which weights, and what keeps them balanced.

Legend: B sequences, S tokens of a sequence (of them `s` on this rank, where the tensor axis cuts it), T = B s,
E experts, k experts a token, tp the size of the tensor axis.

Note [Which losses, and over which tokens]
With p [T, E] the router's distribution over experts (the probabilities of a softmax; sigmoid scores over their sum),
c_e how many tokens chose expert e and M the number of tokens counted:

- load balance (Switch, arXiv 2101.03961, eq. 4, for k choices): E sum_e c_e / (k M) mean_t p_te, 1 where all is even
  (transformers' implementation is k times that). `load_balance_scope` says where c_e / (k M) is from: this
  micro-batch, or the whole global batch of the step before (uniform in the first), which lets sequences of one domain
  prefer some experts as long as the batch is balanced (Qiu et al., arXiv 2501.11873).
- sequence balance (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20): the same within each sequence, meaned over them.
- z-loss (ST-MoE, arXiv 2202.08906, eq. 5): the mean of logsumexp(logits)^2.

Each is a mean over the tokens of a micro-batch, linear in what a token adds, so it is computed as this rank's part of
the sum. Only the counts c_e are summed over the tensor axis; they have no gradient. The main loss is a sum over
tokens over the number of valid tokens of the global batch, and so a micro-batch's losses are weighted by its tokens
over that number: whatever the schedule and the layout, the gradient is that of one process.

The bias (Wang et al., arXiv 2408.15664) balances without a loss: it is added to the scores for the choice only, and
moved after each step (`updated_bias`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from counterflow.models.config import ModelConfig, MoEConfig
from counterflow.parallel.collectives import Axis, all_gather_into, all_reduce
from counterflow.parallel.expert.exchange import positions_within
from counterflow.parallel.ops.weight_grad import WeightGradSink, is_filed, is_wanted
from counterflow.parallel.parameters import ParameterPlacement, place

# What `RouterState.sums` holds, each a sum over this rank's tokens.
SUMS = ("entropy", "load_balance_loss", "sequence_balance_loss", "z_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The router's decision for T tokens.

    choice: int64 [T, k], all different. weights: [T, k], fp32, carry the gradient of the router and of its losses.
    kept: bool [T, k], False where an expert had no room for the token; None: no expert has a limit.
    """

    choice: Tensor
    weights: Tensor
    kept: Tensor | None


class RouterState:
    """What a router keeps between micro-batches and steps; no parameter and no buffer.

    bias: fp32 [E], added to the scores for the choice. fractions: fp32 [E], shares of the experts in the choices of
    the global batch before. The rest is of the present step and this rank's tokens: load int64 [E], choices of each
    expert, those that were dropped included; num_dropped int64; sums fp64, see SUMS; num_tokens;
    link_bytes, sent to each rank of the expert axis; rank_pairs int64, choices that went to each.
    loss_weight: what the sum of an auxiliary loss over tokens is multiplied with, loss scale over valid tokens; None
    (outside of a training loop): each micro-batch's mean is taken.
    """

    def __init__(self, num_experts: int, ep_size: int, device: torch.device) -> None:
        self.bias = torch.zeros(num_experts, device=device)
        self.fractions = torch.full((num_experts,), 1 / num_experts, device=device)
        self.load = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.num_dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.num_tokens = 0
        self.link_bytes = [0] * ep_size
        self.rank_pairs = torch.zeros(ep_size, dtype=torch.int64, device=device)
        self.loss_weight: float | None = None

    def begin_step(self, loss_weight: float | None) -> None:
        """Forget the step before, but for bias and fractions."""
        self.load.zero_()
        self.num_dropped.zero_()
        self.sums.zero_()
        self.num_tokens = 0
        # In place: exchanges under way hold the list.
        self.link_bytes[:] = [0] * len(self.link_bytes)
        self.rank_pairs.zero_()
        self.loss_weight = loss_weight


class Router(nn.Module):
    """x [B, s, H] -> Routing of its tokens. Weight [E, H]; logits and all that follows in fp32.

    Each rank of the tensor axis routes its own tokens, so the weight's gradient is one term of a sum over it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tensor: Axis,
        ep_size: int = 1,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.tensor, self.ep_size = config.moe, tensor, ep_size
        shape = (config.moe.num_experts, config.hidden_size)
        self.weight = place(
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype)),
            ParameterPlacement(global_shape=shape, partial_over_tensor=True, init_std=config.init_std),
        )
        self.weight_grad_sink: WeightGradSink | None = None
        self._state: RouterState | None = None

    def deferrable_parameters(self) -> tuple[nn.Parameter, ...]:
        """Those whose gradient goes to `weight_grad_sink`."""
        return (self.weight,)

    @property
    def state(self) -> RouterState:
        """Made when first asked for: a module may be built on the meta device, and a buffer would stay there."""
        if self._state is None:
            self._state = RouterState(self.config.num_experts, self.ep_size, self.weight.device)
        return self._state

    def forward(self, x: Tensor) -> Routing:
        config, state = self.config, self.state
        batch, seq, _ = x.shape
        apply: Any = _RouterLogits.apply
        logits: Tensor = apply(x.reshape(batch * seq, -1), self.weight, self.weight_grad_sink)
        scores = logits.sigmoid() if config.router == "sigmoid" else logits.softmax(-1)
        with torch.no_grad():
            choice = choose(scores, state.bias, config)
            kept = None
            if config.capacity_factor is not None:
                kept = within_capacity(choice, batch, config, self.tensor)
        weights = weights_of(scores, choice, config)
        if torch.is_grad_enabled():
            weights = self._count(logits, scores, choice, weights, kept, batch)
        return Routing(choice=choice, weights=weights, kept=kept)

    def _count(
        self, logits: Tensor, scores: Tensor, choice: Tensor, weights: Tensor, kept: Tensor | None, batch: int
    ) -> Tensor:
        """Record what was routed, and let the auxiliary losses' gradients enter through `weights`."""
        config, state = self.config, self.state
        counts = counts_of(choice, batch, config.num_experts)
        probs = scores if config.router == "softmax" else scores / scores.sum(-1, keepdim=True)
        state.load += counts.sum(0)
        state.num_tokens += len(choice)
        if kept is not None:
            state.num_dropped += (~kept).sum()
        losses = self._losses(logits, probs, counts)
        with torch.no_grad():
            entropy = torch.special.entr(probs).sum()
            state.sums += torch.stack([entropy, *losses.values()])
        weighted = [getattr(config, name) * loss for name, loss in losses.items() if getattr(config, name)]
        if not weighted:
            return weights
        loss_weight = state.loss_weight
        if loss_weight is None:
            loss_weight = 1 / (len(choice) * self.tensor.size)
        inject: Any = _InjectLoss.apply
        return inject(weights, sum(weighted), loss_weight)

    def _losses(self, logits: Tensor, probs: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """The sums over this rank's tokens of the losses of the note above, unweighted; zero where one is off."""
        config, state = self.config, self.state
        batch, num_experts = counts.shape
        seq = len(probs) // batch * self.tensor.size
        is_micro_batch = config.load_balance_scope == "micro_batch"
        if config.sequence_balance_loss or (config.load_balance_loss and is_micro_batch):
            all_reduce(counts, self.tensor)
        per_token = num_experts / config.num_experts_per_token
        losses: dict[str, Tensor] = {name: probs.new_zeros(()) for name in SUMS[1:]}
        if config.load_balance_loss:
            fractions = state.fractions * num_experts
            if is_micro_batch:
                fractions = counts.sum(0) * (per_token / (batch * seq))
            losses["load_balance_loss"] = probs.sum(0) @ fractions.to(probs.dtype)
        if config.sequence_balance_loss:
            fractions = (counts * (per_token / seq)).to(probs.dtype)
            losses["sequence_balance_loss"] = (probs.view(batch, -1, num_experts).sum(1) * fractions).sum()
        if config.z_loss:
            losses["z_loss"] = logits.logsumexp(-1).square().sum()
        return losses


def choose(scores: Tensor, bias: Tensor, config: MoEConfig) -> Tensor:
    """The k experts of each token, int64 [T, k]: those of the highest biased scores [T, E], in the best groups.

    A group's score is the sum of its two best with a sigmoid router (DeepSeek-V3, arXiv 2412.19437, section 2.1.2),
    its best with softmax (DeepSeek-V2, arXiv 2405.04434, section 2.2.2).
    """
    biased = scores + bias
    if config.num_groups_per_token < config.num_groups:
        grouped = biased.unflatten(1, (config.num_groups, -1))
        num_best = min(2 if config.router == "sigmoid" else 1, grouped.shape[2])
        group_scores = grouped.topk(num_best, -1).values.sum(-1)
        best = group_scores.topk(config.num_groups_per_token, -1, sorted=False).indices
        is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
        biased = grouped.masked_fill(is_out.unsqueeze(-1), -math.inf).flatten(1)
    return biased.topk(config.num_experts_per_token, -1).indices


def weights_of(scores: Tensor, choice: Tensor, config: MoEConfig) -> Tensor:
    """The weights [T, k] of the chosen experts, from the scores without bias."""
    weights = scores.gather(1, choice)
    if config.normalize_weights:
        # DeepSeek-V3's guard: sigmoid scores may all be next to zero.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor


def counts_of(choice: Tensor, batch: int, num_experts: int) -> Tensor:
    """How many tokens of each sequence chose each expert: int64 [B, E]."""
    by_sequence = choice.reshape(batch, -1)
    counts = torch.zeros(batch, num_experts, dtype=torch.int64, device=choice.device)
    return counts.scatter_add_(1, by_sequence, torch.ones_like(by_sequence))


def within_capacity(choice: Tensor, batch: int, config: MoEConfig, tensor: Axis) -> Tensor:
    """Which choices their experts have room for: bool [T, k].

    An expert takes the first ceil(capacity_factor * tokens * k / E) of a micro-batch that chose it, in the order of
    sequences and positions whatever the layout. The counts of each sequence are gathered over the tensor axis.
    """
    factor, num_experts = config.capacity_factor, config.num_experts
    assert factor is not None
    capacity = math.ceil(factor * choice.numel() * tensor.size / num_experts)
    counts = counts_of(choice, batch, num_experts)
    everyone = counts.new_empty(tensor.size, batch, num_experts)
    all_gather_into(everyone, counts, tensor)
    whole = everyone.sum(0)
    before = whole.cumsum(0) - whole + everyone[: tensor.rank].sum(0)

    # Position of each choice among those of its sequence here for the same expert.
    sequence = torch.arange(batch, device=choice.device).repeat_interleave(choice.numel() // batch)
    key = choice.flatten() + sequence * num_experts
    position = positions_within(key, batch * num_experts)
    return (position + before.flatten()[key] < capacity).view(choice.shape)


def updated_bias(bias: Tensor, load: Tensor, speed: float) -> Tensor:
    """The bias [E] after a step with `load` [E]: up by `speed` for experts below the mean, down for those above."""
    load = load.double()
    return bias + speed * torch.sign(load.mean() - load).to(bias.dtype)


class _RouterLogits(torch.autograd.Function):
    """x [T, H], weight [E, H] -> logits [T, E] in fp32 (or fp64), keeping x in its own type for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, sink: WeightGradSink | None) -> Tensor:
        ctx.save_for_backward(x)
        # The Parameter object itself: its storage may be freed and filled again (ZeRO-3) before backward.
        ctx.weight, ctx.sink = weight, sink
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        (x,) = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ ctx.weight.detach().to(grad.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1] and is_filed(ctx, 1):
            ctx.sink.add(ctx.weight, None, x, grad)
        elif ctx.needs_input_grad[1] and is_wanted(ctx, 1):
            grad_weight = (grad.t() @ x.to(grad.dtype)).to(ctx.weight.dtype)
        return grad_x, grad_weight, None


class _InjectLoss(torch.autograd.Function):
    """Identity on `carrier`; in the backward `loss`, a scalar, gets the gradient `weight`, as if it were added."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.dtype = weight, loss.dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        return grad, torch.full((), ctx.weight, dtype=ctx.dtype, device=grad.device), None
