"""The exchange of tokens between ranks, apart from what experts do with them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.expert.exchange import (
    Exchange,
    ExpertParallel,
    begin_exchange,
    combine,
    dispatch,
    even_placement,
    rows_by_slot,
)
from tests.rank_pool import RankPool

WIDTH, NUM_CHOICES = 4, 3
PLACEMENT = ((5, 0, 3), (1, 4, 2))
# Token 0 goes to three experts of rank 0, token 1 to both ranks, token 2 to rank 1 only.
CHOICE = torch.tensor([[0, 3, 5], [3, 1, 4], [4, 2, 1]])


def exchange_of(experts: ExpertParallel, kept: Tensor | None = None, choice: Tensor = CHOICE) -> Exchange:
    return begin_exchange(experts, experts.locate(torch.device("cpu")), choice, kept).finish()


def two_ranks(placement: tuple[tuple[int, ...], ...] = PLACEMENT) -> ExpertParallel:
    axis = Axis(group=dist.group.WORLD, name="expert", meter=ByteMeter())
    return ExpertParallel(axis=axis, experts_by_rank=placement)


def travel() -> None:
    rank, experts = dist.get_rank(), two_ranks()
    meter = experts.axis.meter
    assert meter is not None
    exchange = exchange_of(experts)
    # Not three rows for three experts of one rank, and none for those that stay.
    assert exchange.sent == ((0, 2) if rank == 0 else (2, 0))
    assert exchange.received == ((0, 2) if rank == 0 else (2, 0))
    assert exchange.num_kept == 2
    assert exchange.num_pairs == (8 if rank == 0 else 10)
    sizes_bytes = 2 * 8  # of one pair of counts to the other rank
    assert meter.sent_bytes() == {"expert": sizes_bytes}

    x = (torch.arange(12.0).view(3, WIDTH) + 100 * rank).requires_grad_()
    weights = (torch.arange(9.0).view(3, NUM_CHOICES) / 8 + rank).requires_grad_()
    rows, row_weights, slots = dispatch(x, weights, exchange)
    row_bytes = 16 + 16 + 16  # each part of a row is padded to 16 bytes
    assert meter.sent_bytes() == {"expert": sizes_bytes + 2 * row_bytes}
    # Rows of the other rank first, then those that stayed.
    tokens = [0, 1] if rank == 0 else [1, 2]
    both = torch.stack([torch.arange(12.0).view(3, WIDTH) + 100 * each for each in range(2)])
    assert torch.equal(rows, torch.cat([both[1 - rank][tokens], both[rank][tokens]]))
    expected_slots = [[1, 2, 0], [2, -1, -1]] if rank == 0 else [[-1, 0, 1], [1, 2, 0]]
    assert slots.tolist() == expected_slots * 2
    assert torch.equal(
        row_weights,
        torch.cat([(torch.arange(9.0).view(3, NUM_CHOICES) / 8 + each)[tokens] for each in (1 - rank, rank)]),
    )

    # An "expert" that triples the row for each choice here: the sum over ranks is 3 sum_j w_j x.
    terms = rows * 3 * (row_weights * (slots >= 0)).sum(1, keepdim=True)
    out = combine(terms, exchange)
    assert torch.equal(out, 3 * weights.detach().sum(1, keepdim=True) * x.detach())
    assert meter.sent_bytes() == {"expert": sizes_bytes + 2 * row_bytes + 2 * 16}
    torch.manual_seed(rank)
    grad = torch.randn(3, WIDTH)
    out.backward(grad)
    assert meter.sent_bytes() == {"expert": sizes_bytes + 2 * row_bytes + 2 * 16 + 2 * 16 + 2 * 32}
    assert exchange.link_bytes[1 - rank] == meter.sent_bytes()["expert"] - sizes_bytes
    assert exchange.link_bytes[rank] == 0
    torch.testing.assert_close(x.grad, 3 * weights.detach().sum(1, keepdim=True) * grad)
    dot = 3 * (x.detach() * grad).sum(1, keepdim=True)
    torch.testing.assert_close(weights.grad, dot.expand(3, NUM_CHOICES))


def test_a_token_travels_once_to_a_rank_and_comes_back_summed(ranks: RankPool) -> None:
    ranks.run(travel, 2)


def with_drops() -> None:
    rank, experts = dist.get_rank(), two_ranks()
    kept = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    exchange = exchange_of(experts, kept)
    assert exchange.sent == ((0, 1) if rank == 0 else (1, 0))
    assert exchange.num_pairs == 2 * (2 if rank == 0 else 3)
    x = torch.ones(3, WIDTH, requires_grad=True)
    weights = torch.ones(3, NUM_CHOICES, requires_grad=True)
    rows, row_weights, slots = dispatch(x, weights, exchange)
    out = combine(rows * (row_weights * (slots >= 0)).sum(1, keepdim=True), exchange)
    assert out[:, 0].tolist() == [2, 0, 3]
    out.sum().backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad != 0, kept)


def test_dropped_choices_are_not_sent(ranks: RankPool) -> None:
    ranks.run(with_drops, 2)


def one_way() -> None:
    """Everybody's tokens go to rank 0; the other rank receives nothing and still takes part."""
    rank, experts = dist.get_rank(), two_ranks()
    exchange = exchange_of(experts, choice=torch.tensor([[0, 3, 5]] * 4))
    assert exchange.sent == ((0, 0) if rank == 0 else (4, 0))
    assert exchange.num_pairs == (24 if rank == 0 else 0)
    x = torch.full((4, WIDTH), rank + 1.0, requires_grad=True)
    weights = torch.ones(4, NUM_CHOICES, requires_grad=True)
    rows, row_weights, slots = dispatch(x, weights, exchange)
    assert len(rows) == (8 if rank == 0 else 0)
    out = combine(rows * (row_weights * (slots >= 0)).sum(1, keepdim=True), exchange)
    out.sum().backward()
    assert torch.equal(out, 3 * x.detach())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_a_rank_without_tokens(ranks: RankPool) -> None:
    ranks.run(one_way, 2)


def test_pairs_are_sorted_by_expert_and_experts_may_have_none() -> None:
    slots = torch.tensor([[2, -1], [0, 2], [-1, -1], [2, 0]], dtype=torch.int32)
    order, ends = rows_by_slot(slots, 4, 5)
    assert order.tolist() == [2, 7, 0, 3, 6]
    assert ends.tolist() == [2, 2, 5, 5]
    assert ends.dtype == torch.int32
    order, ends = rows_by_slot(slots[:0], 4, 0)
    assert order.tolist() == []
    assert ends.tolist() == [0, 0, 0, 0]


def test_placements() -> None:
    assert even_placement(6, 3) == ((0, 1), (2, 3), (4, 5))
    with pytest.raises(ValueError, match=r"expert_parallel_size=4: must divide model\.moe\.num_experts=6"):
        even_placement(6, 4)
    for placement in (((0, 1), (2,)), ((0, 2),), ((0, 0, 2),)):
        with pytest.raises(ValueError, match=r"one entry for each of the 1 ranks .* every expert"):
            ExpertParallel(axis=Axis(name="expert"), experts_by_rank=placement)
    with pytest.raises(ValueError, match=r"payload_dtype=torch.int8: one of torch.bfloat16"):
        ExpertParallel(axis=Axis(name="expert"), experts_by_rank=((0,),), payload_dtype=torch.int8)
