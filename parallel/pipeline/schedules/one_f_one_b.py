"""1F1B: one forward, one backward (PipeDream-Flush, Narayanan et al., arXiv 2006.09503)."""

from __future__ import annotations

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.schedules.definition import EqualStages, Formula, GeneratedSchedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Fill the pipeline, alternate forward and backward, drain.

    Rank r runs p-1-r forwards ahead, so at most p-r activations are alive on it, whatever the number of
    micro-batches.
    """
    return Schedule(
        name="1f1b",
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=(tuple(range(num_ranks)),),
        actions=tuple(_of_stage(stage, num_ranks, num_microbatches) for stage in range(num_ranks)),
    )


def _of_stage(stage: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    ahead = min(num_ranks - 1 - stage, num_microbatches)
    actions = [Action(stage, Kind.F, microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        if microbatch + ahead < num_microbatches:
            actions.append(Action(stage, Kind.F, microbatch + ahead))
        actions.append(Action(stage, Kind.B, microbatch))
    return tuple(actions)


def _bubble(stages: EqualStages) -> tuple[float, float]:
    return (stages.num_ranks - 1) * (stages.forward + stages.backward), stages.busy


SCHEDULE = GeneratedSchedule(
    name="1f1b",
    title="1F1B",
    summary="one forward, one backward: memory that does not grow with the number of micro-batches",
    paper="Narayanan et al., arXiv 2006.09503",
    alternates=True,
    generate=one_f_one_b,
    formula=Formula(text="(PP-1)(F+B)", of=_bubble),
    torch_name="Schedule1F1B",
)
