"""DeepSpeed's JSON config from ours, and what its engine is refused with."""

from __future__ import annotations

from typing import Any

import pytest

from counterflow.framework.deepspeed.config import deepspeed_config
from counterflow.framework.deepspeed.start import version_of
from counterflow.framework.devices import device_problems
from counterflow.framework.errors import ConfigError
from tests.tiny import MIXTURES, tiny_config

ENGINE: dict[str, Any] = {"engine": "deepspeed"}


def test_the_config_of_a_run() -> None:
    config = tiny_config(
        dp=2,
        num_microbatches=3,
        zero={"stage": 2, "engine": "deepspeed"},
        data={"micro_batch_size": 4},
        precision={"compute": "bf16"},
        optimizer={"max_grad_norm": 0.5},
    )
    found = deepspeed_config(config)
    assert found["zero_optimization"]["stage"] == 2
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (4, 3)
    assert found["train_batch_size"] == 4 * 3 * 2
    assert found["gradient_clipping"] == 0.5
    assert found["bf16"] == {"enabled": True}
    assert not found.keys() & {"optimizer", "scheduler"}


@pytest.mark.parametrize(("stage", "limit", "expected"), [(0, 0.5, 0.0), (1, None, 0.0), (3, 0.5, 0.5)])
def test_who_clips(stage: int, limit: float | None, expected: float) -> None:
    config = tiny_config(zero={"stage": stage, **ENGINE}, optimizer={"max_grad_norm": limit})
    assert deepspeed_config(config)["gradient_clipping"] == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"pp": 2}, "parallel.pipeline_parallel_size=2: .*set parallel.pipeline_parallel_size=1"),
        ({"schedule": "gpipe"}, "schedule.name=gpipe: .*wrong gradients.*set schedule=1f1b"),
        ({"model": MIXTURES["mixtral"]}, "model.moe.num_experts=4: .*fewer replicas"),
        ({"model": {"mtp": {"num_modules": 1}}}, "model.mtp.num_modules=1: .*outside of the forward"),
        ({"compression": {"method": "onebit"}}, "compression.method=onebit: .*no place for ours"),
        ({"checkpoint": {"enabled": True}}, "checkpoint.enabled=true: .*set checkpoint=none"),
        ({"optimizer": {"post_validation": True}}, "post_validation=true: .*waits for the norm"),
        ({"optimizer": {"offload": {"tier": "disk"}}}, "tier=disk: .*keeps masters and moments"),
        ({"precision": {"compute": "fp16"}}, "precision.compute=fp16: .*set precision=bf16"),
        ({"precision": {"compute": "bf16"}}, "zero.stage=0: there it wraps .*set zero.stage=1"),
        ({"zero": {"reshard_after": "step", **ENGINE}}, "zero.reshard_after=step with zero.engine=deepspeed"),
    ],
)
def test_what_the_engine_is_refused_with(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        tiny_config(**{"zero": ENGINE, **values})
    assert "zero.engine=deepspeed" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"zero": {"stage": 2, "offload_parameters": True}}, "zero.stage=2: only stage 3 has shards"),
        ({"zero": {"stage": 3, "offload_parameters": True}}, "tier=none: the shards .*tier=host"),
        ({"optimizer": {"kernel": "cpu_adam"}}, "kernel=cpu_adam with optimizer.offload.tier=none"),
        ({"optimizer": {"kernel": "apex", "offload": {"tier": "host"}}}, "it updates on a GPU"),
        ({"optimizer": {"offload": {"tier": "host", "folder": "x"}}}, "only the disk tier has a folder"),
        ({"optimizer": {"offload": {"tier": "disk", "resident_bytes": 1}}}, "set it to 4096 or more"),
        (
            {"optimizer": {"offload": {"tier": "disk"}, "post_validation": True}},
            "copies of all moments would be in memory",
        ),
    ],
)
def test_where_states_cannot_be(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        tiny_config(**values)


def test_without_deepspeed_it_is_said_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(zero=ENGINE)
    assert not any("deepspeed is not installed" in problem for problem in device_problems(config))
    monkeypatch.setattr("counterflow.framework.deepspeed.start.importlib.util.find_spec", lambda name: None)
    (problem,) = device_problems(config)
    assert problem.startswith("zero.engine=deepspeed: the package deepspeed is not installed")


def test_one_bit_adam_is_refused_with_what_there_is_instead() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer.name=onebit_adam: .*has it no more.*compression=onebit"
    ):
        tiny_config(optimizer={"name": "onebit_adam"})


def test_versions() -> None:
    assert version_of("0.19.8+cpu") == (0, 19, 8)
    assert version_of("0.20.0rc1") == (0, 20)
