"""The table of rules as tables for the docs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from counterflow.framework.checks.rules import compositions
from counterflow.framework.checks.rules.compositions import REFUSALS, Refusal
from counterflow.framework.checks.rules.rule import Rule, example_of
from counterflow.framework.checks.rules.table import RULES
from counterflow.framework.config.features import FEATURES, Feature
from counterflow.framework.planning.workload import Workload


def to_markdown(
    features: Iterable[Feature] = FEATURES,
    refusals: Iterable[Refusal] = REFUSALS,
    rules: Iterable[Rule] = RULES,
) -> str:
    """Three tables: each feature with its switch and what it does not compose with; why; and every other rule.

    Rows that say the same of several features are one. What the other rules say is what they say of their examples.
    """
    refusals = tuple(refusals)
    lines = ["| Feature | Switched on by | Composes with |", "| --- | --- | --- |"]
    lines += [
        f"| {feature.title} | `{feature.setting}` | {_verdict(feature, refusals)} |" for feature in features
    ]
    lines += ["", "| Refused | Because | Instead |", "| --- | --- | --- |"]
    for (reason, remedy), group in groupby(refusals, key=lambda row: (row.reason, row.remedy)):
        lines.append(f"| {_together(list(group))} | {reason} | {remedy} |")
    lines += ["", "| Rule | Asked by | What it says, by an example |", "| --- | --- | --- |"]
    own = {rule.name for rule in compositions.RULES}
    lines += [_row(rule) for rule in rules if rule.name not in own]
    return "\n".join(lines) + "\n"


def _verdict(feature: Feature, refusals: Iterable[Refusal]) -> str:
    others: list[str] = []
    for row in refusals:
        if feature not in row.features:
            continue
        at = "" if row.where is None else f" at `{row.where.text}`"
        titles = [other.title for other in row.features if other is not feature]
        if not titles and not at:
            return "refused"
        others.append(f"{titles[0]}{at}" if titles else f"`{row.where.text}`" if row.where else "")
    return f"all but {', '.join(others)}" if others else "all"


def _together(rows: list[Refusal]) -> str:
    """`A with B`, or `A with B, C` where rows differ in their second feature alone."""
    if len({row.first for row in rows}) > 1 or len(rows) == 1:
        return "; ".join(row.name for row in rows)
    return f"{rows[0].name}, {', '.join(row.features[-1].title for row in rows[1:])}"


def _row(rule: Rule) -> str:
    with tempfile.TemporaryDirectory() as folder:
        finding = next(iter(rule.find(Workload.of(example_of(rule, Path(folder))))))
        said = str(finding).replace(f"{folder}/", "").replace("|", "\\|")
    asked = "a warning" if rule.severity == "warn" else rule.command or "all"
    return f"| {rule.name} | {asked} | {said} |"
