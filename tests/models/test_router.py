"""Choice, weights, capacity, auxiliary losses and bias of the router, against hand computations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.models.config import ModelConfig, MoEConfig
from counterflow.models.router import Router, choose, updated_bias, weights_of, within_capacity
from counterflow.models.transformer import materialize
from counterflow.parallel.collectives import Axis
from counterflow.parallel.ops.weight_grad import WeightGradStore
from tests.models.placement import grad_of
from tests.rank_pool import RankPool

PLAIN = MoEConfig(num_experts=4, num_experts_per_token=2)


def test_groups_limit_the_choice() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.0, 0.8, 0.2, 0.3]])
    bias = torch.zeros(8)
    config = MoEConfig(num_experts=8, num_experts_per_token=2, num_groups=4)
    # Best score: group 0 has 0.9. Sum of the two best: group 1 has 1.1.
    assert choose(scores, bias, replace(config, router="softmax")).tolist() == [[0, 1]]
    assert choose(scores, bias, replace(config, router="sigmoid")).tolist() == [[2, 3]]
    two = replace(config, router="sigmoid", num_groups_per_token=2)
    assert choose(scores, bias, two).tolist() == [[0, 2]]


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    choice = choose(scores, torch.tensor([0.0, -1.0, 0.0, 1.0]), PLAIN)
    assert choice.tolist() == [[3, 0]]
    torch.testing.assert_close(weights_of(scores, choice, PLAIN), torch.tensor([[0.2, 0.8]]))
    bare = replace(PLAIN, normalize_weights=False, routed_scaling_factor=2.0)
    torch.testing.assert_close(weights_of(scores, choice, bare), torch.tensor([[0.2, 0.8]]))


def test_a_negative_bias_does_not_bring_in_an_excluded_group() -> None:
    config = MoEConfig(num_experts=4, num_experts_per_token=2, num_groups=2, router="sigmoid")
    bias = torch.tensor([-5.0, -5.0, -9.0, -9.0])
    assert sorted(choose(torch.full((1, 4), 0.5), bias, config).flatten().tolist()) == [0, 1]


def test_the_bias_moves_towards_the_mean() -> None:
    found = updated_bias(torch.tensor([0.5, 0.0, 0.0, 0.0]), torch.tensor([7, 3, 4, 2]), 0.001)
    torch.testing.assert_close(found, torch.tensor([0.499, 0.001, 0.0, 0.001]))


def test_the_first_to_come_have_room() -> None:
    # Two sequences of three tokens, k = 1: capacity ceil(1.0 * 6 / 3) = 2.
    choice = torch.tensor([[0], [1], [0], [0], [1], [2]])
    config = MoEConfig(num_experts=3, num_experts_per_token=1, capacity_factor=1.0)
    kept = within_capacity(choice, 2, config, Axis())
    assert kept.flatten().tolist() == [True, True, True, False, True, True]


def capacity_over_tensor_axis() -> None:
    axis = Axis(group=dist.group.WORLD)
    torch.manual_seed(0)
    config = MoEConfig(num_experts=4, num_experts_per_token=2, capacity_factor=0.7)
    choice = torch.rand(3, 8, 4).argsort(-1)[..., :2]
    expected = within_capacity(choice.flatten(0, 1), 3, config, Axis()).view(3, 8, 2)
    part = slice(axis.rank * 4, axis.rank * 4 + 4)
    found = within_capacity(choice[:, part].flatten(0, 1), 3, config, axis)
    assert torch.equal(found.view(3, 4, 2), expected[:, part])
    assert not expected.all()


def test_who_has_room_does_not_depend_on_the_tensor_axis(ranks: RankPool) -> None:
    ranks.run(capacity_over_tensor_axis, 2)


def router_of(moe: MoEConfig, weight: Tensor) -> Router:
    router = Router(
        ModelConfig(hidden_size=weight.shape[1], num_heads=1, num_kv_heads=1, moe=moe), tensor=Axis()
    )
    materialize(router, device="cpu", seed=0)
    with torch.no_grad():
        router.weight.copy_(weight)
    return router


def auxiliary_gradient(moe: MoEConfig, x: Tensor, weight: Tensor, fractions: Tensor | None = None) -> Tensor:
    """The gradient of the router's weight where nothing but the auxiliary losses has one."""
    router = router_of(moe, weight)
    if fractions is not None:
        router.state.fractions.copy_(fractions)
    router(x).weights.backward(torch.zeros(x.shape[0] * x.shape[1], moe.num_experts_per_token))
    return grad_of(router.weight)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, 8)


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8, requires_grad=True)


