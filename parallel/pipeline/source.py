"""The schedule that a config names: generated, searched for (`auto`), or read from a file (`csv`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from parallel.pipeline.action import COMPUTE, Schedule
from parallel.pipeline.config import CostsConfig, ScheduleConfig
from parallel.pipeline.cost_profile import load_profile
from parallel.pipeline.costs import costs_from
from parallel.pipeline.dependencies import ScheduleError
from parallel.pipeline.generate import GENERATORS, generate
from parallel.pipeline.search import search
from parallel.pipeline.text import from_csv
from parallel.pipeline.verify import verify

_log = logging.getLogger(__name__)

# Schedules that no generator makes.
SOURCES = ("auto", "csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A schedule of compute actions. note: what a user should know of how it came about; empty: nothing."""

    schedule: Schedule
    note: str = ""


def schedule_from(config: ScheduleConfig, num_ranks: int) -> Source:
    """The schedule that `config` names on `num_ranks` pipeline ranks.

    Raises ValueError: an unknown name, sizes that the schedule does not fit, costs or a file that do not.
    """
    if config.name == "csv":
        source = read_csv(config.path, num_ranks, config.num_microbatches)
    elif config.name == "auto":
        source = _auto(config, num_ranks)
    elif config.name in GENERATORS:
        return Source(
            schedule=generate(config.name, num_ranks, config.num_microbatches, num_chunks=config.num_chunks)
        )
    else:
        known = ", ".join(sorted([*GENERATORS, *SOURCES]))
        raise ValueError(f"schedule.name={config.name}: no such schedule; choose one of {known}")
    _log.info("%s", source.note)
    return source


def _auto(config: ScheduleConfig, num_ranks: int) -> Source:
    found = [
        search(
            costs_from(config.costs, num_ranks * num_chunks),
            num_ranks,
            config.num_microbatches,
            num_chunks=num_chunks,
            memory_limit=config.memory_limit_activations,
            seed=config.search_seed,
        )
        for num_chunks in _chunks(config, num_ranks)
    ]
    best = min(found, key=lambda candidate: candidate.makespan)
    return Source(schedule=best.schedule, note=f"auto: makespan {best.makespan:g}, found from {best.origin}")


def _chunks(config: ScheduleConfig, num_ranks: int) -> tuple[int, ...]:
    """Stages of a rank to search with: what is asked for, or what the costs are of."""
    if config.num_chunks is not None:
        if config.num_chunks > 2:
            raise ValueError(
                f"schedule.num_chunks={config.num_chunks}: auto places one stage on a rank, or two in a V; set it to "
                "1, to 2, or to null for what the costs are of"
            )
        return (config.num_chunks,)
    if config.costs.profile is not None:
        # Of two stages a rank it tells the costs of one a rank as well, so both are searched.
        return (1, 2) if load_profile(config.costs.profile).num_stages == 2 * num_ranks else (1,)
    return (2,) if 2 * num_ranks in _lengths(config.costs) else (1,)


def _lengths(costs: CostsConfig) -> set[int]:
    """Of the costs that are given per stage."""
    given = (costs.forward, costs.input_gradient, costs.weight_gradient, costs.backward, costs.recompute)
    return {len(cost) for cost in given if isinstance(cost, tuple)}


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
