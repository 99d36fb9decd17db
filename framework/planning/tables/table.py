"""A published table as a record: its rows, each with the figure that its source prints and one that is predicted.

A prediction never reads a published figure. Rows that constants were fitted to are `calibrated`; the others are held
out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from counterflow.framework.planning.data_files import DATA, load_yaml
from counterflow.framework.planning.kernels import Efficiencies
from counterflow.models.config import ModelConfig

# The calibrated efficiencies in another's place, while they are fitted; None: those of data/calibration.yaml.
Share = Efficiencies | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One figure. predict: makes it anew. counts: whether it enters the mean; else it is shown beside, and `note`
    says why.
    """

    label: str
    quantity: str
    unit: str
    published: float
    predict: Callable[[Share], float]
    counts: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTable:
    """A table of the field. definition: how the source defines the figure. calibrated: whether constants are fitted
    to it.
    """

    id: str
    title: str
    source: str
    hardware: str
    definition: str
    cases: Callable[[], tuple[Case, ...]]
    calibrated: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case that was run; error is predicted / published - 1."""

    label: str
    quantity: str
    unit: str
    published: float
    predicted: float
    counts: bool
    note: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduced:
    """A table that was run; mean and largest errors are of the absolute values of rows that count."""

    table: PublishedTable
    rows: tuple[Row, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(abs(row.error) for row in self.rows if row.counts)

    @property
    def mean_error(self) -> float:
        return statistics.fmean(self.errors)

    @property
    def median_error(self) -> float:
        return statistics.median(self.errors)

    @property
    def max_error(self) -> float:
        return max(self.errors)

    def by_quantity(self) -> Mapping[str, tuple[float, float]]:
        """Mean and largest error of each quantity."""
        found: dict[str, list[float]] = {}
        for row in self.rows:
            if row.counts:
                found.setdefault(row.quantity, []).append(abs(row.error))
        return {name: (statistics.fmean(errors), max(errors)) for name, errors in found.items()}


def reproduce(
    table: PublishedTable, share: Share = None, *, where: Callable[[Case], bool] | None = None
) -> Reproduced:
    """Run the cases of `table`, or those that `where` picks."""
    return Reproduced(
        table=table,
        rows=tuple(
            Row(
                label=case.label,
                quantity=case.quantity,
                unit=case.unit,
                published=case.published,
                predicted=case.predict(share),
                counts=case.counts,
                note=case.note,
            )
            for case in table.cases()
            if where is None or where(case)
        ),
    )


def data_of(name: str) -> dict[str, Any]:
    """The file of data/tables."""
    return load_yaml(DATA / "tables" / f"{name}.yaml")


def source_of(data: Mapping[str, Any]) -> str:
    """Where the figures come from, in a line."""
    source = data["source"]
    if isinstance(source, str):
        return source
    parts = [source.get("paper"), source.get("repo")]
    if "arxiv" in source:
        parts.append(f"arXiv {source['arxiv']}")
    return ", ".join(part for part in parts if part)


@cache
def gpt(name: str) -> ModelConfig:
    """A GPT of data/models.yaml: GELU, learned positions, layer norms, biases, and the embedding tied to the head."""
    shape = load_yaml(DATA / "models.yaml")[name]
    return gpt_of(
        hidden=shape["hidden"],
        heads=shape["heads"],
        layers=shape["layers"],
        vocab=shape["vocab"] or 51200,
        seq=shape["seq"] or 2048,
    )


def gpt_of(*, hidden: int, heads: int, layers: int, vocab: int, seq: int, tied: bool = True) -> ModelConfig:
    return ModelConfig(
        name="gpt",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        activation="gelu",
        norm="layer",
        position="learned",
        max_seq_length=seq,
        attention_bias=True,
        mlp_bias=True,
        tie_embeddings=tied,
    )
