"""ZB-H2: up to twice the activations of 1F1B for next to no bubble (Qi et al., arXiv 2401.10241, section 2)."""

from __future__ import annotations

from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.schedules.definition import GeneratedSchedule
from counterflow.parallel.pipeline.schedules.zero_bubble import zero_bubble_1f1b


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: forwards fill the time before the first backward as well; no bubble within a rank's span at F = I = W.

    Rank r holds at most 2(p-r)-1 activations and what 2r+1 weight gradients need, at most 2p-1 of both together.
    Idle time within a rank's span for equal stages without communication: (p-1)(F+I-2W), from 2p-1 micro-batches
    on.
    """
    return zero_bubble_1f1b("zb_h2", num_ranks, num_microbatches, steps=2)


SCHEDULE = GeneratedSchedule(
    name="zb_h2",
    title="ZB-H2",
    summary="up to twice the activations of 1F1B for next to no bubble within a rank's span",
    paper="Qi et al., arXiv 2401.10241",
    generate=zb_h2,
)
