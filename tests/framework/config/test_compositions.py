"""The composition table: refusals by name, for the config and for the docs."""

from __future__ import annotations

from dataclasses import replace

from counterflow.framework.config.compositions import REFUSALS, Refusal, refused, to_markdown
from counterflow.framework.config.features import FEATURES, active_features
from counterflow.framework.config.tree import TrainConfig
from counterflow.parallel.mesh import MeshConfig
from counterflow.parallel.pipeline.config import ScheduleConfig
from counterflow.parallel.pipeline.schedules.registry import generated_schedules
from counterflow.parallel.zero.config import ZeroConfig

_DUALPIPE_ZERO_3 = TrainConfig(
    parallel=MeshConfig(pipeline_parallel_size=2, tensor_parallel_size=2),
    schedule=ScheduleConfig(name="dualpipe"),
    zero=ZeroConfig(stage=3),
)
_PAIR = Refusal(first="zero_3", second="dualpipe", reason="a reason", remedy="a remedy")


def test_the_features_of_a_config() -> None:
    keys = [feature.key for feature in active_features(_DUALPIPE_ZERO_3)]
    assert keys == [
        "tensor_parallel",
        "sequence_parallel",
        "pipeline_parallel",
        "dualpipe",
        "zero_3",
        "not_1f1b",
        "checkpoints",
    ]


def test_every_schedule_is_a_feature() -> None:
    assert set(generated_schedules()) <= {feature.key for feature in FEATURES}


def test_rows_name_features_that_exist_once() -> None:
    keys = [feature.key for feature in FEATURES]
    assert len(set(keys)) == len(keys)
    pairs = [frozenset((row.first, row.second)) for row in REFUSALS]
    assert len(set(pairs)) == len(pairs)
    assert frozenset().union(*pairs) <= set(keys)


def test_nothing_is_refused_for_the_main_job() -> None:
    assert refused(_DUALPIPE_ZERO_3) == []


def test_a_feature_refused_altogether() -> None:
    config = replace(_DUALPIPE_ZERO_3, parallel=MeshConfig(context_parallel_size=2))
    (message,) = refused(config)
    assert message.startswith("parallel.context_parallel_size=2: context parallelism is not supported: ")
    assert message.endswith("tensor_parallel_size")


def test_a_pair_is_refused_only_together() -> None:
    (message,) = refused(_DUALPIPE_ZERO_3, [_PAIR])
    assert message == (
        "zero.stage=3 with schedule.name=dualpipe: ZeRO-3 does not compose with DualPipe, two copies: a reason; "
        "a remedy"
    )
    assert refused(replace(_DUALPIPE_ZERO_3, zero=ZeroConfig(stage=2)), [_PAIR]) == []


def test_the_table_for_the_docs() -> None:
    first, second = to_markdown(refusals=[*REFUSALS, _PAIR]).split("\n\n")
    row = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in first.splitlines()[2:]}
    assert len(row) == len(FEATURES)
    assert row["context parallelism"] == "refused"
    assert row["ZeRO-3"].endswith("DualPipe, two copies")
    assert row["DualPipe, two copies"].startswith("all but ")
    assert row["tensor parallelism"] == "all"
    assert len(second.splitlines()) == 2 + len(REFUSALS) + 1
    assert "| ZeRO-3 with DualPipe, two copies | a reason | a remedy |" in second
