"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.schedules.definition import EqualStages, Formula, GeneratedSchedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order; every micro-batch's activation is alive at once."""
    return Schedule(
        name="gpipe",
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=(tuple(range(num_ranks)),),
        actions=tuple(
            tuple(
                Action(stage, kind, microbatch)
                for kind in (Kind.F, Kind.B)
                for microbatch in range(num_microbatches)
            )
            for stage in range(num_ranks)
        ),
    )


def _bubble(stages: EqualStages) -> tuple[float, float]:
    return (stages.num_ranks - 1) * (stages.forward + stages.backward), stages.busy


SCHEDULE = GeneratedSchedule(
    name="gpipe",
    title="GPipe",
    summary="all forwards, then all backwards",
    paper="Huang et al., arXiv 1811.06965",
    generate=gpipe,
    formula=Formula(text="(PP-1)(F+B)", of=_bubble),
    torch_name="ScheduleGPipe",
)
