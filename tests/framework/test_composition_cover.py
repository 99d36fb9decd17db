"""Every pair of features composes in a case that trains like one process, or is refused; a pair in neither fails."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from counterflow.framework.checks.parity import reference_config
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.trainer.run import RunContext
from tests.composition_cover import (
    ALTERNATIVES,
    ELSEWHERE,
    NEEDS,
    SWITCHES,
    alternatives,
    composing_pairs,
    config_of,
    cover,
    feature_keys,
    kept_cases,
    pairs_in,
)
from tests.rank_pool import RankPool
from tests.runs import run_steps
from tests.tiny import run_context, tiny_config

# These round what is computed or sent: losses follow those of fp32, and are not the same.
ROUNDING = {
    "bf16",
    "fp16",
    "bf16_reduce",
    "bf16_states",
    "compression",
    "quantised_weights",
    "pipeline_payload",
}
CASES = kept_cases()


def losses(config: TrainConfig, run: RunContext) -> list[float]:
    return [record.loss for record in run_steps(config, run)]


def reference_of(config: TrainConfig) -> TrainConfig:
    """The same model and global batches in one process, with nothing else switched on."""
    num_microbatches = config.schedule.num_microbatches * config.parallel.data_parallel_size
    plain = tiny_config(num_microbatches=num_microbatches)
    training = reference_config(config).training  # a ramp counts the micro-batches of one process
    return replace(plain, model=config.model, data=config.data, training=training)


@pytest.fixture(scope="module")
def reference_losses(
    ranks: RankPool, tiny_data: PreparedData, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Losses of one process, trained once for each config."""

    @cache
    def train_once(config: TrainConfig) -> list[float]:
        return ranks.run(losses, 1, config, run_context(tiny_data, tmp_path_factory.mktemp("one")))[0]

    return train_once


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_case_trains_like_one_process(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, reference_losses: Any, case: tuple[str, ...]
) -> None:
    config = config_of(case)
    assert config is not None
    found = ranks.run(losses, config.parallel.world_size, config, run_context(tiny_data, tmp_path))[0]
    tolerance = 2e-2 if ROUNDING & set(case) else 1e-5
    assert found == pytest.approx(reference_losses(reference_of(config)), rel=tolerance)


def test_every_feature_is_in_the_cover_or_tested_elsewhere() -> None:
    assert not SWITCHES.keys() & ELSEWHERE.keys()
    assert SWITCHES.keys() | ELSEWHERE.keys() == feature_keys()
    assert NEEDS.keys() | set().union(*ALTERNATIVES) <= SWITCHES.keys()


def test_every_pair_is_in_a_case_or_refused() -> None:
    configs = [config_of(case) for case in CASES]
    covered = set().union(*(pairs_in(config) for config in configs if config is not None))
    assert [sorted(pair) for pair in composing_pairs() if pair not in covered] == []


@pytest.mark.slow
def test_the_cases_are_what_the_generator_makes() -> None:
    assert cover() == CASES


def test_alternatives_exclude_each_other() -> None:
    for group in ALTERNATIVES:
        for first in group:
            for second in group - {first}:
                assert alternatives(frozenset((first, second)))
                assert config_of([first, second]) is None
