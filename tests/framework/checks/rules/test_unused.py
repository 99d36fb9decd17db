"""Settings that do nothing are named, those that count are not."""

from __future__ import annotations

from operator import attrgetter

import pytest

from counterflow.framework.checks.rules import warnings_of
from counterflow.framework.checks.rules.unused import DEPENDENCES
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError
from counterflow.launch.compose import compose_config, find_choices
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["precision.loss_scale.initial_scale=1024"], ["precision.loss_scale.initial_scale"]),
        (["precision=fp16", "precision.loss_scale.initial_scale=1024"], []),
        (["optimizer.lr_schedule.decay_steps=5"], ["optimizer.lr_schedule.decay_steps"]),
        (["optimizer.lr_schedule.decay_steps=5", "optimizer.lr_schedule.name=wsd"], []),
        (["balance.num_nodes=2", "balance.goal=1.5"], ["balance.goal", "balance.num_nodes"]),
        (["compression.rank=2"], ["compression.rank"]),
        (["compression=powersgd", "compression.rank=2", "training.num_steps=1000"], []),
        (["compression=powersgd", "compression.warmup_steps=100"], ["compression.method"]),
        (["offload.min_bytes=1"], ["offload.min_bytes"]),
        (["skip_step.max_total=7"], ["skip_step.max_total"]),
        (["skip_step=skip", "skip_step.max_total=7"], []),
        (["memory=zero1", "zero.reshard_after=step"], ["zero.reshard_after"]),
        (["memory=zero3", "zero.reshard_after=step"], []),
        (["comm.pipeline_payload=bf16", "parallel=single"], ["comm.pipeline_payload"]),
        (["comm.pipeline_payload=bf16"], []),
        (["comm.expert_payload=bf16"], ["comm.expert_payload"]),
        (["training.batch_ramp.increment=2"], ["training.batch_ramp.increment"]),
    ],
)
def test_what_does_nothing_is_named(overrides: list[str], names: list[str]) -> None:
    found = warnings_of(compose_config(overrides))
    assert [sentence.partition("=")[0] for sentence in found] == names
    assert all(" does nothing: it needs " in sentence or "warmup" in sentence for sentence in found)


def test_the_table_names_settings_that_exist() -> None:
    for each in DEPENDENCES:
        for setting in each.settings:
            attrgetter(setting)(TrainConfig())


@pytest.mark.parametrize(
    "choice",
    [
        f"{group}={name}"
        for group in (
            "compression",
            "offload",
            "precision",
            "skip_step",
            "optimizer",
            "memory",
            "model",
            "experiment",
        )
        for name in find_choices().groups[group]
    ],
)
def test_the_configs_own_choices_set_nothing_that_does_nothing(choice: str) -> None:
    needs = {
        "offload=lru": ["offload.budget_share=0.5"],
        "offload=schedule": ["offload.budget_share=0.5"],
    }
    # The warm-up of some compressions is as long as the default run.
    overrides = [choice, "training.num_steps=1000", *needs.get(choice, [])]
    assert warnings_of(compose_config(overrides)) == []


def test_nodes_that_do_not_divide_the_ranks_are_refused_where_nothing_moves() -> None:
    """They shape the order of experts in any case; with more nodes than ranks a rank divided by zero."""
    with pytest.raises(
        ConfigError, match=r"balance.num_nodes=4: must divide parallel.expert_parallel_size=2"
    ):
        tiny_config(
            dp=2,
            parallel={"expert_parallel_size": 2},
            model={"moe": {"num_experts": 4, "expert_intermediate_size": 24}},
            balance={"num_nodes": 4},
        )
