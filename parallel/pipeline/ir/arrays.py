"""A schedule as integer arrays: the rule table read for millions of actions at once.

Actions are numbered over all ranks, rank by rank in order. Products are numbered
`(value * num_stages + stage) * num_microbatches + microbatch`. The rules themselves stand in
parallel/pipeline/ir/dependencies.py; nothing here adds to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.dependencies import ROUTES, RULES, Product, Value

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

KINDS = tuple(Kind)
CODES = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """Every action of every rank, pairs taken apart, in order; one entry per leaf, but for `offsets`.

    offsets: [num_ranks + 1], the number of each rank's first action.
    action: the number of the action that the leaf is, or is a half of. rank: whose it is. kind: its index in
        `KINDS`. microbatch: -1 where there is none.
    """

    offsets: Ints
    action: Ints
    rank: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints

    @property
    def num_actions(self) -> int:
        return int(self.offsets[-1])

    @property
    def half(self) -> Ints:
        """0, or 1 for the second half of a pair."""
        return np.diff(self.action, prepend=-1) ^ 1

    def where(self, *kinds: Kind) -> Bools:
        """Which leaves are of one of `kinds`."""
        is_one = np.zeros(len(KINDS), dtype=np.bool_)
        is_one[[CODES[kind] for kind in kinds]] = True
        return is_one[self.kind]

    def place(self, leaf: int) -> tuple[int, int]:
        """(rank, index in its list) of a leaf's action."""
        rank = int(self.rank[leaf])
        return rank, int(self.action[leaf] - self.offsets[rank])


def leaves_of(actions: Sequence[Sequence[Action]]) -> Leaves:
    """The arrays of these lists, one a rank."""
    flat: Sequence[Action] = list(chain.from_iterable(actions))
    lengths = np.array([len(of_rank) for of_rank in actions], dtype=np.int64)
    number = np.arange(len(flat), dtype=np.int64)
    rank = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    if any(map(attrgetter("parts"), flat)):
        halves = [action.parts or (action,) for action in flat]
        number = np.repeat(number, np.fromiter(map(len, halves), np.int64, len(flat)))
        rank = rank[number]
        flat = list(chain.from_iterable(halves))
    count = len(flat)
    microbatches = map(attrgetter("microbatch"), flat)
    return Leaves(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        action=number,
        rank=rank,
        kind=np.fromiter(map(CODES.__getitem__, map(attrgetter("kind"), flat)), np.int64, count),
        stage=np.fromiter(map(attrgetter("stage"), flat), np.int64, count),
        microbatch=np.fromiter((-1 if m is None else m for m in microbatches), np.int64, count),
    )


