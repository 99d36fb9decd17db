"""The config tree: what is read, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.framework.checks.rules import build_schedule, check
from counterflow.framework.config.mapping import (
    config_hash,
    dotted_names,
    from_mapping,
    to_mapping,
    unknown_key,
)
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError
from counterflow.models.config import MLAConfig, ModelConfig, MoEConfig, MTPConfig
from counterflow.parallel.mesh import MeshConfig
from counterflow.parallel.pipeline.config import ScheduleConfig


def _mapping(dotted: str, value: Any) -> dict[str, Any]:
    for name in reversed(dotted.split(".")):
        value = {name: value}
    return value


def _refusal(mapping: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        from_mapping(TrainConfig, mapping)
    return str(caught.value)


def test_the_default_config_is_sound_and_survives_a_mapping() -> None:
    config = TrainConfig()
    check(config)
    assert from_mapping(TrainConfig, to_mapping(config)) == config
    assert from_mapping(TrainConfig, {}) == config


def test_values_reach_their_dataclasses() -> None:
    config = from_mapping(
        TrainConfig,
        {"zero": {"stage": 3}, "data": {"sources": ["a", "b"]}, "optimizer": {"base_lr": 1}, "seed": 7},
    )
    assert config.zero.stage == 3
    assert config.data.sources == ("a", "b")
    assert config.optimizer.base_lr == 1.0
    assert isinstance(config.optimizer.base_lr, float)
    assert config.seed == 7


@pytest.mark.parametrize(
    ("dotted", "value", "rule"),
    [
        ("schedule.num_microbatches", "8", "must be a whole number"),
        ("schedule.num_microbatches", 8.0, "must be a whole number"),
        ("schedule.num_microbatches", True, "must be a whole number"),
        ("data.seq_length", 1.5, "must be a whole number"),
        ("data.sources", "texts", "must be a list"),
        ("data.sources", ["a", 3], "must be a list"),
        ("optimizer.base_lr", "fast", "must be a number"),
        ("optimizer.base_lr", True, "must be a number"),
        ("model.vocab_size", "big", "must be a whole number or null"),
        ("zero.stage", 4, "must be one of 0, 1, 2, 3"),
        ("zero.stage", True, "must be one of 0, 1, 2, 3"),
        ("zero.stage", 2.0, "must be one of 0, 1, 2, 3"),
        ("precision.compute", "bf61", "must be one of fp32, bf16, fp16 (did you mean 'bf16'?)"),
        ("logger.project", 3, "must be text"),
        ("deterministic", "yes", "must be auto or true or false"),
        ("deterministic", 1, "must be auto or true or false"),
        ("device", "gpu", "must be one of auto, cpu, cuda"),
        ("seed", None, "must be a whole number"),
    ],
)
def test_a_wrong_type_is_refused_not_converted(dotted: str, value: Any, rule: str) -> None:
    message = _refusal(_mapping(dotted, value))
    assert message.startswith(f"{dotted}=")
    assert rule in message
    assert "the default is" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("optimizer.max_grad_norm", math.inf),
        ("optimizer.base_lr", -math.inf),
        ("schedule.costs.pair", math.nan),
        ("schedule.costs.forward", [1.0, math.inf]),
    ],
)
def test_every_number_is_finite(dotted: str, value: Any) -> None:
    assert f"{dotted}={value}: must be finite" in _refusal(_mapping(dotted, value))


def test_a_group_is_not_a_value() -> None:
    assert "zero=3: a group of values; set zero.stage" in _refusal({"zero": 3})


@pytest.mark.parametrize(
    ("dotted", "meant"),
    [
        ("schedule.num_microbatch", "did you mean schedule.num_microbatches?"),
        ("num_microbatches", "did you mean schedule.num_microbatches?"),
        ("parallel.tensor_parralel_size", "did you mean parallel.tensor_parallel_size?"),
        ("optimizer.lr", "did you mean optimizer.base_lr?"),
        ("shedule", "did you mean schedule?"),
        (
            "zero.xyz",
            "zero has stage, engine, units, prefetch_units, reshard_after, reduce, shard_size, offload_parameters",
        ),
        ("qqqq", "`counterflow train --cfg job` prints every key"),
    ],
)
def test_an_unknown_key_is_named_in_full_with_what_was_meant(dotted: str, meant: str) -> None:
    message = unknown_key(dotted, dotted_names(TrainConfig))
    assert message == f"{dotted}: the config has no such key; {meant}"
    assert _refusal(_mapping(dotted, 1)) == message


def test_every_problem_is_in_one_message() -> None:
    message = _refusal(
        {"zero": {"stage": 9}, "training": {"stps": 1}, "parallel": {"tensor_parallel_size": 0}, "seed": "x"}
    )
    assert message.startswith("4 problems in the config:\n")
    for part in ("zero.stage=9", "training.stps", "parallel.tensor_parallel_size=0", "seed='x'"):
        assert part in message


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("training.num_steps", 0),
        ("training.log_interval_steps", 0),
        ("training.eval_interval_steps", -1),
        ("comm.timeout_s", 0),
        ("comm.timeout_s", float("nan")),
        ("comm.startup_timeout_s", 0),
        ("launcher.grace_s", 60),
        ("launcher.threads_per_rank", 0),
        ("optimizer.base_lr", 0),
        ("optimizer.base_lr", float("nan")),
        ("optimizer.beta2", 1.0),
        ("optimizer.max_grad_norm", 0),
        ("model.num_heads", 3),
        ("schedule.costs.pair", 0),
    ],
)
def test_a_node_keeps_its_own_rules(dotted: str, value: Any) -> None:
    message = _refusal(_mapping(dotted, value))
    assert message.startswith(f"{dotted}={value}")
    assert ":" in message


_HEADS_8_KV_4 = ModelConfig(hidden_size=64, num_heads=8, num_kv_heads=4, num_layers=8, intermediate_size=96)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"parallel": MeshConfig(tensor_parallel_size=8)},
            ["model.num_kv_heads=4: must be a multiple of parallel.tensor_parallel_size=8"],
        ),
        (
            {"parallel": MeshConfig(tensor_parallel_size=3)},
            ["model.num_heads=8", "model.num_kv_heads=4", "data.seq_length=128"],
        ),
        ({"parallel": MeshConfig(tensor_parallel_size=64)}, ["model.intermediate_size=96"]),
        (
            {"parallel": MeshConfig(pipeline_parallel_size=16), "schedule": ScheduleConfig(name="gpipe")},
            ["model.num_layers=8: schedule=gpipe with parallel.pipeline_parallel_size=16 has 16 stages"],
        ),
        (
            {"parallel": MeshConfig(pipeline_parallel_size=3), "schedule": ScheduleConfig(name="dualpipe")},
            ["parallel.pipeline_parallel_size=3: dualpipe"],
        ),
        (
            {
                "parallel": MeshConfig(pipeline_parallel_size=4),
                "schedule": ScheduleConfig(name="dualpipe", num_microbatches=6),
            },
            ["schedule.num_microbatches=6: dualpipe needs at least twice as many micro-batches as ranks"],
        ),
        ({"schedule": ScheduleConfig(name="2f2b")}, ["schedule.name=2f2b: no such schedule"]),
        (
            {"parallel": MeshConfig(context_parallel_size=2)},
            ["parallel.context_parallel_size=2: context parallelism"],
        ),
        (
            {"parallel": MeshConfig(data_parallel_size=2, expert_parallel_size=2)},
            ["parallel.expert_parallel_size=2: the model has no experts", "(model.moe.num_experts=0)"],
        ),
        (
            {
                "parallel": MeshConfig(data_parallel_size=4, expert_parallel_size=4),
                "model": replace(_HEADS_8_KV_4, moe=MoEConfig(num_experts=6)),
            },
            ["model.moe.num_experts=6: must be a multiple of", "try parallel.expert_parallel_size=2"],
        ),
        (
            {
                "parallel": MeshConfig(tensor_parallel_size=4),
                "model": replace(
                    _HEADS_8_KV_4,
                    intermediate_size=97,
                    moe=MoEConfig(num_experts=4, num_shared_experts=1, expert_intermediate_size=6),
                ),
            },
            ["model.moe.expert_intermediate_size=6: must be a multiple of parallel.tensor_parallel_size=4"],
        ),
        (
            {"model": replace(_HEADS_8_KV_4, position="learned", max_seq_length=100)},
            ["data.seq_length=128: model.position=learned has a row for each of model.max_seq_length=100"],
        ),
        (
            {"model": replace(_HEADS_8_KV_4, mtp=MTPConfig(num_modules=128))},
            ["model.mtp.num_modules=128: predicts so many tokens further", "data.seq_length=128"],
        ),
        ({"model": replace(_HEADS_8_KV_4, vocab_size=300)}, ["model.vocab_size=300: smaller than tokenizer"]),
    ],
)
def test_rules_that_cross_nodes(changes: dict[str, Any], expected: list[str]) -> None:
    config = replace(TrainConfig(model=_HEADS_8_KV_4), **changes)
    with pytest.raises(ConfigError) as caught:
        check(config)
    for part in expected:
        assert part in str(caught.value)


def test_a_remedy_that_is_offered_works() -> None:
    config = replace(TrainConfig(model=_HEADS_8_KV_4), parallel=MeshConfig(tensor_parallel_size=3))
    with pytest.raises(ConfigError, match=r"or parallel\.tensor_parallel_size=2"):
        check(config)
    check(replace(config, parallel=MeshConfig(tensor_parallel_size=2)))


def test_the_sequence_need_not_divide_without_sequence_parallelism() -> None:
    config = TrainConfig(data=replace(TrainConfig().data, seq_length=127))
    check(replace(config, parallel=MeshConfig(tensor_parallel_size=2, sequence_parallel=False)))
    with pytest.raises(ConfigError, match=r"data\.seq_length=127"):
        check(replace(config, parallel=MeshConfig(tensor_parallel_size=2)))


def test_tokens_for_experts_must_divide_without_sequence_parallelism_too() -> None:
    config = TrainConfig(
        model=replace(_HEADS_8_KV_4, moe=MoEConfig(num_experts=4)),
        data=replace(TrainConfig().data, seq_length=127),
        parallel=MeshConfig(tensor_parallel_size=2, sequence_parallel=False),
    )
    with pytest.raises(ConfigError, match=r"data\.seq_length=127: .*tokens are shared out") as told:
        check(config)
    assert "sequence_parallel=false" not in str(told.value), "it is off already"
    check(replace(config, data=replace(config.data, seq_length=128)))


def test_only_what_the_model_has_must_divide() -> None:
    """No dense layer: the dense MLP's width is free. Latent attention: so is the number of key/value heads."""
    model = replace(
        _HEADS_8_KV_4, intermediate_size=97, moe=MoEConfig(num_experts=4, expert_intermediate_size=7)
    )
    parallel = MeshConfig(tensor_parallel_size=8)
    mla = replace(model, mla=MLAConfig(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4))
    check(TrainConfig(model=mla, parallel=parallel))
    for refused, name in (
        (model, "model.num_kv_heads=4"),
        (replace(mla, moe=replace(mla.moe, num_dense_layers=1)), "model.intermediate_size=97"),
    ):
        with pytest.raises(ConfigError, match=name):
            check(TrainConfig(model=refused, parallel=parallel))


