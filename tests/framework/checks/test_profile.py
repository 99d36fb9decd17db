"""What a profile measures: the right stages, all of their times, the real size of a message."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from counterflow.framework.checks.profile import measure
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.planning.costs import message_bytes, stage_bytes
from counterflow.parallel.pipeline.analysis.cost_profile import CostProfile
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, tiny_config

VOCABULARY = 321


def measured(config: TrainConfig, num_stages: int) -> CostProfile | None:
    torch.set_num_threads(1)
    return measure(config, num_stages, VOCABULARY, torch.device("cpu"))


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "precision": {"compute": "bf16"}}], ids=str)
def test_stages_and_link(ranks: RankPool, layout: dict[str, Any]) -> None:
    # Wide and long enough that a stage of two layers takes visibly longer than one of one.
    model = {"hidden_size": 64, "intermediate_size": 192, "num_layers": 6, "vocab_size": VOCABULARY}
    config = tiny_config(model=model, data={"seq_length": 64}, **layout)
    profile, other = ranks.run(measured, 2, config, 4)
    assert other is None
    assert profile is not None
    assert profile.num_stages == 4
    assert sum(profile.provenance["layers"]) == 6
    assert profile.activation_bytes == (message_bytes(config),) * 3
    sizes = stage_bytes(config, 4)
    assert sizes is not None
    for stage, expected in zip(profile.stages, sizes.parameters, strict=True):
        assert stage.parameter_bytes == pytest.approx(
            expected, rel=0.05
        )  # norms are whole, vocabularies padded
        times = (stage.forward_s, stage.input_gradient_s, stage.weight_gradient_s, stage.backward_s)
        assert all(0 < seconds < 1 for seconds in times)
        assert stage.backward_s > stage.weight_gradient_s
    assert 0 < profile.link.latency_s < 1
    assert profile.link.bandwidth_bytes_per_s is not None
    assert {"model", "machine", "date"} <= profile.provenance.keys()
    # Stages of equal layers are one measurement.
    alike = [
        stage
        for index, stage in enumerate(profile.stages)
        if 0 < index < 3 and profile.provenance["layers"][index] == profile.provenance["layers"][1]
    ]
    assert all(stage == alike[0] for stage in alike)


def test_stages_with_experts_are_told_from_dense_ones(ranks: RankPool) -> None:
    """The first layer is dense, and the MTP module is run in the last stage."""
    model = MIXTURES["deepseek_v3"] | {"vocab_size": VOCABULARY, "num_layers": 6}
    profile, _ = ranks.run(measured, 2, tiny_config(tp=2, model=model), 6)
    assert profile is not None
    assert profile.num_stages == 6
    with_experts = 3 * 12 * 32 * 8 * 4
    assert profile.stages[0].parameter_bytes != profile.stages[2].parameter_bytes
    assert profile.stages[2].parameter_bytes > with_experts
    assert all(0 < stage.backward_s < 5 for stage in profile.stages)


def test_one_rank_has_no_link(ranks: RankPool) -> None:
    config = tiny_config(model={"vocab_size": VOCABULARY})
    (profile,) = ranks.run(measured, 1, config, 1)
    assert profile is not None
    assert (profile.link.latency_s, profile.link.bandwidth_bytes_per_s) == (0.0, None)
    assert profile.activation_bytes == ()
