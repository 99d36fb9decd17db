"""V-Half: two stages a rank in a V, at half the memory of 1F1B (Qi et al., arXiv 2405.15362)."""

from __future__ import annotations

from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.schedules.definition import GeneratedSchedule
from counterflow.parallel.pipeline.schedules.v_shape import block_orders, v_schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half: about half the bubble of 1F1B at F = I = W, with half its memory.

    A rank holds at most 2 ((p+2) // 2) activations and weight gradients to be computed, counted together: (p+2) // 2
    micro-batches.
    """
    # Of the gaps that keep a rank's actions apart, those with which unequal F, I, W add no bubble per micro-batch.
    turns = (4, 2, 4) if num_ranks % 2 == 0 else (1, 1, 2)
    orders = block_orders(num_ranks, num_microbatches, hops=(1, 2, 1, 2), turns=turns)
    return v_schedule("v_half", num_microbatches, orders, max_held=2 * ((num_ranks + 2) // 2))


SCHEDULE = GeneratedSchedule(
    name="v_half",
    title="V-Half",
    summary="two stages a rank in a V, at half the memory of 1F1B",
    paper="Qi et al., arXiv 2405.15362",
    generate=v_half,
    num_chunks=2,
)