class Products:
    """The products of a schedule by number: where each is made, and to whom it is sent.

    holder, receiver: [len(Value) * num_stages * num_microbatches]; the rank that makes a product, and the rank to
        which it must be sent, -1 where it is used on its own rank only.
    boundary: the earlier of the two stages between which it travels; -1 where there is no other stage.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.num_stages, self.num_microbatches = schedule.num_stages, schedule.num_microbatches
        placement = np.array(schedule.placement, dtype=np.int64)
        direction = np.arange(self.num_microbatches) * schedule.num_directions // self.num_microbatches
        self.rank_of = placement.T[:, direction]  # [stage, microbatch]
        self.holder = np.tile(self.rank_of.ravel(), len(Value))
        receiver = np.full((len(Value), self.num_stages, self.num_microbatches), -1, dtype=np.int64)
        boundary = receiver.copy()
        for value, route in ROUTES.items():
            sending = slice(max(0, -route.step), self.num_stages - max(0, route.step))
            receiving = slice(sending.start + route.step, sending.stop + route.step)
            to, at = self.rank_of[receiving], self.rank_of[sending]
            receiver[value, sending] = np.where(to == at, -1, to)
            boundary[value, sending] = np.arange(self.num_stages - 1)[:, None]
        self.receiver, self.boundary = receiver.ravel(), boundary.ravel()

    @property
    def count(self) -> int:
        return len(self.holder)

    def number(self, value: Value, stage: Ints, microbatch: Ints) -> Ints:
        """Of these products; stage and micro-batch must exist."""
        return (int(value) * self.num_stages + stage) * self.num_microbatches + microbatch

    def product(self, number: int) -> Product:
        """The inverse of `number`, for one product."""
        rest, microbatch = divmod(int(number), self.num_microbatches)
        value, stage = divmod(rest, self.num_stages)
        return Value(value), stage, microbatch

    def given(self, leaves: Leaves) -> tuple[Ints, Ints]:
        """(leaf, product) of everything that the compute actions leave, kind by kind."""
        return self._table(
            leaves, {kind: [(value, 0) for value in rule.gives] for kind, rule in RULES.items()}
        )

    def makers(self, leaves: Leaves) -> Ints:
        """[count]: the number of the (last) action that makes each product; -1 where none does."""
        leaf, product = self.given(leaves)
        result = np.full(self.count, -1, dtype=np.int64)
        result[product] = leaves.action[leaf]
        return result

    def needed(self, leaves: Leaves) -> tuple[Ints, Ints]:
        """(leaf, product) of everything that the compute actions read, kind by kind."""
        return self._table(leaves, {kind: list(rule.needs) for kind, rule in RULES.items()})

    def carried(self, leaves: Leaves) -> tuple[Ints, Ints]:
        """(leaf, product) of every send and receive, kind by kind; product -1 where its stage does not exist."""
        table = {route.send: [(value, 0)] for value, route in ROUTES.items()}
        table |= {route.receive: [(value, -route.step)] for value, route in ROUTES.items()}
        return self._table(leaves, table, keep_missing=True)

    def _table(
        self, leaves: Leaves, table: dict[Kind, list[tuple[Value, int]]], *, keep_missing: bool = False
    ) -> tuple[Ints, Ints]:
        """`table` says for each kind which values are meant, and how far their stage is from the leaf's own."""
        found: list[tuple[Ints, Ints]] = []
        for kind, entries in table.items():
            of_kind = np.flatnonzero(leaves.where(kind))
            for value, offset in entries:
                stage = leaves.stage[of_kind] + offset
                exists = (stage >= 0) & (stage < self.num_stages)
                number = self.number(value, stage, leaves.microbatch[of_kind])
                if keep_missing:
                    found.append((of_kind, np.where(exists, number, -1)))
                else:
                    found.append((of_kind[exists], number[exists]))
        return np.concatenate([leaf for leaf, _ in found]), np.concatenate([number for _, number in found])


def peaks(leaves: Leaves) -> tuple[list[int], list[int]]:
    """Each rank's most live activations, and its most held weight gradients; see `simulate.peak_live`."""
    activations, held = live(leaves)
    return maxima(leaves, activations), maxima(leaves, held)


def live(leaves: Leaves) -> tuple[Ints, Ints]:
    """Activations that are alive, and weight gradients that are held, on the rank after each leaf.

    An activation lives from its F to its I or B. After I, what W needs is held until W. In a pair the forward
    stores before the backward frees.
    """
    stored = leaves.where(Kind.F).astype(np.int64) - leaves.where(Kind.B, Kind.I)
    filed = leaves.where(Kind.I).astype(np.int64) - leaves.where(Kind.W)
    return running(leaves, stored), running(leaves, filed)


def running(leaves: Leaves, change: Ints) -> Ints:
    """The sum of `change` over a rank's leaves up to and with each of them."""
    total = np.cumsum(change)
    starts = np.searchsorted(leaves.rank, np.arange(len(leaves.offsets) - 1))
    before = np.concatenate([[0], total])[starts]
    return total - before[leaves.rank]


def maxima(leaves: Leaves, values: Ints) -> list[int]:
    """The largest of a rank's `values`, at least 0."""
    result = np.zeros(len(leaves.offsets) - 1, dtype=np.int64)
    np.maximum.at(result, leaves.rank, values)
    return [int(value) for value in result]
