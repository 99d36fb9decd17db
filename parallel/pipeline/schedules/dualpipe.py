"""DualPipe with two copies of every stage (DeepSeek-V3 technical report, section 3.2.1, arXiv 2412.19437).

Micro-batches enter at both ends. Direction 0 (the first half of the micro-batches) has stage s on rank s,
direction 1 (the second half) has it on rank p-1-s, so rank r holds the stages r and p-1-r and its mirror rank
p-1-r holds the same two. Seen from a rank, the near direction enters at its own half of the pipeline and the
far one at the other half; a rank and its mirror run the same (kind, stage) sequence with directions exchanged.
"""

from __future__ import annotations

from collections import deque

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.schedules.definition import EqualStages, Formula, GeneratedSchedule

NEAR, FAR = 0, 1


def validate_dualpipe(num_ranks: int, num_microbatches: int) -> None:
    """Raises ValueError: an odd number of ranks or micro-batches, or too few micro-batches to fill both ways."""
    if num_ranks < 2 or num_ranks % 2:
        raise ValueError(
            f"parallel.pipeline_parallel_size={num_ranks}: dualpipe feeds the pipeline from both ends and needs "
            "an even number of ranks, at least 2; set parallel.pipeline_parallel_size to an even number, or "
            "choose schedule=1f1b"
        )
    if num_microbatches % 2:
        raise ValueError(
            f"schedule.num_microbatches={num_microbatches}: dualpipe gives each of its two directions half of "
            f"the micro-batches; set schedule.num_microbatches={num_microbatches + 1}, or any even number"
        )
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"schedule.num_microbatches={num_microbatches}: dualpipe needs at least twice as many micro-batches "
            f"as ranks (parallel.pipeline_parallel_size={num_ranks}) to fill both directions; set "
            f"schedule.num_microbatches={2 * num_ranks} or more, or choose schedule=1f1b"
        )


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two copies, overlapped forward and backward pairs, weight gradients deferred into the drain."""
    return Schedule(
        name="dualpipe",
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=(tuple(range(num_ranks)), tuple(reversed(range(num_ranks)))),
        actions=tuple(_of_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)),
    )


def _of_rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    depth = min(rank, num_ranks - 1 - rank)
    in_second_half = rank >= num_ranks // 2
    issuer = Issuer(
        stage={NEAR: depth, FAR: num_ranks - 1 - depth},
        first={
            NEAR: in_second_half * num_microbatches // 2,
            FAR: (not in_second_half) * num_microbatches // 2,
        },
    )
    return eight_phases(issuer, depth=depth, half=num_ranks // 2, share=num_microbatches // 2)


def eight_phases(issuer: Issuer, *, depth: int, half: int, share: int) -> tuple[Action, ...]:
    """One rank's list, in the eight phases of the schedule.

    depth: ranks between this one and its end of the pipeline. half: ranks from there to the middle.
    share: micro-batches of either direction.
    """
    inner = half - depth - 1  # ranks between this one and the middle
    forward, backward = issuer.forward, issuer.backward
    actions: list[Action] = []

    for _ in range(2 * inner):
        actions.append(forward(NEAR))
    for _ in range(depth + 1):
        actions += [forward(NEAR), forward(FAR)]
    for _ in range(inner):
        actions += [issuer.input_gradient(FAR), issuer.weight_gradient(), forward(FAR)]
    for turn in range(share - 2 * half + depth + 1):
        if turn == 0 and inner == 0:
            # The far backward of a middle rank follows its neighbour's forward, with nothing to hide behind.
            actions += [forward(NEAR), backward(FAR)]
        else:
            actions.append(Action.pair(forward(NEAR), backward(FAR)))
        actions.append(Action.pair(forward(FAR), backward(NEAR)))
    for _ in range(inner):
        actions += [backward(FAR), Action.pair(forward(FAR), backward(NEAR))]
    for index in range(2 * (depth + 1)):
        direction = NEAR if index % 2 else FAR
        actions.append(backward(direction) if index <= depth else issuer.input_gradient(direction))
    for _ in range(inner):
        actions += [issuer.weight_gradient(), issuer.input_gradient(NEAR)]
    for _ in range(depth + 1):
        actions.append(issuer.weight_gradient())
    return tuple(actions)


class Issuer:
    """Hands out one rank's actions, each kind's micro-batches in order.

    stage, first: of the near and the far direction, the stage on this rank and the first micro-batch.
    """

    def __init__(self, *, stage: dict[int, int], first: dict[int, int]) -> None:
        self._stage = stage
        self._next_forward = dict(first)
        self._next_backward = dict(first)
        self._deferred: deque[tuple[int, int]] = deque()

    def forward(self, direction: int) -> Action:
        self._next_forward[direction] += 1
        return Action(self._stage[direction], Kind.F, self._next_forward[direction] - 1)

    def backward(self, direction: int, kind: Kind = Kind.B) -> Action:
        self._next_backward[direction] += 1
        return Action(self._stage[direction], kind, self._next_backward[direction] - 1)

    def input_gradient(self, direction: int) -> Action:
        action = self.backward(direction, Kind.I)
        assert action.microbatch is not None
        self._deferred.append((action.stage, action.microbatch))
        return action

    def weight_gradient(self) -> Action:
        """The oldest weight gradient that is still to be computed."""
        stage, microbatch = self._deferred.popleft()
        return Action(stage, Kind.W, microbatch)


def dualpipe_bubble(stages: EqualStages) -> tuple[float, float]:
    """Idle and busy time of a rank by the formula of DeepSeek-V3's report, over an even number of ranks."""
    backward, pair = stages.backward, stages.pair
    idle = (stages.num_ranks / 2 - 1) * (pair + backward - 3 * stages.weight_gradient)
    hidden = _mean_pairs(stages.num_ranks, stages.num_microbatches) * (stages.forward + backward - pair)
    return idle, stages.busy - hidden


def _mean_pairs(num_ranks: int, num_microbatches: int) -> float:
    """Overlapped pairs of a rank, averaged over the ranks."""
    half = num_ranks // 2
    return sum(num_microbatches - 2 * num_ranks + half + depth + 1 for depth in range(half)) / half - 1 / half


SCHEDULE = GeneratedSchedule(
    name="dualpipe",
    title="DualPipe, two copies",
    summary="two copies of each stage, micro-batches from both ends; an even number of ranks, and of micro-batches at "
    "least twice as many",
    paper="DeepSeek-V3, arXiv 2412.19437",
    generate=dualpipe,
    validate=validate_dualpipe,
    mirrored=True,
    has_pairs=True,
    formula=Formula(text="(PP/2-1)(F&B+B-3W)", of=dualpipe_bubble),
)
