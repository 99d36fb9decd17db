"""Rules of ZeRO: which of its options go with which stage, engine and layout."""

from __future__ import annotations

from collections.abc import Iterator

from counterflow.framework.checks.rules.rule import (
    WITH_DEEPSPEED,
    Asked,
    Finding,
    Rule,
    largest_divisor,
    merged,
)
from counterflow.framework.planning.workload import Workload
from counterflow.parallel.zero.config import ZeroConfig

_DEFAULTS = ZeroConfig()


def _engine(workload: Workload) -> Iterator[Finding]:
    zero = workload.config.zero
    if zero.engine != "deepspeed":
        return
    for name in ("units", "prefetch_units", "reshard_after", "reduce", "shard_size"):
        value, default = getattr(zero, name), getattr(_DEFAULTS, name)
        if value != default:
            text = "null" if default is None else default
            yield Finding(
                value=f"zero.{name}={value} with zero.engine=deepspeed",
                reason="it decides itself what is gathered, freed and reduced together, and when",
                remedy=f"set zero.{name}={text}, or zero.engine=native",
            )


def _reduces_early(workload: Workload) -> Iterator[Finding]:
    zero = workload.config.zero
    if zero.reduce == "microbatch" and zero.stage < 2 and zero.engine == "native":
        yield Finding(
            value=f"zero.reduce=microbatch with zero.stage={zero.stage}",
            reason="gradients are reduced to shards, which stages 2 and 3 keep",
            remedy="set zero.stage=2 or 3, or zero.reduce=step",
        )


def _shards_in_groups(workload: Workload) -> Iterator[Finding]:
    config = workload.config
    zero, size = config.zero, config.zero.shard_size
    if size is None or zero.engine != "native":
        return
    if zero.stage != 3:
        yield Finding(
            value=f"zero.shard_size={size} with zero.stage={zero.stage}",
            reason="parameters are whole below stage 3, and optimizer state is sharded over all replicas",
            remedy="set zero.stage=3, or zero.shard_size=null",
        )
    unfit = (
        (
            config.compression.method == "powersgd",
            "compression.method=powersgd",
            "factors are of whole matrices",
        ),
        (
            config.compression.weights != "none",
            f"compression.weights={config.compression.weights}",
            "what is quantised are the masters of one rank, and a shard is of several",
        ),
        (
            config.balance.num_redundant_experts > 0,
            f"balance.num_redundant_experts={config.balance.num_redundant_experts}",
            "copies of an expert are summed in one order over all replicas",
        ),
        (
            zero.offload_parameters,
            "zero.offload_parameters=true",
            "the shards on the host are the masters, and a shard is of several ranks",
        ),
    )
    for is_set, value, reason in unfit:
        if is_set:
            yield Finding(
                value=f"zero.shard_size={size} with {value}", reason=reason, remedy="set zero.shard_size=null"
            )


def _frees_by_rank(workload: Workload) -> Iterator[Finding]:
    config = workload.config
    after, size = config.zero.reshard_after, config.parallel.pipeline_parallel_size
    if isinstance(after, str):
        if after == "auto" and config.memory_limit_bytes is None:
            yield Finding(
                value="zero.reshard_after=auto",
                reason="it is chosen by the room that memory_limit_bytes leaves, and there is no limit",
                remedy="set memory_limit_bytes=N, or zero.reshard_after=use, backward or step",
            )
        return
    text = f"zero.reshard_after=[{','.join(after)}]"
    if len(after) != size:
        yield Finding(
            value=text,
            reason=f"a list has a word for each of the parallel.pipeline_parallel_size={size} pipeline ranks",
            remedy=f"name {size} of use, backward and step, or one for all",
        )
    elif "auto" in after:
        yield Finding(
            value=text,
            reason="auto is for all pipeline ranks",
            remedy="set zero.reshard_after=auto, or name use, backward or step for each",
        )
    elif workload.named(workload.full_size).num_directions > 1 and after != after[::-1]:
        yield Finding(
            value=text,
            reason=f"schedule={config.schedule.name} has the copies of a stage on mirrored pipeline ranks, which "
            "gather it together",
            remedy="name the same for both, as in zero.reshard_after=[use,step,step,use]",
        )


def _limit_is_predicted(workload: Workload) -> Iterator[Finding]:
    config = workload.config
    if config.memory_limit_bytes is None:
        return
    value = f"memory_limit_bytes={config.memory_limit_bytes}"
    if config.zero.engine != "native":
        yield Finding(
            value=f"{value} with zero.engine={config.zero.engine}",
            reason="what it holds is not known here",
            remedy="set memory_limit_bytes=null, or zero.engine=native",
        )
    if config.offload.is_active:
        yield Finding(
            value=f"{value} with offload.policy={config.offload.policy}",
            reason="when activations have left depends on a link, so the peak is not predicted",
            remedy="set memory_limit_bytes=null; offload.budget_bytes limits activations",
        )


def _groups_are_equal(workload: Workload) -> Iterator[Finding]:
    config, size = workload.config, workload.config.zero.shard_size
    if size is None or config.zero.stage != 3:
        return
    copies = workload.named(workload.full_size).num_directions
    replicas = config.parallel.data_parallel_size * config.parallel.context_parallel_size * copies
    if replicas % size:
        yield Finding(
            value=f"zero.shard_size={size}",
            reason=f"must divide the {replicas} replicas of a stage, which are sharded in groups of so many",
            remedy=f"try zero.shard_size={largest_divisor(replicas, min(size, replicas))}",
        )


RULES = (
    Rule(
        name="DeepSpeed's engine has its own units",
        find=_engine,
        example=merged(WITH_DEEPSPEED, {"zero": {"stage": 3, "units": "stage"}}),
    ),
    Rule(
        name="each pipeline rank frees its parameters",
        find=_frees_by_rank,
        example={"zero": {"stage": 3, "reshard_after": "auto"}},
        asked=Asked.WITH_SCHEDULE,
    ),
    Rule(
        name="what is limited is predicted",
        find=_limit_is_predicted,
        example={"memory_limit_bytes": 1 << 30, "offload": {"policy": "schedule", "budget_bytes": 1 << 24}},
    ),
    Rule(
        name="gradients of a micro-batch are reduced to shards",
        find=_reduces_early,
        example={"zero": {"stage": 1, "reduce": "microbatch"}},
    ),
    Rule(
        name="what is sharded in groups",
        find=_shards_in_groups,
        example={"zero": {"stage": 2, "shard_size": 1}},
    ),
    Rule(
        name="groups of shards are equal",
        find=_groups_are_equal,
        example={"zero": {"stage": 3, "shard_size": 2}, "parallel": {"data_parallel_size": 3}},
        asked=Asked.WITH_SCHEDULE,
    ),
)
