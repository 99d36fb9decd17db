"""Every rule of the table is broken by its example, says so in one sentence, and holds for the default config."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterflow.framework.checks.rules import RULES, check, warnings_of
from counterflow.framework.checks.rules.rule import Asked, Finding, Rule, example_of
from counterflow.framework.checks.rules.table import broken
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError
from counterflow.framework.planning.workload import Workload
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules

# What the examples of some rules break besides, because one of their settings needs another.
_FITS, _ENGINE = "the schedule fits its sizes", "the DeepSpeed engine"
BESIDES = {
    f"{_ENGINE} with a schedule from a file": {_FITS},
    f"{_ENGINE} with DualPipe, two copies": {_FITS},
    f"{_ENGINE} with parameters on the host": {f"{_ENGINE} with optimizer on the host"},
    f"{_ENGINE} with DeepSpeed's CPUAdam": {f"{_ENGINE} with optimizer on the host"},
    "batches of documents under a budget of tokens with a schedule from a file": {_FITS},
    "a batch that grows with a schedule from a file": {_FITS},
    "copies of experts with quantised gathers of weights": {"quantised gathers of weights at zero.stage=0"},
    "parity: comm.pipeline_payload": {"unused: comm.pipeline_payload"},
}


def test_names_are_one_each() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(BESIDES) <= set(names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_example_of_a_rule_breaks_it_alone(rule: Rule, tmp_path: Path) -> None:
    config = example_of(rule, tmp_path)
    found = broken(Workload.of(config), command=rule.command)
    assert set(found) == {rule.name} | BESIDES.get(rule.name, set())
    said = [f"{finding.value}: {finding.reason}; {finding.remedy}" for finding in found[rule.name]]
    assert all("" not in (finding.value, finding.reason, finding.remedy) for finding in found[rule.name])
    if rule.severity == "warn":
        assert set(said) <= set(warnings_of(config))
        return
    with pytest.raises(ConfigError) as caught:
        check(config, rule.command)
    assert set(said) <= set(caught.value.problems)


@pytest.mark.parametrize("command", [None, "parity", "memory"])
def test_the_default_config_breaks_no_rule(command: str | None) -> None:
    assert broken(Workload.of(TrainConfig()), command=command) == {}  # type: ignore[arg-type]


def test_a_rule_of_a_command_is_asked_by_it_alone(tmp_path: Path) -> None:
    for rule in (rule for rule in RULES if rule.command is not None):
        assert rule.name not in broken(Workload.of(example_of(rule, tmp_path)))


def test_a_rule_that_needs_the_schedule_is_not_asked_without() -> None:
    def never(workload: Workload) -> list[Finding]:
        raise AssertionError

    broken_schedule = next(rule for rule in RULES if rule.name == _FITS)
    late = [Rule(name=asked.name, find=never, example={}, asked=asked) for asked in Asked if asked]
    config = example_of(broken_schedule, Path())
    assert set(broken(Workload.of(config), rules=[*late, broken_schedule])) == {_FITS}


def test_a_sentence_of_another_is_told_as_it_is() -> None:
    for text in ("a=1: why; do this; or that", "a=1: why", "just this", "a=1: why: more; do"):
        assert str(Finding.of(ValueError(text))) == text


def test_which_schedules_alternate_on_one_rank() -> None:
    """The definition says what the actions are."""
    for name, definition in generated_schedules().items():
        try:
            (actions,) = generate(name, 1, 4).actions
        except ValueError:
            assert not definition.alternates  # it takes no single rank
            continue
        kinds = [action.kind for action in actions]
        assert definition.alternates == (kinds == [Kind.F, Kind.B] * 4), name
