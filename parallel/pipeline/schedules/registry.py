"""Every schedule of this package by name: what is found in its files, each of which says all there is of one."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

from counterflow.parallel.pipeline import schedules
from counterflow.parallel.pipeline.analysis.costs import Costs
from counterflow.parallel.pipeline.config import ScheduleConfig
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.schedules.definition import (
    FormulaBubble,
    GeneratedSchedule,
    ScheduleDefinition,
    Source,
    SourcedSchedule,
)

_log = logging.getLogger(__name__)


@cache
def all_schedules() -> Mapping[str, ScheduleDefinition]:
    """Every schedule that the config may name, by its name, in alphabetical order."""
    modules = [
        import_module(f"{schedules.__name__}.{each.name}")
        for each in pkgutil.iter_modules(schedules.__path__)
    ]
    found: list[ScheduleDefinition] = [module.SCHEDULE for module in modules if hasattr(module, "SCHEDULE")]
    return MappingProxyType({each.name: each for each in sorted(found, key=lambda each: each.name)})


@cache
def generated_schedules() -> Mapping[str, GeneratedSchedule]:
    """Those of `all_schedules` that are made from sizes alone."""
    return MappingProxyType(
        {name: each for name, each in all_schedules().items() if isinstance(each, GeneratedSchedule)}
    )


def schedule_from(config: ScheduleConfig, num_ranks: int) -> Source:
    """The schedule that `config` names, on `num_ranks` pipeline ranks.

    Raises ValueError: an unknown name, sizes that the schedule does not fit, costs or a file that do not.
    """
    found = all_schedules().get(config.name)
    if found is None:
        raise _unknown(config.name, all_schedules())
    if isinstance(found, SourcedSchedule):
        source = found.source(config, num_ranks)
        _log.info("%s", source.note)
        return source
    return Source(
        schedule=generate(config.name, num_ranks, config.num_microbatches, num_chunks=config.num_chunks)
    )


def generate(name: str, num_ranks: int, num_microbatches: int, *, num_chunks: int | None = None) -> Schedule:
    """The schedule called `name`, of compute actions only.

    num_chunks: stages that a rank holds for micro-batches of one direction; None: the schedule's own number.

    Raises ValueError: an unknown name, sizes below 1, or sizes the schedule does not fit.
    """
    definition = generated_schedules().get(name)
    if definition is None:
        raise _unknown(name, generated_schedules())
    num_chunks = definition.num_chunks if num_chunks is None else num_chunks
    for key, value in (
        ("parallel.pipeline_parallel_size", num_ranks),
        ("schedule.num_microbatches", num_microbatches),
        ("schedule.num_chunks", num_chunks),
    ):
        if value < 1:
            raise ValueError(f"{key}={value}: a schedule has at least one; set it to 1 or more")
    definition.validate(num_ranks, num_microbatches)
    if definition.any_chunks:
        return definition.generate(num_ranks, num_microbatches, num_chunks)
    if num_chunks != definition.num_chunks:
        several = [other.name for other in generated_schedules().values() if other.any_chunks]
        raise ValueError(
            f"schedule.num_chunks={num_chunks}: {name} has {definition.num_chunks} to a rank; set "
            f"schedule.num_chunks=null, or choose schedule={' or '.join(several)}"
        )
    return definition.generate(num_ranks, num_microbatches)


def bubble_formula(schedule: Schedule, costs: Costs) -> FormulaBubble | None:
    """The published formula's value for `schedule`, at its sizes; None where there is none."""
    definition = generated_schedules().get(schedule.name)
    if definition is None:
        return None
    return definition.bubble(
        schedule.num_ranks,
        schedule.num_microbatches,
        costs,
        num_chunks=schedule.num_stages // schedule.num_ranks,
    )


def _unknown(name: str, known: Mapping[str, ScheduleDefinition]) -> ValueError:
    return ValueError(f"schedule.name={name}: no such schedule; choose one of {', '.join(known)}")
