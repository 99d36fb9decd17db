"""Parameters that several stages hold: found before the first step, for each to be summed once, or refused.

A tie is one Parameter object in the modules of several stages. Where a schedule puts those stages on the same ranks
(V-shaped and two-copy schedules do so for the first and the last; DeepSeek-V3, arXiv 2412.19437, section 3.2.1), their
gradients meet in one `.grad`. On different ranks each process would train an object of its own.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from counterflow.parallel.collectives import Axis, all_reduce, named
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.runtime.operation import random_state, set_random_state

logger = logging.getLogger(__name__)


def unique_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of `modules`, each once, in their order."""
    found = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return list(found.values())


def shared_parameters(modules: Mapping[int, nn.Module]) -> dict[int, list[nn.Parameter]]:
    """Parameters that several of `modules` hold, under the last stage that does."""
    stages_of: dict[int, list[int]] = {}
    objects: dict[int, nn.Parameter] = {}
    for index, module in modules.items():
        for parameter in module.parameters():
            objects[id(parameter)] = parameter
            stages_of.setdefault(id(parameter), []).append(index)
    shared: dict[int, list[nn.Parameter]] = {}
    for key, stages in stages_of.items():
        if len(stages) > 1:
            shared.setdefault(stages[-1], []).append(objects[key])
    return shared


def existing_parameters() -> set[int]:
    """The ids of the parameters that there are now."""
    return {id(found) for found in gc.get_objects() if issubclass(type(found), nn.Parameter)}


def refuse_ties_between_ranks(
    make_stage: Callable[[int], nn.Module],
    modules: Mapping[int, nn.Module],
    schedule: Schedule,
    existing: set[int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Raise ValueError, on every rank of `group`, where stages on different ranks hold one parameter.

    modules: of this rank's stages. existing: the ids of the parameters that were there before `make_stage` made
    those. Only such a parameter, or one that something else than the stages keeps (a cache of `make_stage`), can be in
    another stage as well: where there is one, `make_stage` is asked for the other stages too, on the meta device, and
    what it returns is looked at and dropped.
    """
    found = _ties_of(make_stage, modules, schedule, existing)
    if group is not None:
        count = torch.tensor(len(found), device=device)
        axis = Axis(group=group, name="pipeline")
        all_reduce(count, axis)
        if count.item():
            gathered: list[object] = [None] * group.size()
            with named("all-gather of objects", axis):
                dist.all_gather_object(gathered, found, group=group)  # pyright: ignore[reportUnknownMemberType]
            found = sorted({tie for ties in cast("list[list[str]]", gathered) for tie in ties})
    if found:
        raise ValueError(
            f"{'; '.join(found)}: each rank would train a copy of its own, with its own part of the gradient; take a "
            "schedule that puts those stages on the same ranks (zbv, dualpipe and dualpipe_v put the first and the "
            "last there), or give each stage its own parameter and sum their gradients before the optimizer's step"
        )


def _ties_of(
    make_stage: Callable[[int], nn.Module],
    modules: Mapping[int, nn.Module],
    schedule: Schedule,
    existing: set[int],
) -> list[str]:
    is_kept = _is_kept_elsewhere(modules)  # first, since a variable of this function would count as well
    names = {
        id(parameter): (index, name)
        for index, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    ties: list[str] = []

    def compare(index: int, module: nn.Module, where: Mapping[int, tuple[int, str]]) -> None:
        for name, parameter in module.named_parameters():
            if id(parameter) in where:
                other, other_name = where[id(parameter)]
                here, there = (sorted(schedule.replicas_of(stage)) for stage in (other, index))
                if here != there:
                    ties.append(
                        f"'{other_name}' of stage {other} (pipeline ranks {here}) and '{name}' of stage {index} "
                        f"(ranks {there}) are one parameter"
                    )

    for index, module in modules.items():
        compare(index, module, names)
    if not existing.intersection(names) and not is_kept:
        return ties
    generators = random_state(torch.device("cpu"))
    index = 0
    try:
        for index in set(range(schedule.num_stages)) - set(modules):
            with torch.device("meta"):
                compare(index, make_stage(index), names)
    except Exception as error:
        logger.warning(
            "whether stages on other ranks share parameters with those of this one was not found out: making stage %d "
            "on the meta device failed (%s)",
            index,
            error,
        )
    finally:
        set_random_state(torch.device("cpu"), generators)
    return ties


def _is_kept_elsewhere(modules: Mapping[int, nn.Module]) -> bool:
    """Whether anything but `modules` refers to one of them, to a part of it, or to a parameter."""
    # Comprehensions, whose variables go with them.
    holders = cast("list[Mapping[object, object]]", [modules])
    holders += [
        vars(part)[members]
        for part in {id(part): part for root in modules.values() for part in root.modules()}.values()
        for members in ("_modules", "_parameters")
    ]
    places = Counter(id(value) for holder in holders for value in holder.values())
    # What one place makes, and looking itself: other Pythons count otherwise.
    alone: dict[object, object] = {0: nn.Parameter()}
    base = _num_references(alone, 0) - 1
    return any(
        holder[key] is not None and _num_references(holder, key) > base + places[id(holder[key])]
        for holder in holders
        for key in holder
    )


def _num_references(holder: Mapping[object, object], key: object) -> int:
    return sys.getrefcount(holder[key])
