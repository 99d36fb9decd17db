"""What a run may use, each with how it is switched on: the rows and columns of the table of what composes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from counterflow.parallel.pipeline.schedules.registry import all_schedules

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something a run may use.

    setting: the config text that switches it on, as a user writes it. value: the config text in force.
    example: the values of a config that switch it on, with what else it needs of the defaults.
    """

    key: str
    title: str
    setting: str
    active: Callable[[TrainConfig], bool]
    value: Callable[[TrainConfig], str]
    example: Mapping[str, Any]


def _text_of(dotted: str) -> Callable[[TrainConfig], str]:
    """The value at `dotted` as config text."""

    def text(config: TrainConfig) -> str:
        value: object = attrgetter(dotted)(config)
        return f"{dotted}={str(value).lower() if isinstance(value, bool) else value}"

    return text


def _schedule(name: str, title: str) -> Feature:
    return Feature(
        key=name,
        title=title,
        setting=f"schedule={name}",
        active=lambda config: config.schedule.name == name,
        value=_text_of("schedule.name"),
        example={"schedule": {"name": name}},
    )


def _axis(key: str, title: str) -> Feature:
    return Feature(
        key=key,
        title=title,
        setting=f"parallel.{key}_size > 1",
        active=lambda config: getattr(config.parallel, f"{key}_size") > 1,
        value=_text_of(f"parallel.{key}_size"),
        example={"parallel": {f"{key}_size": 2}},
    )


def _zero(stage: int, title: str) -> Feature:
    return Feature(
        key=f"zero_{stage}",
        title=title,
        setting=f"zero.stage={stage}",
        active=lambda config: config.zero.stage == stage,
        value=_text_of("zero.stage"),
        example={"zero": {"stage": stage}},
    )


def _skip_step_text(config: TrainConfig) -> str:
    skip_step = config.skip_step
    if skip_step.skip_non_finite:
        return "skip_step.skip_non_finite=true"
    name = "max_loss_z" if skip_step.max_loss_z is not None else "max_norm_z"
    return f"skip_step.{name}={getattr(skip_step, name)}"


_EXPERTS = {"model": {"moe": {"num_experts": 4}}}
_EXPERTS_OVER_RANKS = {**_EXPERTS, "parallel": {"data_parallel_size": 2, "expert_parallel_size": 2}}