def test_the_schedule_that_is_checked_is_the_one_that_runs() -> None:
    schedule = build_schedule(ScheduleConfig(name="dualpipe"), MeshConfig(pipeline_parallel_size=4))
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == ("dualpipe", 4, 8)


def _every_value(config: Any, prefix: str = "") -> list[str]:
    names: list[str] = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        names.append(prefix + item.name)
        if dataclasses.is_dataclass(value):
            names += _every_value(value, f"{prefix}{item.name}.")
    return names


def test_dotted_names_are_all_of_the_fields() -> None:
    assert list(dotted_names(TrainConfig)) == _every_value(TrainConfig())


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), stage=st.sampled_from([0, 1, 2, 3]), rate=st.floats(1e-6, 1.0))
def test_hash_and_mapping_follow_the_values_alone(seed: int, stage: int, rate: float) -> None:
    mapping = {"seed": seed, "zero": {"stage": stage}, "optimizer": {"base_lr": rate}}
    config = from_mapping(TrainConfig, mapping)
    again = from_mapping(TrainConfig, dict(reversed(list(to_mapping(config).items()))))
    assert again == config
    assert config_hash(again) == config_hash(config)
    assert config_hash(replace(config, seed=seed + 1)) != config_hash(config)


def test_kernels_are_deterministic_by_default_where_that_costs_nothing() -> None:
    for value, on_cpu, on_cuda in (("auto", True, False), (True, True, True), (False, False, False)):
        config = from_mapping(TrainConfig, {"deterministic": value})
        assert (config.is_deterministic("cpu"), config.is_deterministic("cuda")) == (on_cpu, on_cuda)
