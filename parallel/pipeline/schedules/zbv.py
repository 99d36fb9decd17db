"""ZB-V: two stages a rank in a V, at the memory of 1F1B (Qi et al., arXiv 2401.10241v1, section 6)."""

from __future__ import annotations

from collections.abc import Sequence

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.schedules.definition import GeneratedSchedule
from counterflow.parallel.pipeline.schedules.v_shape import v_schedule


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: no bubble within a rank's span at F = I = W, with the memory of 1F1B.

    A rank holds at most 2p activations and weight gradients to be computed, counted together; each is half a
    rank's layers, so that is p micro-batches. It has its full effect from 2p-1 micro-batches on.
    """
    orders = [_zbv_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return v_schedule("zbv", num_microbatches, orders, max_held=2 * num_ranks)


def _zbv_order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Warm-up, groups of F, I, W on either stage in turn, drain; the weight gradients of the drain are left out.

    Fewer than 2p-1 micro-batches run as the first of 2p-1 do.
    """
    near, far = rank, 2 * num_ranks - 1 - rank
    behind = num_ranks - rank
    total = max(num_microbatches, 2 * num_ranks - 1)
    slots: list[tuple[Kind, int]] = [(Kind.F, near)] * (2 * behind - 1)
    slots += [(Kind.F, far), (Kind.F, near)] * rank
    slots += [(Kind.F, far), (Kind.I, far)] * behind
    for turn in range(total - num_ranks):
        if turn < total - 2 * num_ranks + 1 + rank:
            slots.append((Kind.F, near))
        slots += [(Kind.I, near), (Kind.F, far), (Kind.I, far)]
    slots += [(Kind.I, near), (Kind.I, far)] * rank
    slots += [(Kind.I, near)] * behind

    issued = dict.fromkeys(set(slots), 0)
    order: list[Action] = []
    for kind, stage in slots:
        if issued[kind, stage] < num_microbatches:
            order.append(Action(stage, kind, issued[kind, stage]))
        issued[kind, stage] += 1
    return _with_weights_until_drain(order)


def _with_weights_until_drain(order: Sequence[Action]) -> list[Action]:
    """Each W right behind its I, up to the first I behind the last forward."""
    last_forward = max(index for index, action in enumerate(order) if action.kind is Kind.F)
    result: list[Action] = []
    for index, action in enumerate(order):
        result.append(action)
        if action.kind is Kind.I and index <= last_forward + 1:
            result.append(Action(action.stage, Kind.W, action.microbatch))
    return result


SCHEDULE = GeneratedSchedule(
    name="zbv",
    title="ZB-V",
    summary="two stages a rank in a V, at the memory of 1F1B; full effect from 2p-1 micro-batches on",
    paper="Qi et al., arXiv 2401.10241",
    generate=zbv,
    num_chunks=2,
    torch_name="ScheduleZBVZeroBubble",
)
