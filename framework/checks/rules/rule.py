"""What a rule is: when it is asked, what it finds wrong with a workload, and a config that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from counterflow.framework.config.mapping import from_mapping
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.planning.workload import Workload

Nodes = Mapping[str, Any]
"""Values of a config as nested mappings, as `from_mapping` reads them; what is missing keeps its default."""

WITH_DEEPSPEED: Nodes = {"zero": {"engine": "deepspeed", "stage": 1}, "checkpoint": {"enabled": False}}
"""Trained by DeepSpeed's engine, for examples."""

Severity = Literal["refuse", "warn"]
Command = Literal["parity", "memory"]


class Asked(IntEnum):
    """When a rule is asked.

    ALWAYS: whatever else is broken. WITH_SCHEDULE: where the schedule can be made. LAST: where nothing else is refused.
    """

    ALWAYS = 0
    WITH_SCHEDULE = 1
    LAST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that is broken, as one sentence: the value that breaks it, the reason and the remedy, as config text."""

    value: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return "; ".join(filter(None, (": ".join(filter(None, (self.value, self.reason))), self.remedy)))

    @classmethod
    def of(cls, error: ValueError) -> Finding:
        """What `error` says, which is a sentence of this form."""
        value, _, rest = str(error).partition(": ")
        reason, _, remedy = rest.partition("; ")
        return cls(value=value, reason=reason, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A row of the table: what two or more groups of the config decide together.

    find: what of a workload breaks the rule; nothing: it holds. It is a pure function.
    example: a config that breaks it, for the tests and for the docs. schedule_file: what its schedule.path holds.
    severity: `refuse` ends the command before a rank starts, `warn` says it and goes on.
    command: the one command whose rule it is; None: of all that train.
    """

    name: str
    find: Callable[[Workload], Iterable[Finding]]
    example: Nodes
    schedule_file: str | None = None
    asked: Asked = Asked.ALWAYS
    severity: Severity = "refuse"
    command: Command | None = None


def example_of(rule: Rule, folder: Path) -> TrainConfig:
    """The config that breaks `rule`. folder: for the file of its schedule, where it has one."""
    if rule.schedule_file is None:
        return from_mapping(TrainConfig, rule.example)
    path = folder / "schedule.csv"
    path.write_text(rule.schedule_file)
    return from_mapping(TrainConfig, merged(rule.example, {"schedule": {"path": str(path)}}))


def merged(first: Nodes, second: Nodes) -> dict[str, Any]:
    """`first` with the values of `second` put in, nested."""
    result = dict(first)
    for key, value in second.items():
        is_node = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if is_node else value
    return result


def largest_divisor(value: int, at_most: int) -> int:
    """The largest number up to `at_most` that divides `value`."""
    return next(size for size in range(at_most, 0, -1) if value % size == 0)
