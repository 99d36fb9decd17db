"""Training on documents under a budget of tokens: steps of other sizes, in every layout the same run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterflow.framework.checkpoint.manifest import read_metadata
from counterflow.framework.checks.parity import reference_config
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.data.shards import SplitWriter
from counterflow.framework.errors import ConfigError
from counterflow.framework.trainer.resume import resume_problems
from counterflow.framework.trainer.resume_source import checkpoint_to_resume
from tests.framework.test_batch_ramp import run_steps
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, run_context, tiny_config

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "tp": 2, "dp": 2, "schedule": "dualpipe", "zero": 3},
    {"pp": 2, "dp": 2, "schedule": "zbv", "zero": 1, "recompute": {"mode": "full"}},
]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory, tiny_data: PreparedData) -> PreparedData:
    """Documents of 1 to 40 tokens."""
    generator = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("documents") / "train"
    writer = SplitWriter(folder, vocab_size=321, end_of_text_id=0)
    for length in generator.integers(1, 40, size=200):
        writer.append(generator.integers(1, 321, size=length))
    writer.finish()
    return replace(tiny_data, train=folder)


def config_of(layout: dict[str, Any], **nodes: Any) -> TrainConfig:
    data = {"micro_batch_size": 2, "batching": "documents", "tokens_per_step": 150}
    return tiny_config(**layout, **{"data": data, "training": {"num_steps": 5}, **nodes})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_documents_train_as_in_one_process(
    ranks: RankPool, documents: PreparedData, tmp_path: Path, layout: dict[str, Any]
) -> None:
    config, run = config_of(layout), run_context(documents, tmp_path)
    records, _ = ranks.run(run_steps, config.parallel.world_size, config, run)[0]
    alone, _ = ranks.run(run_steps, 1, reference_config(config), run)[0]
    assert len({record.num_microbatches for record in alone}) > 1
    for mine, theirs in zip(records, alone, strict=True):
        assert mine.num_tokens == theirs.num_tokens <= 150
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert mine.padding_share is not None
        assert 0 <= mine.padding_share < 1


def test_a_run_resumes_at_its_document(ranks: RankPool, documents: PreparedData, tmp_path: Path) -> None:
    config = config_of(
        {"pp": 2, "schedule": "zb1p", "zero": 2}, checkpoint={"enabled": True, "interval_steps": 3}
    )
    whole, _ = ranks.run(run_steps, 2, config, run_context(documents, tmp_path / "whole"))[0]
    run = run_context(documents, tmp_path / "stopped")
    ranks.run(run_steps, 2, config, run, 3)
    folder = checkpoint_to_resume(str(run.run_dir))
    metadata = read_metadata(folder)
    resumed = replace(config, checkpoint=replace(config.checkpoint, resume=str(run.run_dir)))
    assert resume_problems(resumed, folder, metadata) == []
    for data in (
        replace(config.data, tokens_per_step=140),
        replace(config.data, batching="windows", tokens_per_step=None),
    ):
        assert (
            "samples would be repeated" in resume_problems(replace(resumed, data=data), folder, metadata)[0]
        )
    after, _ = ranks.run(run_steps, 2, resumed, run)[0]
    assert [(record.loss, record.grad_norm, record.num_tokens) for record in after] == [
        (record.loss, record.grad_norm, record.num_tokens) for record in whole[3:]
    ]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"data": {"tokens_per_step": 150}}, "data.tokens_per_step=150: with data.batching=windows"),
        ({"data": {"batching": "documents"}}, "data.tokens_per_step=null: with data.batching=documents"),
        (
            {"data": {"batching": "documents", "tokens_per_step": 15}},
            "data.tokens_per_step=15: .* data.seq_length=16; set it to that or more",
        ),
        (
            {"data": {"batching": "documents", "tokens_per_step": 150}, "model": MIXTURES["mixtral"]},
            "does not compose with mixture of experts",
        ),
    ],
)
def test_mistakes(nodes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**nodes)
