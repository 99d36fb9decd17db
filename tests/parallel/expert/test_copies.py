"""Which copy of an expert a token goes to: by hand, evenly whatever the places, and evenly on a skewed load."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from counterflow.parallel.collectives import Axis
from counterflow.parallel.expert.copies import Place, copies_on, has_copies, places_of, turns
from counterflow.parallel.expert.exchange import ExpertParallel, ExpertTable, even_placement, positions_within
from counterflow.parallel.expert.placement import ExpertLayout, ExpertsByRank, imbalance, place_experts


class Ranks:
    """A group that is never spoken to."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def table_of(placed: ExpertsByRank, rank: int, num_nodes: int = 1) -> ExpertTable:
    axis = Axis(group=Ranks(rank, len(placed)), name="expert")  # type: ignore[arg-type]
    experts = ExpertParallel(axis=axis, experts_by_rank=placed, num_nodes=num_nodes)
    return experts.locate(torch.device("cpu"))


def test_turns_by_hand() -> None:
    a, b, c = (0, 3), (1, 0), (4, 2)
    # Ranks with a copy keep their tokens, the others go to both in turn and do not begin alike.
    assert turns([a, b], num_ranks=4) == [(a, a), (b, b), (a, b), (b, a)]
    assert turns([a, b], num_ranks=4, start=1)[2:] == [(b, a), (a, b)]
    assert turns([b], num_ranks=3) == [(b,)] * 3
    # On two nodes: three copies take eight turns each, the one of the second node no more than that.
    found = turns([a, b, c], num_ranks=8, num_nodes=2)
    assert set(found[2]) | set(found[3]) == {a, b}
    assert [each.count(c) for each in found[4:]] == [3, 2, 2, 1]


PLACES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=8, unique=True)


@settings(max_examples=100)
@given(PLACES, st.sampled_from([1, 2, 3]), st.integers(0, 9))
def test_every_copy_gets_as_many_turns(places: list[Place], num_nodes: int, start: int) -> None:
    found = turns(places, num_ranks=6, num_nodes=num_nodes, start=start)
    assert all(len(each) == len(places) for each in found)
    assert Counter(place for each in found for place in each) == dict.fromkeys(places, 6)
    for rank, each in enumerate(found):
        near = [place for place in places if place[0] == rank]
        kept = sum(place in near for place in each)
        assert kept == min(len(places), 6 * len(near)), "a copy here takes all it may"


def test_choices_find_their_place_by_hand() -> None:
    placed = ((0, 1, 2), (2, 3, 0), (4, 5, 2))
    choice = torch.tensor([[2, 0], [2, 5], [1, 2], [0, 2], [2, 3]])
    kept = torch.ones_like(choice, dtype=torch.bool)
    table = table_of(placed, 1)

    def ranks_of(kept: Tensor | None) -> list[list[int]]:
        return table.rank[table.find(choice, kept)].tolist()

    # Rank 1 has experts 2 and 0.
    assert ranks_of(None) == ranks_of(kept) == [[1, 1], [1, 2], [0, 1], [1, 1], [1, 1]]
    assert table.slot[table.find(choice, None)].tolist() == [[0, 2], [0, 1], [1, 0], [2, 0], [0, 1]]
    # Rank 2 has 2, and sends its two tokens for 0 to one copy each; one that is dropped takes no turn.
    table = table_of(placed, 2)
    first, second = (ranks_of(None)[row][column] for row, column in ((0, 1), (3, 0)))
    assert {first, second} == {0, 1}
    kept[0, 1] = False
    assert ranks_of(kept)[3][0] == first
    # Without copies nothing is looked up but the one place.
    assert table_of(even_placement(6, 3), 0).num_turns is None


def test_positions_within() -> None:
    assert positions_within(torch.tensor([2, 0, 2, 2, 1, 0]), 4).tolist() == [0, 0, 1, 2, 0, 1]


def test_first_places_and_shared_ones() -> None:
    placed = ((0, 1, 2), (2, 3, 0), (4, 5, 2))
    assert has_copies(placed)
    assert not has_copies(even_placement(6, 3))
    assert places_of(placed)[2] == ((0, 2), (1, 0), (2, 2))
    copies = [copies_on(placed, rank) for rank in range(3)]
    assert [each.is_first for each in copies] == [(True,) * 3, (False, True, False), (True, True, False)]
    assert copies[1].shared == (((0, 0), (1, 2)), ((0, 2), (1, 0), (2, 2)))
    assert copies[2].shared == (((0, 2), (1, 0), (2, 2)),)


@pytest.mark.parametrize(
    ("num_experts", "ep_size", "num_nodes"), [(8, 4, 1), (8, 4, 2), (12, 6, 3), (6, 2, 1)]
)
def test_spare_slots_begin_evenly(num_experts: int, ep_size: int, num_nodes: int) -> None:
    each = num_experts // ep_size
    most = num_experts - each
    for spare in range(most + 1):
        placed = even_placement(num_experts, ep_size, spare, num_nodes)
        assert all(
            experts[:each] == tuple(range(r * each, (r + 1) * each)) for r, experts in enumerate(placed)
        )
        assert all(len(set(experts)) == each + spare for experts in placed)
        assert imbalance([1.0] * num_experts, placed) == pytest.approx(1)
    with pytest.raises(ValueError, match=f"spare_slots={most + 1}: .* set it to {most} or less"):
        even_placement(num_experts, ep_size, most + 1, num_nodes)


def batch(num_experts: int, layer: int, step: int) -> list[Tensor]:
    """The choices of 8 ranks' tokens, by a router that was never corrected: few experts take most."""
    loads = [1 / (place + 1) for place in range(num_experts)]
    random.Random(layer).shuffle(loads)
    generator = torch.Generator().manual_seed(100 * layer + step)
    noise = torch.empty(8, 2048, num_experts).exponential_(generator=generator)
    return list((torch.tensor(loads) / noise).topk(4, sorted=False).indices)


@pytest.mark.parametrize(("num_nodes", "num_groups"), [(1, 1), (2, 8)])
def test_a_skewed_load_is_even_once_it_is_shared_out(num_nodes: int, num_groups: int) -> None:
    """Placed by the loads of one batch, every token of the next is sent by the rule: that is how even ranks are."""
    num_experts, num_ranks = 64, 8
    layout = ExpertLayout(
        num_experts=num_experts, num_ranks=num_ranks, num_slots=10, num_nodes=num_nodes, num_groups=num_groups
    )
    for layer in range(2):
        recorded = torch.cat(batch(num_experts, layer, 0)).flatten().bincount(minlength=num_experts)
        placed = place_experts([recorded.tolist()], layout)[0]
        measured: list[float] = []
        for experts in (even_placement(num_experts, num_ranks), placed):
            counts = torch.zeros(num_ranks)
            for rank, choice in enumerate(batch(num_experts, layer, 1)):
                table = table_of(experts, rank, num_nodes)
                counts += table.rank[table.find(choice, None)].flatten().bincount(minlength=num_ranks)
            measured.append(float(counts.max() / counts.mean()))
        before, after = measured
        assert before > 1.8
        assert after < 1.1
        assert after == pytest.approx(imbalance(recorded.tolist(), placed), abs=0.05)
