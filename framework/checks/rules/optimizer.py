"""Rules of precision, of the DeepSpeed engine's settings, and of where updates happen: where the masters are."""

from __future__ import annotations

from collections.abc import Iterator

from counterflow.framework.checks.rules.rule import WITH_DEEPSPEED, Finding, Rule
from counterflow.framework.planning.workload import Workload
from counterflow.models.fp8 import fp8_problems


def _fp8(workload: Workload) -> Iterator[Finding]:
    config = workload.config
    if config.precision.linear == "fp8":
        for problem in fp8_problems(config.model, config.parallel.tensor_parallel_size):
            yield Finding.of(ValueError(problem))


def _bf16_moments(workload: Workload) -> Iterator[Finding]:
    kernel = workload.config.optimizer.kernel
    # cpu_adam is a feature, and a row of the compositions.
    if workload.config.precision.optimizer_states == "bf16" and kernel == "apex":
        yield Finding(
            value=f"optimizer.kernel={kernel}",
            reason="it keeps fp32 moments, and precision.optimizer_states=bf16",
            remedy="set that to fp32, or optimizer.kernel=auto",
        )


def _engine_updates(workload: Workload) -> Iterator[Finding]:
    if workload.config.zero.engine == "deepspeed" and workload.config.optimizer.kernel == "apex":
        yield Finding(
            value="optimizer.kernel=apex with zero.engine=deepspeed",
            reason="it is given torch's AdamW",
            remedy="set optimizer.kernel=auto",
        )


def _shards_of_parameters(workload: Workload) -> Iterator[Finding]:
    zero = workload.config.zero
    if zero.offload_parameters and zero.stage != 3:
        yield Finding(
            value=f"zero.offload_parameters=true with zero.stage={zero.stage}",
            reason="only stage 3 has shards of parameters",
            remedy="set zero.stage=3",
        )


def _masters_on_host(workload: Workload) -> Iterator[Finding]:
    tier = workload.config.optimizer.offload.tier
    if workload.config.zero.offload_parameters and tier != "host":
        yield Finding(
            value=f"zero.offload_parameters=true with optimizer.offload.tier={tier}",
            reason="the shards that stay on the host are the masters, which are updated where they are",
            remedy="set optimizer.offload.tier=host",
        )


def _cpu_adam(workload: Workload) -> Iterator[Finding]:
    optimizer = workload.config.optimizer
    if optimizer.kernel == "cpu_adam" and optimizer.offload.tier != "host":
        yield Finding(
            value=f"optimizer.kernel=cpu_adam with optimizer.offload.tier={optimizer.offload.tier}",
            reason="it updates on the host",
            remedy="set optimizer.offload.tier=host (optimizer=cpu_adam is both)",
        )


def _apex(workload: Workload) -> Iterator[Finding]:
    optimizer = workload.config.optimizer
    if optimizer.kernel == "apex" and optimizer.offload.tier == "host":
        yield Finding(
            value="optimizer.kernel=apex with optimizer.offload.tier=host",
            reason="it updates on a GPU",
            remedy="set optimizer.kernel=auto or cpu_adam",
        )


RULES = (
    Rule(
        name="products in fp8 have multiples of 16",
        find=_fp8,
        example={"model": {"intermediate_size": 360}, "precision": {"linear": "fp8"}},
    ),
    Rule(
        name="apex keeps fp32 moments",
        find=_bf16_moments,
        example={"optimizer": {"kernel": "apex"}, "precision": {"optimizer_states": "bf16"}},
    ),
    Rule(
        name="DeepSpeed has torch's AdamW",
        find=_engine_updates,
        example={**WITH_DEEPSPEED, "optimizer": {"kernel": "apex"}},
    ),
    Rule(
        name="parameters on the host are shards",
        find=_shards_of_parameters,
        example={
            "zero": {"stage": 2, "offload_parameters": True},
            "optimizer": {"offload": {"tier": "host"}},
        },
    ),
    Rule(
        name="parameters on the host are the masters",
        find=_masters_on_host,
        example={"zero": {"stage": 3, "offload_parameters": True}},
    ),
    Rule(
        name="CPUAdam updates on the host",
        find=_cpu_adam,
        example={"optimizer": {"kernel": "cpu_adam"}},
    ),
    Rule(
        name="apex updates on a GPU",
        find=_apex,
        example={"optimizer": {"kernel": "apex", "offload": {"tier": "host"}}},
    ),
)
