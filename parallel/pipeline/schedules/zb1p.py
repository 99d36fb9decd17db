"""ZB-H1: weight gradients fill the bubble of 1F1B, at its memory (Qi et al., arXiv 2401.10241, section 2)."""

from __future__ import annotations

from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.schedules.definition import EqualStages, Formula, GeneratedSchedule
from counterflow.parallel.pipeline.schedules.zero_bubble import zero_bubble_1f1b


def zb1p(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1, the zero-bubble schedule with the memory of 1F1B; a third of its bubble at F = I = W.

    Rank r holds at most p-r activations and what r+1 weight gradients need, at most p of both together. Idle time
    for equal stages without communication: (p-1)(F+I-W).
    """
    return zero_bubble_1f1b("zb1p", num_ranks, num_microbatches, steps=1)


def _bubble(stages: EqualStages) -> tuple[float, float]:
    idle = stages.forward + stages.backward - 2 * stages.weight_gradient
    return (stages.num_ranks - 1) * idle, stages.busy


SCHEDULE = GeneratedSchedule(
    name="zb1p",
    title="ZB-H1",
    summary="weight gradients fill the bubble of 1F1B, at its memory",
    paper="Qi et al., arXiv 2401.10241",
    generate=zb1p,
    formula=Formula(text="(PP-1)(F+B-2W)", of=_bubble),
    torch_name="ScheduleInterleavedZeroBubble",
)
