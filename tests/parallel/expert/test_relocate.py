"""Plans that move experts: carried out on plain lists, every rank ends up with what the new placement says."""

from __future__ import annotations

import random

import pytest

from counterflow.parallel.expert.relocate import Holding, plan_moves

NUMEL = 5


def holdings(ep_size: int, num_replicas: int, num_slots: int, *, sharded: bool) -> dict[int, Holding]:
    """Global rank = replica * ep_size + ep_rank; a shard is an equal range of the padded stack."""
    total = num_slots * NUMEL
    shard = -(-total // num_replicas)
    found: dict[int, Holding] = {}
    for replica in range(num_replicas):
        start, stop = (
            (min(replica * shard, total), min((replica + 1) * shard, total)) if sharded else (0, total)
        )
        for ep_rank in range(ep_size):
            found[replica * ep_size + ep_rank] = Holding(
                ep_rank=ep_rank, axis=replica, start=start, stop=stop
            )
    return found


def stack(experts: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(expert, element) for expert in experts for element in range(NUMEL)]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("num_copies", [0, 3])
@pytest.mark.parametrize(
    ("ep_size", "num_replicas", "num_slots"), [(2, 1, 2), (2, 3, 2), (4, 2, 3), (3, 4, 2)]
)
def test_every_rank_gets_what_it_is_to_hold(
    ep_size: int, num_replicas: int, num_slots: int, num_copies: int, sharded: bool
) -> None:
    held = holdings(ep_size, num_replicas, num_slots, sharded=sharded)
    num_experts = ep_size * num_slots - num_copies
    for seed in range(10):
        placements: list[tuple[tuple[int, ...], ...]] = []
        for _ in range(2):
            generator = random.Random(seed + 100 * len(placements))
            order = list(range(num_experts))
            order += generator.choices(order, k=num_copies)
            generator.shuffle(order)
            placements.append(
                tuple(tuple(order[rank * num_slots : (rank + 1) * num_slots]) for rank in range(ep_size))
            )
        before, after = placements
        memory = {rank: stack(before[each.ep_rank])[each.start : each.stop] for rank, each in held.items()}
        moves = plan_moves(before, after, held, NUMEL)
        carried = [
            (move, memory[move.source][move.source_start - held[move.source].start :][: move.length])
            for move in moves
        ]
        written: dict[int, set[int]] = {rank: set() for rank in held}
        for move, values in carried:
            assert len(values) == move.length
            start = move.target_start - held[move.target].start
            positions = set(range(start, start + move.length))
            assert not positions & written[move.target], "an element is sent once"
            written[move.target] |= positions
            memory[move.target][start : start + move.length] = values
        for rank, each in held.items():
            assert memory[rank] == stack(after[each.ep_rank])[each.start : each.stop]
        if not sharded:
            assert all(held[move.source].axis == held[move.target].axis for move in moves)


def test_copies_come_from_the_nearest_one() -> None:
    held = holdings(4, 1, 2, sharded=False)
    before = ((0, 1), (2, 3), (4, 5), (0, 6))
    moves = plan_moves(before, ((0, 1), (2, 0), (4, 0), (0, 6)), held, NUMEL)
    assert [(held[move.source].ep_rank, held[move.target].ep_rank) for move in moves] == [(0, 1), (3, 2)]
    # A copy on the rank itself is one: nothing is sent.
    (move,) = plan_moves(before, ((0, 0), (2, 3), (4, 5), (1, 6)), held, NUMEL)[:1]
    assert move.source == move.target == 0


def test_what_stays_is_not_moved() -> None:
    before = ((0, 1), (2, 3))
    held = holdings(2, 2, 2, sharded=True)
    assert plan_moves(before, before, held, NUMEL) == []
    moves = plan_moves(before, ((0, 2), (1, 3)), held, NUMEL)
    assert {(held[move.source].ep_rank, held[move.target].ep_rank) for move in moves} == {(0, 1), (1, 0)}
    assert sum(move.length for move in moves) == 2 * NUMEL
