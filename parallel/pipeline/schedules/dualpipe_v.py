"""DualPipe folded into a V: one copy of every stage (DualPipeV, after DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

With P ranks and 2P stages, rank r holds the stages r and 2P-1-r, as rank r of a two-copy DualPipe of 2P ranks
does. Where that one meets micro-batches from the other end, this one meets its own on their way back, and the two
middle ranks of that one are the last rank of this.
"""

from __future__ import annotations

from dataclasses import replace

from counterflow.parallel.pipeline.ir.action import Action, Schedule
from counterflow.parallel.pipeline.schedules.definition import EqualStages, Formula, GeneratedSchedule
from counterflow.parallel.pipeline.schedules.dualpipe import FAR, NEAR, Issuer, dualpipe_bubble, eight_phases
from counterflow.parallel.pipeline.schedules.v_shape import v_placement


def validate_dualpipe_v(num_ranks: int, num_microbatches: int) -> None:
    """Raises ValueError: too few micro-batches to fill both ways."""
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"schedule.num_microbatches={num_microbatches}: dualpipe_v needs at least one micro-batch for each of "
            f"its {2 * num_ranks} stages (two on each rank, parallel.pipeline_parallel_size={num_ranks}); set "
            f"schedule.num_microbatches={2 * num_ranks} or more, or choose schedule=zbv"
        )


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """One copy in a V, overlapped forward and backward pairs, weight gradients deferred into the drain.

    Every rank holds at most 2P+1 activations of its two stages.
    """
    return Schedule(
        name="dualpipe_v",
        num_stages=2 * num_ranks,
        num_microbatches=num_microbatches,
        placement=(v_placement(num_ranks),),
        actions=tuple(_of_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)),
    )


def _of_rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    issuer = Issuer(stage={NEAR: rank, FAR: 2 * num_ranks - 1 - rank}, first={NEAR: 0, FAR: 0})
    return eight_phases(issuer, depth=rank, half=num_ranks, share=num_microbatches)


def _bubble(stages: EqualStages) -> tuple[float, float]:
    # A V folds the two directions of twice the ranks and micro-batches into one.
    return dualpipe_bubble(
        replace(stages, num_ranks=2 * stages.num_ranks, num_microbatches=2 * stages.num_microbatches)
    )


SCHEDULE = GeneratedSchedule(
    name="dualpipe_v",
    title="DualPipe in a V",
    summary="DualPipe folded into a V: one copy, two stages a rank; micro-batches at least twice the ranks",
    paper="after DeepSeek-V3, arXiv 2412.19437",
    generate=dualpipe_v,
    validate=validate_dualpipe_v,
    num_chunks=2,
    has_pairs=True,
    formula=Formula(text="(PP-1)(F&B+B-3W)", of=_bubble),
    torch_name="ScheduleDualPipeV",
)
