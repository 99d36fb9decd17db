"""An executable model of the ranks, written apart from the verifier: it runs a schedule and sees what happens.

It shares no rule with parallel/pipeline/ir/dependencies.py. Ranks hold named tensors; a compute action that misses
one, or makes one twice, fails; messages of a channel match first with first, and a mismatch fails; collectives of
the holders of a stage match likewise. An `ordered` transport has two queues per rank, one for each direction of
travel, that take its messages one at a time: a message passes when it heads the queues of both its ranks, and the
sender rests until then.
"""

from __future__ import annotations

from collections import defaultdict

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule


class BrokenError(Exception):
    """The schedule did something impossible, or came to rest before its end."""


def survives(schedule: Schedule) -> bool:
    """Whether every rank reaches its end, with everything computed once, under both transports."""
    try:
        for ordered in (False, True):
            _Machine(schedule, ordered).run()
    except BrokenError:
        return False
    return True


class _Machine:
    def __init__(self, schedule: Schedule, ordered: bool) -> None:
        self.schedule, self.ordered = schedule, ordered
        self.at = [0] * schedule.num_ranks
        self.tensors: list[set[tuple[str, int, int]]] = [set() for _ in schedule.actions]
        self.gradients: dict[tuple[int, int], set[int]] = defaultdict(set)  # (rank, stage) -> micro-batches
        self.posted: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
        self.issued: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
        self.queues: dict[tuple[int, bool], list[tuple[int, str, int, int]]] = defaultdict(list)
        self.passed: set[tuple[int, str, int, int]] = set()  # (receiver, tensor)
        self.whole: list[set[int]] = [set() for _ in schedule.actions]
        self.reduced: set[tuple[int, int]] = set()
        self.joined: dict[tuple[tuple[int, ...], int], list[Action]] = defaultdict(list)
        self.entered: set[int] = set()
        kinds = {action.kind for actions in schedule.actions for action in actions}
        self.communicates = bool(kinds - {Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})
        self.shards = bool(kinds & {Kind.UNSHARD, Kind.RESHARD})

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(self.schedule.actions):
                while self.at[rank] < len(actions) and self._step(rank, actions[self.at[rank]]):
                    self.at[rank] += 1
                    self.entered.discard(rank)
                    moved = True
        self._check_end()

    def _home(self, stage: int, microbatch: int) -> int:
        placement, total = self.schedule.placement, self.schedule.num_microbatches
        if not (0 <= stage < self.schedule.num_stages and 0 <= microbatch < total):
            raise BrokenError
        return placement[0 if len(placement) == 1 or microbatch < total // 2 else 1][stage]

    def _step(self, rank: int, action: Action) -> bool:
        """Do it, or return False to wait."""
        match action.kind:
            case Kind.OVERLAP_F_B:
                ready = all(self._ready(rank, part) for part in action.parts)
                if ready:
                    for part in action.parts:
                        self._compute(rank, part)
                return ready
            case Kind.F | Kind.B | Kind.I | Kind.W:
                ready = self._ready(rank, action)
                if ready:
                    self._compute(rank, action)
                return ready
            case Kind.SEND_F | Kind.SEND_B:
                return self._send(rank, action)
            case Kind.RECV_F | Kind.RECV_B:
                self._receive(rank, action)
                return True
            case Kind.UNSHARD | Kind.REDUCE_GRAD:
                return self._collective(rank, action)
            case Kind.RESHARD:
                if action.stage not in self.whole[rank]:
                    raise BrokenError
                self.whole[rank].remove(action.stage)
                return True
            case _:
                raise BrokenError

    def _ready(self, rank: int, action: Action) -> bool:
        stage, microbatch = action.stage, action.microbatch
        if self._home(stage, microbatch) != rank:
            raise BrokenError
        if self.shards and action.kind is not Kind.W and stage not in self.whole[rank]:
            raise BrokenError
        wanted: list[tuple[str, int, int]] = []
        if action.kind is Kind.F and stage > 0:
            wanted = [("y", stage - 1, microbatch)]
        elif action.kind in (Kind.B, Kind.I):
            wanted = [("y", stage, microbatch)]
            if stage < self.schedule.num_stages - 1:
                wanted.append(("dx", stage + 1, microbatch))
        elif action.kind is Kind.W:
            wanted = [("dx", stage, microbatch)]
        return all(self._holds(rank, tensor) for tensor in wanted)

    def _holds(self, rank: int, tensor: tuple[str, int, int]) -> bool:
        if tensor in self.tensors[rank]:
            return True
        maker = self._home(tensor[1], tensor[2])
        if maker == rank:
            return False
        if not self.communicates:
            return tensor in self.tensors[maker]
        channel = (maker, rank)
        if self.ordered:
            return (rank, *tensor) in self.passed
        return tensor in self.posted[channel] and tensor in self.issued[channel]

    def _compute(self, rank: int, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        made = {Kind.F: ["y"], Kind.I: ["dx"], Kind.B: ["dx"], Kind.W: []}[action.kind]
        for what in made:
            if (what, stage, microbatch) in self.tensors[rank]:
                raise BrokenError
            self.tensors[rank].add((what, stage, microbatch))
        if action.kind in (Kind.B, Kind.W):
            if microbatch in self.gradients[rank, stage] or (rank, stage) in self.reduced:
                raise BrokenError
            self.gradients[rank, stage].add(microbatch)

    def _send(self, rank: int, action: Action) -> bool:
        forward = action.kind is Kind.SEND_F
        target = action.stage + (1 if forward else -1)
        if not 0 <= target < self.schedule.num_stages or self._home(action.stage, action.microbatch) != rank:
            raise BrokenError
        tensor = ("y" if forward else "dx", action.stage, action.microbatch)
        peer = self._home(target, action.microbatch)
        if peer == rank:
            raise BrokenError
        if tensor not in self.tensors[rank]:
            return False
        issued, posted = self.issued[rank, peer], self.posted[rank, peer]
        if rank not in self.entered:
            self.entered.add(rank)
            issued.append(tensor)
            self._match(issued, posted)
            self._enqueue(rank, rank < peer, (peer, *tensor))
        return not self.ordered or (peer, *tensor) in self.passed

    def _receive(self, rank: int, action: Action) -> None:
        forward = action.kind is Kind.RECV_F
        source = action.stage - (1 if forward else -1)
        if not 0 <= source < self.schedule.num_stages or self._home(action.stage, action.microbatch) != rank:
            raise BrokenError
        peer = self._home(source, action.microbatch)
        if peer == rank:
            raise BrokenError
        tensor = ("y" if forward else "dx", source, action.microbatch)
        self.posted[peer, rank].append(tensor)
        self._match(self.issued[peer, rank], self.posted[peer, rank])
        self._enqueue(rank, peer < rank, (rank, *tensor))

    def _enqueue(self, rank: int, upward: bool, message: tuple[int, str, int, int]) -> None:
        self.queues[rank, upward].append(message)
        passing = True
        while passing:
            passing = False
            heads = [(key, queue[0]) for key, queue in self.queues.items() if queue]
            for key, head in heads:
                partners = [other for other, peer_head in heads if other != key and peer_head == head]
                if partners:
                    self.passed.add(head)
                    self.queues[key].pop(0)
                    self.queues[partners[0]].pop(0)
                    passing = True
                    break

    @staticmethod
    def _match(issued: list[tuple[str, int, int]], posted: list[tuple[str, int, int]]) -> None:
        last = min(len(issued), len(posted)) - 1
        if last >= 0 and issued[last] != posted[last]:
            raise BrokenError

    def _collective(self, rank: int, action: Action) -> bool:
        holders = tuple(sorted({ranks[action.stage] for ranks in self.schedule.placement}))
        if rank not in holders:
            raise BrokenError
        mine = self.joined[holders, rank]
        if rank not in self.entered:
            self.entered.add(rank)
            mine.append(action)
        for other in holders:
            theirs = self.joined[holders, other]
            if len(theirs) < len(mine):
                return False
            if theirs[len(mine) - 1] != action:
                raise BrokenError
        if action.kind is Kind.UNSHARD:
            if action.stage in self.whole[rank]:
                raise BrokenError
            self.whole[rank].add(action.stage)
        else:
            if (rank, action.stage) in self.reduced:
                raise BrokenError
            self.reduced.add((rank, action.stage))
        return True

    def _check_end(self) -> None:
        schedule = self.schedule
        if any(at < len(actions) for at, actions in zip(self.at, schedule.actions, strict=True)):
            raise BrokenError
        for stage in range(schedule.num_stages):
            for microbatch in range(schedule.num_microbatches):
                rank = self._home(stage, microbatch)
                if not {("y", stage, microbatch), ("dx", stage, microbatch)} <= self.tensors[rank]:
                    raise BrokenError
                if microbatch not in self.gradients[rank, stage]:
                    raise BrokenError
                if self.communicates and (rank, stage) not in self.reduced:
                    raise BrokenError
        if any(self.whole):
            raise BrokenError
        for channel in self.issued.keys() | self.posted.keys():
            if self.issued[channel] != self.posted[channel]:
                raise BrokenError
