"""V-Min: two stages a rank in a V, at a third of the memory of 1F1B (Qi et al., arXiv 2405.15362)."""

from __future__ import annotations

from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.schedules.definition import GeneratedSchedule
from counterflow.parallel.pipeline.schedules.v_shape import block_orders, v_schedule


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Min: about two thirds of the bubble of 1F1B at F = I = W, with a third of its memory.

    A rank holds at most 2 ((p+4) // 3) activations and weight gradients to be computed, counted together: (p+4) // 3
    micro-batches. Where F, I and W differ, each micro-batch adds to the bubble: the block leaves no slack.
    """
    turns = (3, 1, 3) if num_ranks % 3 == 0 else (1, 1, 1)
    orders = block_orders(num_ranks, num_microbatches, hops=(1, 1, 1, 1), turns=turns)
    return v_schedule("v_min", num_microbatches, orders, max_held=2 * ((num_ranks + 4) // 3))


SCHEDULE = GeneratedSchedule(
    name="v_min",
    title="V-Min",
    summary="two stages a rank in a V, at a third of the memory of 1F1B",
    paper="Qi et al., arXiv 2405.15362",
    generate=v_min,
    num_chunks=2,
)
