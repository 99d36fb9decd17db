"""Improve the orders of a pipeline's ranks move by move, along the critical path."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from counterflow.parallel.pipeline.analysis.list_schedule import Problem

Orders = list[list[int]]

_HISTORY = 12


def improve(
    problem: Problem, orders: Orders, *, num_runs: int, bound: float, generator: random.Random
) -> Orders:
    """The best orders found by `num_runs` moves from `orders`, which are within the problem's limits.

    A move takes an action out of a block of the critical path, to before or behind the block, or fills a gap with a
    later weight gradient. Late acceptance (Burke and Bykov, "The late acceptance hill-climbing heuristic", 2017): a
    move is kept where it is no worse than what was kept `_HISTORY` moves before. Stops at `bound`, below which
    nothing can be.
    """
    current = _State(problem, orders)
    best = current
    history = [current.value] * _HISTORY
    for turn in range(num_runs):
        if best.makespan <= bound * (1 + 1e-12):
            break
        moved = current.neighbour(generator)
        if moved is not None and moved.value <= max(current.value, history[turn % _HISTORY]):
            current = moved
            if current.makespan < best.makespan:
                best = current
        history[turn % _HISTORY] = current.value
    return best.orders


class _State:
    def __init__(self, problem: Problem, orders: Orders) -> None:
        self.problem, self.orders = problem, orders
        self.starts, self.ends = problem.run(orders)
        self.makespan = self.value = math.inf  # the ranks wait for each other
        if all(len(ends) == len(order) for ends, order in zip(self.ends, orders, strict=True)):
            last = [ends[-1] for ends in self.ends]
            self.makespan = max(last)
            # Among equal makespans, the ranks that end early leave room for the next move.
            self.value = self.makespan + 1e-3 * sum(last) / len(last)

    def neighbour(self, generator: random.Random) -> _State | None:
        """After one random move, or None where the move breaks a rule."""
        rank, index, target = self._gap(generator) if generator.random() < 0.3 else self._block(generator)
        if index == target:
            return None
        order = self.orders[rank].copy()
        order.insert(target, order.pop(index))
        if not _allowed(self.problem, order):
            return None
        moved = _State(self.problem, [*self.orders[:rank], order, *self.orders[rank + 1 :]])
        return None if moved.makespan == math.inf else moved

    def _gap(self, generator: random.Random) -> tuple[int, int, int]:
        """A weight gradient that comes later, into a random gap."""
        problem = self.problem
        rank = generator.randrange(problem.num_ranks)
        order, starts, ends = self.orders[rank], self.starts[rank], self.ends[rank]
        gaps = [index for index in range(1, len(order)) if starts[index] > ends[index - 1]]
        if not gaps:
            return rank, 0, 0
        gap = generator.choice(gaps)
        later = [index for index in range(gap, len(order)) if problem.kind_of(order[index]) == 2]
        return (rank, generator.choice(later[:4]), gap) if later else (rank, 0, 0)

    def _block(self, generator: random.Random) -> tuple[int, int, int]:
        """An action of the critical path, to before or behind its block."""
        blocks = [block for block in self._blocks() if block[2] > block[1]]
        if not blocks:
            return 0, 0, 0
        rank, first, last = generator.choice(blocks)
        if generator.random() < 0.5:
            # Near the ends of a block most is gained, and most moves are allowed.
            index = min(last, first + 1 + int(generator.expovariate(0.5)))
            return rank, index, max(first, index - 1 - int(generator.expovariate(0.5)))
        index = max(first, last - 1 - int(generator.expovariate(0.5)))
        return rank, index, min(len(self.orders[rank]) - 1, index + 1 + int(generator.expovariate(0.3)))

    def _blocks(self) -> list[tuple[int, int, int]]:
        """(rank, first, last) of the runs of actions without a gap that make up a critical path."""
        problem = self.problem
        rank = max(range(problem.num_ranks), key=lambda rank: self.ends[rank][-1:] or [0.0])
        index: int = len(self.orders[rank]) - 1
        last = index
        blocks: list[tuple[int, int, int]] = []
        while True:
            if index > 0 and self.ends[rank][index - 1] == self.starts[rank][index]:
                index -= 1
                continue
            blocks.append((rank, index, last))
            source = _source(problem, self.orders[rank][index])
            if source is None:
                return blocks
            rank, makers = source
            order = self.orders[rank]
            index = order.index(next(number for number in makers if number in order))
            last = index


def _source(problem: Problem, number: int) -> tuple[int, tuple[int, ...]] | None:
    """The rank of what an action waits for on another rank, and the actions that may give it."""
    kind, stage, microbatch = problem.parts(number)
    if kind == 0 and stage > 0:
        return problem.placement[stage - 1], (problem.number(0, stage - 1, microbatch),)
    if kind in (1, 3) and stage + 1 < problem.num_stages:
        wanted = tuple(problem.number(of, stage + 1, microbatch) for of in (1, 3))
        return problem.placement[stage + 1], wanted
    return None


def _allowed(problem: Problem, order: Sequence[int]) -> bool:
    """Whether a rank's order keeps what it needs from itself, and the limits."""
    done: set[int] = set()  # a B counts as its I
    live = held = 0
    mine = problem.placement[problem.stage_of(order[0])]
    for number in order:
        kind, stage, microbatch = problem.parts(number)
        if kind == 0:
            live += 1
            wanted = [(0, stage - 1)]
        elif kind == 2:
            held -= 1
            wanted = [(1, stage)]
        else:
            live -= 1
            held += kind == 1
            wanted = [(0, stage), (1, stage + 1)]
        if live > problem.limit or live + held > problem.joint_limit:
            return False
        for of, where in wanted:
            here = 0 <= where < problem.num_stages and problem.placement[where] == mine
            if here and problem.number(of, where, microbatch) not in done:
                return False
        done.add(problem.number(1, stage, microbatch) if kind == 3 else number)
    return True