FEATURES: tuple[Feature, ...] = (
    _axis("tensor_parallel", "tensor parallelism"),
    Feature(
        key="sequence_parallel",
        title="sequence parallelism",
        setting="parallel.sequence_parallel=true",
        active=lambda config: config.parallel.sequence_parallel and config.parallel.tensor_parallel_size > 1,
        value=_text_of("parallel.sequence_parallel"),
        example={"parallel": {"tensor_parallel_size": 2, "sequence_parallel": True}},
    ),
    _axis("pipeline_parallel", "pipeline parallelism"),
    _axis("data_parallel", "data parallelism"),
    _axis("context_parallel", "context parallelism"),
    Feature(
        key="expert_parallel",
        title="expert parallelism",
        setting="parallel.expert_parallel_size > 1",
        active=lambda config: config.parallel.expert_parallel_size > 1,
        value=_text_of("parallel.expert_parallel_size"),
        example=_EXPERTS_OVER_RANKS,
    ),
    *(_schedule(each.name, each.title) for each in all_schedules().values()),
    _zero(1, "ZeRO-1"),
    _zero(2, "ZeRO-2"),
    _zero(3, "ZeRO-3"),
    Feature(
        key="bf16",
        title="bf16 with fp32 master weights",
        setting="precision=bf16",
        active=lambda config: config.precision.compute == "bf16",
        value=_text_of("precision.compute"),
        example={"precision": {"compute": "bf16"}},
    ),
    Feature(
        key="fp16",
        title="fp16 and loss scaling",
        setting="precision=fp16",
        active=lambda config: config.precision.compute == "fp16",
        value=_text_of("precision.compute"),
        example={"precision": {"compute": "fp16"}},
    ),
    Feature(
        key="bf16_reduce",
        title="gradients summed in bf16",
        setting="precision.reduce=bf16",
        active=lambda config: config.precision.reduce == "bf16",
        value=_text_of("precision.reduce"),
        example={"precision": {"reduce": "bf16"}},
    ),
    Feature(
        key="bf16_states",
        title="bf16 moments, rounded stochastically",
        setting="precision.optimizer_states=bf16",
        active=lambda config: config.precision.optimizer_states == "bf16",
        value=_text_of("precision.optimizer_states"),
        example={"precision": {"optimizer_states": "bf16"}},
    ),
    Feature(
        key="fp8",
        title="linear layers in fp8",
        setting="precision.linear=fp8",
        active=lambda config: config.precision.linear == "fp8",
        value=_text_of("precision.linear"),
        example={"precision": {"linear": "fp8"}},
    ),
    Feature(
        key="skip_step",
        title="skipping bad steps",
        setting="skip_step=skip",
        active=lambda config: config.skip_step.are_on,
        value=_skip_step_text,
        example={"skip_step": {"skip_non_finite": True}},
    ),
    Feature(
        key="compression",
        title="compressed gradients",
        setting="compression=onebit",
        active=lambda config: config.compression.method != "none",
        value=_text_of("compression.method"),
        example={"compression": {"method": "int8"}},
    ),
    Feature(
        key="quantised_weights",
        title="quantised gathers of weights",
        setting="compression.weights=int8",
        active=lambda config: config.compression.weights != "none",
        value=_text_of("compression.weights"),
        example={"compression": {"weights": "int8"}},
    ),
    Feature(
        key="pipeline_payload",
        title="rounded transfers between stages",
        setting="comm.pipeline_payload=fp8",
        active=lambda config: config.comm.pipeline_payload != "compute",
        value=_text_of("comm.pipeline_payload"),
        example={"comm": {"pipeline_payload": "fp8"}},
    ),
    Feature(
        key="chunked_loss",
        title="the loss in chunks of tokens",
        setting="loss.chunk_tokens=N",
        active=lambda config: config.loss.chunk_tokens is not None,
        value=_text_of("loss.chunk_tokens"),
        example={"loss": {"chunk_tokens": 5}},
    ),
    Feature(
        key="recomputation",
        title="recomputation",
        setting="recompute.mode=full",
        active=lambda config: config.recompute.mode != "none",
        value=_text_of("recompute.mode"),
        example={"recompute": {"mode": "full"}},
    ),
    Feature(
        key="offload",
        title="activation offloading",
        setting="offload=schedule",
        active=lambda config: config.offload.is_active,
        value=_text_of("offload.policy"),
        example={"offload": {"policy": "schedule", "budget_share": 0.9, "min_bytes": 0}},
    ),
    Feature(
        key="experts",
        title="mixture of experts",
        setting="model.moe.num_experts > 0",
        active=lambda config: config.model.moe.num_experts > 0,
        value=_text_of("model.moe.num_experts"),
        example=_EXPERTS,
    ),
    Feature(
        key="balance",
        title="experts that move",
        setting="balance.interval_steps > 0",
        active=lambda config: config.balance.interval_steps > 0,
        value=_text_of("balance.interval_steps"),
        example={**_EXPERTS_OVER_RANKS, "balance": {"interval_steps": 1}},
    ),
    Feature(
        key="copies",
        title="copies of experts",
        setting="balance.num_redundant_experts > 0",
        active=lambda config: config.balance.num_redundant_experts > 0,
        value=_text_of("balance.num_redundant_experts"),
        example={**_EXPERTS_OVER_RANKS, "balance": {"num_redundant_experts": 1}},
    ),
    Feature(
        key="mtp",
        title="multi-token prediction",
        setting="model.mtp.num_modules > 0",
        active=lambda config: config.model.mtp.num_modules > 0,
        value=_text_of("model.mtp.num_modules"),
        example={"model": {"mtp": {"num_modules": 1}}},
    ),
    Feature(
        key="mla",
        title="latent attention",
        setting="model.mla.kv_lora_rank > 0",
        active=lambda config: config.model.uses_mla,
        value=_text_of("model.mla.kv_lora_rank"),
        example={"model": {"mla": {"kv_lora_rank": 64}}},
    ),
    Feature(
        key="post_validation",
        title="steps that do not wait for the norm",
        setting="optimizer.post_validation=true",
        active=lambda config: config.optimizer.post_validation,
        value=_text_of("optimizer.post_validation"),
        example={"optimizer": {"post_validation": True}},
    ),
    Feature(
        key="batch_ramp",
        title="a batch that grows",
        setting="training.batch_ramp.ramp_samples=N",
        active=lambda config: config.training.batch_ramp.ramp_samples is not None,
        value=_text_of("training.batch_ramp.ramp_samples"),
        example={
            "training": {"batch_ramp": {"start_num_microbatches": 4, "increment": 2, "ramp_samples": 1}}
        },
    ),
    Feature(
        key="documents",
        title="batches of documents under a budget of tokens",
        setting="data.batching=documents",
        active=lambda config: config.data.batching == "documents",
        value=_text_of("data.batching"),
        example={"data": {"batching": "documents", "tokens_per_step": 2048}},
    ),
    Feature(
        key="tied_embeddings",
        title="tied embeddings",
        setting="model.tie_embeddings=true",
        active=lambda config: config.model.tie_embeddings,
        value=_text_of("model.tie_embeddings"),
        example={"model": {"tie_embeddings": True}},
    ),
    Feature(
        key="deepspeed_engine",
        title="the DeepSpeed engine",
        setting="zero.engine=deepspeed",
        active=lambda config: config.zero.engine == "deepspeed",
        value=_text_of("zero.engine"),
        example={"zero": {"engine": "deepspeed", "stage": 1}},
    ),
    Feature(
        key="onebit_adam",
        title="DeepSpeed's 1-bit Adam",
        setting="optimizer.name=onebit_adam",
        active=lambda config: config.optimizer.name == "onebit_adam",
        value=_text_of("optimizer.name"),
        example={"optimizer": {"name": "onebit_adam"}},
    ),
    Feature(
        key="checkpoints",
        title="checkpoints",
        setting="checkpoint=default",
        active=lambda config: config.checkpoint.enabled or config.checkpoint.resume is not None,
        value=lambda config: _text_of(
            "checkpoint.enabled" if config.checkpoint.enabled else "checkpoint.resume"
        )(config),
        example={"checkpoint": {"enabled": True}},
    ),
    Feature(
        key="host_parameters",
        title="parameters on the host",
        setting="zero.offload_parameters=true",
        active=lambda config: config.zero.offload_parameters,
        value=_text_of("zero.offload_parameters"),
        example={
            "zero": {"stage": 3, "offload_parameters": True},
            "optimizer": {"offload": {"tier": "host"}},
        },
    ),
    Feature(
        key="host_states",
        title="optimizer on the host",
        setting="optimizer.offload.tier=host",
        active=lambda config: config.optimizer.offload.tier == "host",
        value=_text_of("optimizer.offload.tier"),
        example={"optimizer": {"offload": {"tier": "host"}}},
    ),
    Feature(
        key="disk_states",
        title="moments on disk",
        setting="optimizer.offload.tier=disk",
        active=lambda config: config.optimizer.offload.tier == "disk",
        value=_text_of("optimizer.offload.tier"),
        example={"optimizer": {"offload": {"tier": "disk"}}},
    ),
    Feature(
        key="cpu_adam",
        title="DeepSpeed's CPUAdam",
        setting="optimizer=cpu_adam",
        active=lambda config: config.optimizer.kernel == "cpu_adam",
        value=_text_of("optimizer.kernel"),
        example={"optimizer": {"kernel": "cpu_adam", "offload": {"tier": "host"}}},
    ),
)


def active_features(config: TrainConfig) -> tuple[Feature, ...]:
    """The features that `config` uses, in the order of `FEATURES`."""
    return tuple(feature for feature in FEATURES if feature.active(config))
