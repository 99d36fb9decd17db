"""Schedules as text: the CSV of torch.distributed.pipelining, and a rank-by-step grid for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from counterflow.parallel.pipeline.ir.action import COMPUTE, Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.dependencies import ScheduleError, each_leaf, microbatch_of

Placement = tuple[tuple[int, ...], ...]


def to_csv(schedule: Schedule, *, compute_only: bool) -> str:
    """One row per rank, one action per cell; `compute_only` leaves out what passes added."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for actions in schedule.actions:
        writer.writerow(str(action) for action in actions if not compute_only or action.kind in COMPUTE)
    return text.getvalue()


def from_csv(text: str, placement: Placement | None = None, *, name: str = "csv") -> Schedule:
    """The schedule that `text` describes, in compute or in executable form; not yet verified.

    placement: `[direction][stage]` -> rank; None: read off the forwards, as one copy of every stage, or as two
        copies that share the micro-batches.

    Raises ScheduleError (a ValueError): a cell is not an action, there is no forward, or a stage's forwards are
    spread over ranks in no way that a placement describes.
    """
    actions: list[tuple[Action, ...]] = []
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        cells = [cell for cell in row if cell.strip()]
        of_rank: list[Action] = []
        for cell in cells:
            try:
                of_rank.append(Action.parse(cell))
            except ValueError as error:
                raise ScheduleError(
                    f"row {rank + 1} of the schedule: {error}", rule=str(error), place=(rank, len(of_rank))
                ) from None
        actions.append(tuple(of_rank))
    ranks_of: dict[tuple[int, int], int] = {
        (leaf.stage, microbatch_of(leaf)): rank
        for rank, of_rank in enumerate(actions)
        for _, leaf in each_leaf(of_rank)
        if leaf.kind is Kind.F
    }
    if not ranks_of:
        raise ScheduleError(
            "the schedule has no forward: expected one row per rank with cells such as 0F0, 0B0"
        )
    num_stages = 1 + max(stage for stage, _ in ranks_of)
    num_microbatches = 1 + max(microbatch for _, microbatch in ranks_of)
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=placement or _placement_of(ranks_of, num_stages, num_microbatches),
        actions=tuple(actions),
    )


def _placement_of(ranks_of: dict[tuple[int, int], int], num_stages: int, num_microbatches: int) -> Placement:
    for num_directions in (1, 2):
        holders: list[list[set[int]]] = [[set() for _ in range(num_stages)] for _ in range(num_directions)]
        for (stage, microbatch), rank in ranks_of.items():
            holders[microbatch * num_directions // num_microbatches][stage].add(rank)
        if all(len(ranks) == 1 for direction in holders for ranks in direction):
            return tuple(tuple(min(ranks) for ranks in direction) for direction in holders)
    missing = sorted(set(range(num_stages)) - {stage for stage, _ in ranks_of})
    if missing:
        raise ScheduleError(
            f"no rank runs the forward of stage {missing[0]}; number the stages from 0, without gaps"
        )
    raise ScheduleError(
        "a stage's forwards are on several ranks: a placement has each stage on one rank, or on two of which one "
        "runs the first half of the micro-batches and the other the second; pass the placement, or move them"
    )


def grid(
    schedule: Schedule,
    *,
    mark: tuple[int, int] | None = None,
    max_steps: int = 40,
    max_ranks: int = 16,
) -> str:
    """Steps down, ranks across: the i-th row holds the i-th action of every rank.

    mark: (rank, step) of an action to point at with `>`; the part of a larger schedule that is shown lies
        around it, or is the beginning.
    """
    rank_mark, step_mark = mark if mark is not None else (0, 0)
    num_steps = max((len(actions) for actions in schedule.actions), default=0)
    steps = _window(step_mark, num_steps, max_steps)
    ranks = _window(rank_mark, schedule.num_ranks, max_ranks)
    columns = [_column([f"step {step}" for step in steps], "")]
    for rank in ranks:
        of_rank = schedule.actions[rank]
        columns.append(
            _column(
                [
                    (">" if mark == (rank, step) else "")
                    + (str(of_rank[step]) if step < len(of_rank) else "")
                    for step in steps
                ],
                f"rank {rank}",
            )
        )
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    if len(steps) < num_steps or len(ranks) < schedule.num_ranks:
        lines.append(
            f"(steps {steps.start}..{steps.stop - 1} of {num_steps}, "
            f"ranks {ranks.start}..{ranks.stop - 1} of {schedule.num_ranks})"
        )
    return "\n".join(lines)


def _window(centre: int, size: int, limit: int) -> range:
    first = max(0, min(centre - limit // 2, size - limit))
    return range(first, min(size, first + limit))


def _column(cells: Sequence[str], title: str) -> list[str]:
    width = max(len(title), *map(len, cells)) if cells else len(title)
    return [f"{cell:<{width}}" for cell in (title, *cells)]
