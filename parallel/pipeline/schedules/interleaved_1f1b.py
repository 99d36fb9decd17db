"""Interleaved 1F1B: several chunks of the model on each rank (Narayanan et al., arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from itertools import pairwise

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.schedules.definition import EqualStages, Formula, GeneratedSchedule


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """1F1B over `num_chunks` stages a rank, stage s on rank s mod p; the bubble shrinks by `num_chunks`.

    Micro-batches go through a rank's chunks in rounds. Any number of micro-batches will do: the rounds share
    them out so that each has at least p of them (or all there are) and none is larger than the one before it. A
    rank runs as far ahead as the first round reaches, so a later round that is larger would wait for itself.

    Rank r holds at most min((v-1) g + 2 (p-1-r) + 1, v m) activations, with v chunks and g micro-batches in the
    first round; g = p where m is a multiple of p. One chunk makes it 1F1B, with p-r.
    """
    num_stages = num_ranks * num_chunks
    return Schedule(
        name="interleaved_1f1b",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=(tuple(stage % num_ranks for stage in range(num_stages)),),
        actions=tuple(_of_rank(rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks)),
        pairs_chunks=num_chunks > 1,
    )


def _rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """Micro-batches of each round, in order."""
    num_rounds = max(1, num_microbatches // num_ranks)
    size, num_larger = divmod(num_microbatches, num_rounds)
    starts = [index * size + min(index, num_larger) for index in range(num_rounds + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _of_rank(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[Action, ...]:
    rounds = _rounds(num_ranks, num_microbatches)
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    forwards = [Action(stage, Kind.F, index) for turn in rounds for stage in stages for index in turn]
    backwards = [
        Action(stage, Kind.B, index) for turn in rounds for stage in reversed(stages) for index in turn
    ]

    # Two more for each rank behind: one on the way down, one on the way back to this rank's last chunk.
    per_rank_behind = 1 if num_chunks == 1 else 2
    ahead = (num_chunks - 1) * len(rounds[0]) + per_rank_behind * (num_ranks - 1 - rank)
    actions = forwards[:ahead]
    for index, backward in enumerate(backwards):
        actions += [*forwards[ahead + index : ahead + index + 1], backward]
    return tuple(actions)


def _bubble(stages: EqualStages) -> tuple[float, float]:
    return (stages.num_ranks - 1) * (stages.forward + stages.backward), stages.num_chunks * stages.busy


SCHEDULE = GeneratedSchedule(
    name="interleaved_1f1b",
    title="interleaved 1F1B",
    summary="1F1B over several stages a rank, stage s on rank s mod p; schedule.num_chunks says how many",
    paper="Narayanan et al., arXiv 2104.04473",
    generate=interleaved_1f1b,
    num_chunks=2,
    any_chunks=True,
    has_pairs=True,
    formula=Formula(text="(PP-1)(F+B) of a chunk", of=_bubble),
    torch_name="ScheduleInterleaved1F1B",
)
