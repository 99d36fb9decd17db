"""One micro-batch in the pipeline at a time."""

from __future__ import annotations

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.schedules.definition import EqualStages, Formula, GeneratedSchedule


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each micro-batch goes forward through every stage and back before the next one enters.

    The baseline that pipelining improves on: one rank works at a time, one activation is alive per rank.
    """
    return Schedule(
        name="naive",
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=(tuple(range(num_ranks)),),
        actions=tuple(
            tuple(
                Action(stage, kind, microbatch)
                for microbatch in range(num_microbatches)
                for kind in (Kind.F, Kind.B)
            )
            for stage in range(num_ranks)
        ),
    )


def _bubble(stages: EqualStages) -> tuple[float, float]:
    return (stages.num_ranks - 1) * stages.busy, stages.busy


SCHEDULE = GeneratedSchedule(
    name="naive",
    title="naive schedule",
    summary="one micro-batch at a time through all stages: the baseline that the others improve on",
    alternates=True,
    generate=naive,
    formula=Formula(text="(PP-1) m (F+B)", of=_bubble),
)
