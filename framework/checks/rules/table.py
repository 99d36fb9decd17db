"""The one table of what composes and what is refused, and what is asked of it.

`check` is every command's before its ranks start; parity and memory ask for rules of their own as well. What only this
machine decides (GPUs, installed packages, folders) is not here: see framework/devices.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from counterflow.framework.checks.rules import (
    commands,
    compositions,
    experts,
    layout,
    optimizer,
    schedule,
    unused,
    zero,
)
from counterflow.framework.checks.rules.rule import Asked, Command, Finding, Rule
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError
from counterflow.framework.planning.workload import Workload

RULES: tuple[Rule, ...] = (
    *compositions.RULES,
    *layout.RULES,
    *experts.RULES,
    *optimizer.RULES,
    *schedule.RULES,
    *zero.RULES,
    *commands.RULES,
    *unused.RULES,
)


def broken(
    workload: Workload, *, command: Command | None = None, rules: Iterable[Rule] = RULES
) -> dict[str, tuple[Finding, ...]]:
    """By the name of each rule that `workload` breaks, what it finds. command: whose rules are asked besides."""
    found: dict[str, tuple[Finding, ...]] = {}
    is_refused = False
    for rule in sorted(rules, key=lambda rule: rule.asked):
        if rule.command not in (None, command):
            continue
        if rule.asked is Asked.WITH_SCHEDULE and schedule.FITS.name in found:
            continue
        if rule.asked is Asked.LAST and is_refused:
            continue
        if findings := tuple(rule.find(workload)):
            found[rule.name] = findings
            is_refused = is_refused or rule.severity == "refuse"
    return found


def check(config: TrainConfig, command: Command | None = None) -> None:
    """Hold `config` against the table. command: the one that asks, where it has rules of its own.

    Raises ConfigError: naming every rule broken, with the values and a remedy.
    """
    _refuse(Workload.of(config), command)


def check_workload(config: TrainConfig, vocab_size: int) -> None:
    """Hold `config` against the table once more, with the vocabulary of its data.

    Raises ConfigError: where a step of whatever size does not keep within its budgets.
    """
    _refuse(Workload.of(config, data_vocab_size=vocab_size), None)


def _refuse(workload: Workload, command: Command | None) -> None:
    refusing = [rule for rule in RULES if rule.severity == "refuse"]
    found = broken(workload, command=command, rules=refusing)
    if found:
        raise ConfigError([str(finding) for findings in found.values() for finding in findings])


def warnings_of(config: TrainConfig) -> list[str]:
    """One sentence for each thing that `config` asks for in vain."""
    found = broken(Workload.of(config), rules=[rule for rule in RULES if rule.severity == "warn"])
    return list(dict.fromkeys(str(finding) for findings in found.values() for finding in findings))
