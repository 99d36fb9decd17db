"""`csv`: a schedule from a file in the form of torch.distributed.pipelining, verified before it runs."""

from __future__ import annotations

from pathlib import Path

from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.config import ScheduleConfig
from counterflow.parallel.pipeline.ir.action import COMPUTE
from counterflow.parallel.pipeline.ir.dependencies import ScheduleError
from counterflow.parallel.pipeline.ir.text import from_csv
from counterflow.parallel.pipeline.schedules.definition import Source, SourcedSchedule


def read_csv(path: str | None, num_ranks: int, num_microbatches: int) -> Source:
    """The schedule in a file of torch.distributed.pipelining's compute or compute+communication form, verified.

    What is not a compute action is left out: the passes add it anew, to suit zero.stage and the transport.

    Raises ValueError: no such file, a cell that is no action, a broken rule, or sizes other than these; naming file,
    line and rule.
    """
    if path is None:
        raise ValueError("schedule.path=null: schedule=csv reads a file; set schedule.path to it")
    where = f"schedule.path={path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{where}: cannot be read ({reason}); name a CSV with one row per rank") from None
    try:
        schedule = from_csv(text)
    except ScheduleError as error:
        raise _located(where, error) from None
    for key, given, found, what in (
        ("parallel.pipeline_parallel_size", num_ranks, schedule.num_ranks, "rows, one per rank"),
        ("schedule.num_microbatches", num_microbatches, schedule.num_microbatches, "micro-batches"),
    ):
        if given != found:
            raise ValueError(f"{key}={given}: {path} has {found} {what}; set {key}={found}")
    compute = schedule.with_actions(
        [action for action in actions if action.kind in COMPUTE] for actions in schedule.actions
    )
    try:
        verify(compute)
    except ScheduleError as error:
        raise _located(where, error) from None
    dropped = sum(map(len, schedule.actions)) - sum(map(len, compute.actions))
    note = f"csv: {path}, {schedule.num_stages} stages, verified"
    if dropped:
        note += (
            f"; its {dropped} communication and sharding actions are left out and added anew, to suit zero.stage and "
            "the transport"
        )
    return Source(schedule=compute, note=note)


def _located(where: str, error: ScheduleError) -> ValueError:
    if error.place is None:
        return ValueError(f"{where}: {error}")
    rank, index = error.place
    details = str(error).partition("\n")[2]
    return ValueError(f"{where}, line {rank + 1}, action {index + 1}: {error.rule}\n{details}".rstrip())


def _source(config: ScheduleConfig, num_ranks: int) -> Source:
    return read_csv(config.path, num_ranks, config.num_microbatches)


SCHEDULE = SourcedSchedule(
    name="csv",
    title="a schedule from a file",
    summary="a schedule of your own: schedule.path is a CSV with one row per rank, as torch.distributed.pipelining "
    "writes it",
    source=_source,
)
