"""Which settings must be what they were, which are told, and which are nobody's business."""

from __future__ import annotations

from typing import Any

import pytest

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.trainer.resume_settings import Comparison, compare, is_allowed, settings_of
from tests.tiny import MIXTURES, merged, tiny_config


def _compared(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    return compare(settings_of(tiny_config(**before)), settings_of(tiny_config(**after)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 500000.0),
        ("norm_eps", 1e-6),
        ("activation", "gelu"),
        ("norm", "layer"),
        ("moe.num_experts_per_token", 3),
        ("moe.routed_scaling_factor", 1.5),
        ("moe.normalize_weights", False),
        ("moe.z_loss", 0.1),
        ("yarn.factor", 4.0),
    ],
)
def test_what_changes_the_function_of_a_model_is_found(key: str, value: Any) -> None:
    model = {} if key == "activation" else MIXTURES["mixtral"]
    change: Any = value
    for name in reversed(key.split(".")):
        change = {name: change}
    found = _compared({"model": model}, {"model": merged(model, change)})
    assert [(each.key, each.new) for each in found.model] == [(f"model.{key}", value)]
    assert found.trains == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"model": {"head_dim": 8}}),  # 32 / 4, which null stands for
        ({}, {"model": {"name": "other", "init_std": 0.5, "max_seq_length": 99}}),
        ({}, {"model": {"yarn": {"beta_fast": 16.0}, "mla": {"v_head_dim": 5}, "moe": {"z_loss": 1.0}}}),
        (
            {"model": {"moe": {"num_experts": 4}}},
            {"model": {"moe": {"num_experts": 4, "expert_intermediate_size": 48}}},
        ),
        ({"model": {"position": "learned"}}, {"model": {"position": "learned", "rope_theta": 5.0}}),
        ({}, {"dp": 2, "num_microbatches": 2, "zero": 3, "schedule": "gpipe"}),
        (
            {},
            {"logger": {"name": "none"}, "recompute": {"mode": "full"}, "data": {"cache_dir": "/elsewhere"}},
        ),
        ({}, {"optimizer": {"offload": {"tier": "host"}}}),
    ],
)
def test_what_leaves_model_and_training_as_they_were(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert _compared(before, after) == Comparison(model=(), trains=(), unknown=(), not_compared=())


def test_what_trains_may_change_and_is_told() -> None:
    found = _compared(
        {}, {"optimizer": {"base_lr": 0.5}, "training": {"num_steps": 7}, "precision": {"compute": "bf16"}}
    )
    assert found.model == ()
    assert [str(change) for change in found.trains] == [
        "optimizer.base_lr: 0.003 -> 0.5",
        "precision.compute: fp32 -> bf16",
        "training.num_steps: 100 -> 7",
    ]


def test_another_version_s_settings_are_said() -> None:
    now = settings_of(TrainConfig())
    old = {key: value for key, value in now.items() if key != "model.rope_theta"}
    assert compare(old, now).not_compared == ("model.rope_theta",)
    assert compare({}, now).not_compared
    newer = {**now, "model.window": 128, "optimizer.foreach": True}
    assert compare(newer, now).unknown == ("model.window=128",)


def test_no_path_and_no_layout_is_kept() -> None:
    kept = settings_of(TrainConfig())
    assert not [key for key in kept if any(word in key for word in ("path", "dir", "folder", "sources"))]
    assert not [key for key in kept if key.startswith(("parallel.", "schedule.", "zero.", "logger."))]


def test_a_node_allows_what_is_in_it() -> None:
    assert is_allowed(("model.yarn",), "model.yarn.factor")
    assert is_allowed(("model.yarn.factor",), "model.yarn.factor")
    assert not is_allowed(("model.yarn.factor",), "model.yarn", "model.yarn.factors")