def test_load_balance_loss(x: Tensor, weight: Tensor) -> None:
    probs = (x.flatten(0, 1) @ weight.t()).softmax(-1)
    chosen = torch.zeros(10, 4).scatter_(1, probs.topk(2, -1).indices, 1.0)
    loss = sum(4 * chosen[:, e].mean() / 2 * probs[:, e].mean() for e in range(4))
    assert isinstance(loss, Tensor)
    (expected,) = torch.autograd.grad(0.7 * loss, weight, retain_graph=True)
    found = auxiliary_gradient(replace(PLAIN, load_balance_loss=0.7), x, weight)
    torch.testing.assert_close(found, expected)
    # Over the batch before: its fractions, this micro-batch's probabilities.
    fractions = torch.tensor([0.1, 0.2, 0.3, 0.4])
    (expected,) = torch.autograd.grad(4 * (fractions * probs.mean(0)).sum(), weight)
    scoped = replace(PLAIN, load_balance_loss=1.0, load_balance_scope="global_batch")
    torch.testing.assert_close(auxiliary_gradient(scoped, x, weight, fractions), expected)


def test_load_balance_loss_is_that_of_transformers_over_k(x: Tensor, weight: Tensor) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = x.flatten(0, 1) @ weight.t()
    loss = load_balancing_loss_func((logits,), num_experts=4, top_k=2)
    assert isinstance(loss, Tensor)
    (expected,) = torch.autograd.grad(loss / 2, weight)
    torch.testing.assert_close(auxiliary_gradient(replace(PLAIN, load_balance_loss=1.0), x, weight), expected)


def test_sequence_balance_loss(x: Tensor, weight: Tensor) -> None:
    """DeepSeek-V3, equations 17 to 20, for each sequence; the mean of both."""
    moe = replace(PLAIN, router="sigmoid", sequence_balance_loss=0.5)
    losses: list[Tensor] = []
    for sequence in x:
        scores = (sequence @ weight.t()).sigmoid()
        chosen = torch.zeros(5, 4).scatter_(1, scores.topk(2, -1).indices, 1.0)
        fractions = 4 / (2 * 5) * chosen.sum(0)
        losses.append((fractions * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum())
    (expected,) = torch.autograd.grad(0.5 * torch.stack(losses).mean(), weight)
    torch.testing.assert_close(auxiliary_gradient(moe, x, weight), expected)


def test_z_loss(x: Tensor, weight: Tensor) -> None:
    logits = x.flatten(0, 1) @ weight.t()
    (expected,) = torch.autograd.grad(0.1 * torch.logsumexp(logits, -1).square().mean(), weight)
    torch.testing.assert_close(auxiliary_gradient(replace(PLAIN, z_loss=0.1), x, weight), expected)


def test_what_is_counted(x: Tensor, weight: Tensor) -> None:
    router = router_of(replace(PLAIN, z_loss=0.1, load_balance_loss=0.1), torch.zeros_like(weight))
    with torch.no_grad():
        router(x)  # an evaluation counts nothing
    assert router.state.num_tokens == 0
    router(x)
    state = router.state
    assert state.num_tokens == 10
    assert state.load.sum() == 20
    entropy, load_balance, sequence, z = (state.sums / state.num_tokens).tolist()
    assert entropy == pytest.approx(torch.tensor(4.0).log().item())  # all logits are zero
    assert load_balance == pytest.approx(1.0)
    assert sequence == 0
    assert z == pytest.approx(entropy**2)
    state.begin_step(0.5)
    assert state.load.sum() == state.num_tokens == state.sums.sum() == 0
    assert state.loss_weight == 0.5


def test_logits_of_a_bf16_model_are_fp32_and_their_gradient_is_deferred() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(4, 8).bfloat16(), torch.randn(1, 300, 8).bfloat16()
    config = ModelConfig(hidden_size=8, num_heads=1, num_kv_heads=1, moe=replace(PLAIN, router="sigmoid"))
    router = Router(config, tensor=Axis(), dtype=torch.bfloat16)
    materialize(router, device="cpu", seed=0)
    with torch.no_grad():
        router.weight.copy_(weight)
    buffer = torch.zeros(4, 8)
    router.weight_grad_sink = store = WeightGradStore(lambda _: buffer)
    exact = nn.Parameter(weight.float())
    own_x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), store.deferring(0):
        found = router(own_x)
        assert found.weights.dtype == torch.float32
        found.weights[:, 0].sum().backward()
    assert not buffer.any()
    store.run(0)
    scores = (x[0].float() @ exact.t()).sigmoid()
    weights = weights_of(scores, scores.topk(2, -1).indices, config.moe)
    torch.testing.assert_close(found.weights, weights)
    weights[:, 0].sum().backward()
    torch.testing.assert_close(buffer, grad_of(exact))
    assert own_x.grad is not None
    assert own_x.grad.dtype == torch.bfloat16


def test_losses_are_normalised_as_the_main_loss(x: Tensor, weight: Tensor) -> None:
    """Two unequal micro-batches of a global batch of 20 valid tokens weigh as their tokens do."""
    router = router_of(replace(PLAIN, z_loss=0.1), weight)
    router.state.begin_step(1 / 20)
    for part in (x[:, :3], x[:, 3:]):
        router(part).weights.sum().mul(0).backward()
    logits = x.flatten(0, 1) @ weight.t()
    (expected,) = torch.autograd.grad(0.1 * torch.logsumexp(logits, -1).square().sum() / 20, weight)
    torch.testing.assert_close(grad_of(router.weight), expected)
