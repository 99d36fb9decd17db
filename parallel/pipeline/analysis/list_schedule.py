"""List scheduling of a one-copy pipeline under a memory bound: one pass in the order of time, by a policy.

Every rank takes, whenever it is free, the best action that can start: which one is best, how far it runs ahead and
when it fills a gap with a weight gradient is the policy. `counterflow.parallel.pipeline.schedules.auto` tries many.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from counterflow.parallel.pipeline.analysis.costs import Costs
from counterflow.parallel.pipeline.analysis.simulate import Work
from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.arrays import leaves_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a rank chooses.

    ahead: most live activations, by rank; at most the problem's limit.
    patience: a weight gradient starts in a gap where this share of it fits before the next action is known to come.
    forward_first: a forward before an input gradient, where both can start.
    merged: full backwards instead of I and W.
    """

    ahead: tuple[int, ...]
    patience: float = 0.0
    forward_first: bool = False
    merged: bool = False


class Problem:
    """What is to be scheduled: F, I and W (or B) of every stage and micro-batch.

    Actions are numbered (kind * num_stages + stage) * num_microbatches + microbatch, kinds in the order F, I, W, B.
    placement: stage -> rank. limit: most live activations on a rank; joint_limit: most activations and held weight
    gradients together.
    """

    KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)

    def __init__(
        self,
        placement: tuple[int, ...],
        num_ranks: int,
        num_microbatches: int,
        costs: Costs,
        *,
        limit: int,
        joint_limit: int,
    ) -> None:
        self.placement, self.num_ranks, self.num_microbatches = placement, num_ranks, num_microbatches
        self.costs, self.limit, self.joint_limit = costs, limit, joint_limit
        self.num_stages = len(placement)
        self.num_of_kind = self.num_stages * num_microbatches
        self.stages_of = [
            [stage for stage, holder in enumerate(placement) if holder == rank] for rank in range(num_ranks)
        ]
        self.duration = [
            costs.of_kind(self.KINDS[n], stage) for n in range(4) for stage in range(self.num_stages)
        ]
        self.delay = self._delays()
        self.work, self._index = self._make_work()

    @property
    def num_actions(self) -> int:
        """With every backward taken apart."""
        return 3 * self.num_of_kind

    @property
    def merging_pays(self) -> bool:
        """Whether some B is shorter than its I and W."""
        n = self.num_stages
        return any(
            self.duration[3 * n + s] < self.duration[n + s] + self.duration[2 * n + s] for s in range(n)
        )

    def kind_of(self, number: int) -> int:
        return number // self.num_of_kind

    def parts(self, number: int) -> tuple[int, int, int]:
        """(kind, stage, micro-batch)."""
        rest, microbatch = divmod(number, self.num_microbatches)
        kind, stage = divmod(rest, self.num_stages)
        return kind, stage, microbatch

    def stage_of(self, number: int) -> int:
        return number // self.num_microbatches % self.num_stages

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        return (kind * self.num_stages + stage) * self.num_microbatches + microbatch

    def action(self, number: int) -> Action:
        kind, stage, microbatch = self.parts(number)
        return Action(stage, self.KINDS[kind], microbatch)

    def run(self, orders: Sequence[Sequence[int]]) -> tuple[list[list[float]], list[list[float]]]:
        """Start and end of every action of `orders`, as far as the ranks come; see `Work.run`."""
        index = self._index
        return self.work.run([[index[number] for number in order] for order in orders])

    def schedule(self, orders: Sequence[Sequence[int]]) -> Schedule:
        return self._schedule([[self.action(number) for number in order] for order in orders])

    def _schedule(self, actions: Sequence[Sequence[Action]]) -> Schedule:
        return Schedule(
            name="auto",
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            placement=(self.placement,),
            actions=tuple(map(tuple, actions)),
        )

    def _delays(self) -> list[float]:
        """From the end of an action of one stage to its arrival over a boundary; 0 within a rank."""
        delays: list[float] = []
        for boundary in range(self.num_stages - 1):
            source, target = self.placement[boundary], self.placement[boundary + 1]
            link = self.costs.link(source, target)
            bandwidth = link.bandwidth_bytes_per_s
            sending = self.costs.bytes_at(boundary) / bandwidth if bandwidth else 0.0
            delays.append(0.0 if source == target else sending + link.latency_s)
        return delays

    def _make_work(self) -> tuple[Work, list[int]]:
        """The work of all F, I and W, with B added as I of another duration; and its index of each number."""
        orders: list[list[int]] = []
        for stages in self.stages_of:
            steps = [(0, stage) for stage in stages]
            steps += [(kind, stage) for stage in reversed(stages) for kind in (1, 2)]
            orders.append(
                [self.number(kind, stage, mb) for kind, stage in steps for mb in range(self.num_microbatches)]
            )
        schedule = self.schedule(orders)
        work = Work(schedule, leaves_of(schedule.actions), self.costs)
        flat = [number for order in orders for number in order]
        index = [0] * (4 * self.num_of_kind)
        for position, number in enumerate(flat):
            index[number] = position
        for offset in range(self.num_of_kind):
            same = index[self.num_of_kind + offset]
            index[3 * self.num_of_kind + offset] = len(work.duration)
            work.duration.append(self.duration[3 * self.num_stages + offset // self.num_microbatches])
            for column in work.needs:
                column.append(column[same])
            for columns in work.gives:
                for column in columns:
                    column.append(column[same])
        return work, index


def list_schedule(problem: Problem, policy: Policy) -> list[list[int]]:
    """The order of every rank under `policy`; complete, within the limits, and free of deadlock.

    Decisions are made in the order of time, so what has not been decided cannot arrive before.
    """
    return _Pass(problem, policy).run()


class _Pass:
    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        num_stages, num_ranks = problem.num_stages, problem.num_ranks
        self.orders: list[list[int]] = [[] for _ in range(num_ranks)]
        self.free = [0.0] * num_ranks
        self.live = [0] * num_ranks
        self.held = [0] * num_ranks
        # When the next micro-batches of a stage may start F and I; in order, as far as they are known.
        self.forwards: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.backwards: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.forwards[0].extend([0.0] * problem.num_microbatches)
        self.next = [[0] * num_stages for _ in range(3)]  # by kind (F, I or B, W): the next micro-batch
        self.owed: list[deque[int]] = [
            deque() for _ in range(num_ranks)
        ]  # stages whose W is to be done, in order
        self.version = [0] * num_ranks
        self.heap: list[tuple[float, int, int, int, int]] = []

    def run(self) -> list[list[int]]:
        for rank in range(self.problem.num_ranks):
            self._decide(rank)
        while self.heap:
            start, rank, version, kind, stage = heapq.heappop(self.heap)
            if version == self.version[rank]:
                self._commit(start, rank, kind, stage)
        return self.orders

    def _decide(self, rank: int) -> None:
        """Put the rank's next action on the heap; what it had there no longer counts."""
        policy, problem, free = self.policy, self.problem, self.free[rank]
        self.version[rank] += 1
        backward = 3 if policy.merged else 1
        ready: list[tuple[float, int, int]] = []  # start, preference, kind x stages + stage
        stages = problem.stages_of[rank]
        room = min(policy.ahead[rank], problem.limit) - self.live[rank]
        joint_room = problem.joint_limit - self.live[rank] - self.held[rank]
        for depth, stage in enumerate(reversed(stages)):
            # A later stage first: it is nearer to freeing memory. The last place is kept for the last stage.
            spare = 0 if depth == 0 else 1
            if self.backwards[stage]:
                preference = depth + (len(stages) if policy.forward_first else 0)
                ready.append(
                    (max(free, self.backwards[stage][0]), preference, backward * problem.num_stages + stage)
                )
            if self.forwards[stage] and room > spare and joint_room > spare:
                preference = depth + (0 if policy.forward_first else len(stages))
                ready.append((max(free, self.forwards[stage][0]), preference, stage))
        if self.owed[rank]:
            stage = self.owed[rank][0]
            gap = min(ready)[0] - free if ready else float("inf")
            length = problem.duration[2 * problem.num_stages + stage]
            if gap > 0 and gap >= policy.patience * length:
                ready = [(free, 0, 2 * problem.num_stages + stage)]
        if ready:
            start, _, code = min(ready)
            kind, stage = divmod(code, problem.num_stages)
            heapq.heappush(self.heap, (start, rank, self.version[rank], kind, stage))

    def _commit(self, start: float, rank: int, kind: int, stage: int) -> None:
        problem = self.problem
        row = 1 if kind == 3 else kind
        microbatch = self.next[row][stage]
        self.next[row][stage] += 1
        self.orders[rank].append(problem.number(kind, stage, microbatch))
        end = start + problem.duration[kind * problem.num_stages + stage]
        self.free[rank] = end
        receiver = rank
        if kind == 0:
            self.forwards[stage].popleft()
            self.live[rank] += 1
            if stage + 1 < problem.num_stages:
                receiver = problem.placement[stage + 1]
                self.forwards[stage + 1].append(end + problem.delay[stage])
            else:
                self.backwards[stage].append(end)
        elif kind == 2:
            self.owed[rank].popleft()
            self.held[rank] -= 1
        else:
            self.backwards[stage].popleft()
            self.live[rank] -= 1
            if kind == 1:
                self.held[rank] += 1
                self.owed[rank].append(stage)
            if stage > 0:
                receiver = problem.placement[stage - 1]
                self.backwards[stage - 1].append(end + problem.delay[stage - 1])
        self._decide(rank)
        if receiver != rank:
            self._decide(receiver)
