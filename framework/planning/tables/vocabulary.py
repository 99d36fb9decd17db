"""V-Half with a large vocabulary (arXiv 2411.05288, table 6): the baseline, whose last stage has the whole head.

What is judged is MFU as a ratio to the row of the same model and length with 32,000 words: how the head's weight
unbalances the pipeline. Vocabulary parallelism itself is not a feature of this project, so its rows are not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from counterflow.framework.planning.cluster import load_cluster
from counterflow.framework.planning.data_files import DATA, load_yaml
from counterflow.framework.planning.layout import Layout
from counterflow.framework.planning.step import estimate_step
from counterflow.framework.planning.tables.table import (
    Case,
    PublishedTable,
    Share,
    data_of,
    gpt_of,
    source_of,
)


def _mfu(row: Mapping[str, Any], share: Share) -> float:
    shape = load_yaml(DATA / "models.yaml")[row["model"]]
    model = gpt_of(
        hidden=shape["hidden"],
        heads=shape["heads"],
        layers=shape["layers"],
        vocab=row["vocab"],
        seq=row["seq"],
        tied=False,
    )
    layout = Layout(
        pipeline=row["pp"],
        seq_length=row["seq"],
        vocab_size=row["vocab"],
        micro_batch_size=row["mbs"],
        num_microbatches=row["microbatches"],
        schedule="v_half",
        flash=True,
        fused=False,
    )
    return estimate_step(model, layout, load_cluster("a100").of_size(layout.num_gpus), share).mfu


def _cases() -> tuple[Case, ...]:
    rows = [
        row
        for row in data_of("vocab_table6")["rows"]
        if row["method"] == "baseline" and isinstance(row["mfu_pct"], int | float)
    ]
    cases: list[Case] = []
    for row in rows:
        base = next(
            each
            for each in rows
            if (each["model"], each["seq"], each["vocab"]) == (row["model"], row["seq"], 32000)
        )
        if row is base:
            continue

        def ratio(share: Share, row: Mapping[str, Any] = row, base: Mapping[str, Any] = base) -> float:
            return _mfu(row, share) / _mfu(base, share)

        cases.append(
            Case(
                label=f"{row['model'].split('_')[1].upper()} s={row['seq']} V={row['vocab'] // 1000}k",
                quantity="MFU / that of 32k",
                unit="",
                published=row["mfu_pct"] / base["mfu_pct"],
                predict=ratio,
            )
        )
    return tuple(cases)


TABLES = (
    PublishedTable(
        id="vocab_table6",
        title="V-Half with large vocabularies, the head on one stage",
        source=source_of(data_of("vocab_table6")),
        hardware="A100 SXM 80 GB, RoCE between nodes",
        definition="MFU as a ratio to the row with 32,000 words",
        cases=_cases,
    ),
)
