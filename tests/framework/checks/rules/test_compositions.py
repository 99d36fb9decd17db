"""The composition table: refusals by name, for the config and for the docs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from counterflow.framework.checks.rules.compositions import REFUSALS, RULES, Refusal, rule_of
from counterflow.framework.checks.rules.markdown import to_markdown
from counterflow.framework.checks.rules.table import RULES as ALL_RULES
from counterflow.framework.checks.rules.table import broken
from counterflow.framework.config.features import FEATURES, active_features
from counterflow.framework.config.tree import CheckpointConfig, PrecisionConfig, TrainConfig
from counterflow.framework.planning.workload import Workload
from counterflow.parallel.mesh import MeshConfig
from counterflow.parallel.pipeline.config import ScheduleConfig
from counterflow.parallel.pipeline.schedules.registry import all_schedules, generated_schedules
from counterflow.parallel.zero.config import ZeroConfig

_DUALPIPE_ZERO_3 = TrainConfig(
    parallel=MeshConfig(pipeline_parallel_size=2, tensor_parallel_size=2),
    schedule=ScheduleConfig(name="dualpipe"),
    zero=ZeroConfig(stage=3),
)
_PAIR = Refusal(first="zero_3", second="dualpipe", reason="a reason", remedy="a remedy")


def refused(config: TrainConfig, refusals: Sequence[Refusal] = REFUSALS) -> list[str]:
    found = broken(Workload.of(config), rules=[rule_of(refusal) for refusal in refusals])
    return [str(finding) for findings in found.values() for finding in findings]


def test_the_features_of_a_config() -> None:
    keys = [feature.key for feature in active_features(_DUALPIPE_ZERO_3)]
    assert keys == [
        "tensor_parallel",
        "sequence_parallel",
        "pipeline_parallel",
        "dualpipe",
        "zero_3",
        "checkpoints",
    ]


def test_every_schedule_is_a_feature() -> None:
    assert set(generated_schedules()) <= {feature.key for feature in FEATURES}


def test_rows_name_features_that_exist_once() -> None:
    keys = [feature.key for feature in FEATURES]
    assert len(set(keys)) == len(keys)
    pairs = [frozenset((row.first, row.second)) for row in REFUSALS]
    assert len(set(pairs)) == len(pairs) == len(RULES)
    assert frozenset().union(*pairs) - {None} <= set(keys)


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


def test_a_pair_is_refused_where_something_else_holds() -> None:
    """DeepSpeed's engine takes bf16 wherever it shards."""
    values = {"checkpoint": CheckpointConfig(enabled=False), "precision": PrecisionConfig(compute="bf16")}
    config = TrainConfig(zero=ZeroConfig(engine="deepspeed", stage=0), **values)  # type: ignore[arg-type]
    (message,) = refused(config)
    assert message == (
        "zero.engine=deepspeed with precision.compute=bf16 and zero.stage=0: the DeepSpeed engine does not compose "
        "with bf16 with fp32 master weights at zero.stage=0: there it wraps the optimizer in a loss scaler, and "
        "gradients are added up in bf16; set zero.stage=1, or precision=fp32, or zero.engine=native, which has it"
    )
    assert refused(replace(config, zero=ZeroConfig(engine="deepspeed", stage=1))) == []
    assert refused(replace(config, zero=ZeroConfig())) == []


def test_the_engine_takes_the_schedules_that_alternate() -> None:
    pairs = {row.second for row in REFUSALS if row.first == "deepspeed_engine"}
    assert set(all_schedules()) - pairs == {"1f1b", "naive"}


def test_the_tables_for_the_docs() -> None:
    first, second, third = to_markdown(refusals=[*REFUSALS, _PAIR]).split("\n\n")
    row = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in first.splitlines()[2:]}
    assert len(row) == len(FEATURES)
    assert row["context parallelism"] == "refused"
    assert row["ZeRO-3"].endswith("DualPipe, two copies")
    assert row["DualPipe, two copies"].startswith("all but ")
    assert row["tensor parallelism"] == "all"
    assert row["bf16 with fp32 master weights"] == "all but the DeepSpeed engine at `zero.stage=0`"
    assert row["quantised gathers of weights"].endswith("copies of experts, `zero.stage=0`")
    assert row["a batch that grows"].endswith("a schedule from a file")
    assert "| ZeRO-3 with DualPipe, two copies | a reason | a remedy |" in second
    assert second.count("wrong gradients") == 1
    assert len(third.splitlines()) == 2 + len(ALL_RULES) - len(RULES)
    assert "data.seq_length=128: model.position=learned has a row" in third
