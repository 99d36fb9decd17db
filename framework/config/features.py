"""What a run may use, each with how it is switched on: the rows and columns of the table in compositions.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from counterflow.parallel.pipeline.schedules.registry import all_schedules

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something a run may use.

    setting: the config text that switches it on, as a user writes it. value: the config text in force.
    """

    key: str
    title: str
    setting: str
    active: Callable[[TrainConfig], bool]
    value: Callable[[TrainConfig], str]


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
    )


def _axis(key: str, title: str) -> Feature:
    return Feature(
        key=key,
        title=title,
        setting=f"parallel.{key}_size > 1",
        active=lambda config: getattr(config.parallel, f"{key}_size") > 1,
        value=_text_of(f"parallel.{key}_size"),
    )


def _zero(stage: int, title: str) -> Feature:
    return Feature(
        key=f"zero_{stage}",
        title=title,
        setting=f"zero.stage={stage}",
        active=lambda config: config.zero.stage == stage,
        value=_text_of("zero.stage"),
    )


def _skip_step_text(config: TrainConfig) -> str:
    skip_step = config.skip_step
    if skip_step.skip_non_finite:
        return "skip_step.skip_non_finite=true"
    name = "max_loss_z" if skip_step.max_loss_z is not None else "max_norm_z"
    return f"skip_step.{name}={getattr(skip_step, name)}"


FEATURES: tuple[Feature, ...] = (
    _axis("tensor_parallel", "tensor parallelism"),
    Feature(
        key="sequence_parallel",
        title="sequence parallelism",
        setting="parallel.sequence_parallel=true",
        active=lambda config: config.parallel.sequence_parallel and config.parallel.tensor_parallel_size > 1,
        value=_text_of("parallel.sequence_parallel"),
    ),
    _axis("pipeline_parallel", "pipeline parallelism"),
    _axis("data_parallel", "data parallelism"),
    _axis("context_parallel", "context parallelism"),
    _axis("expert_parallel", "expert parallelism"),
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
    ),
    Feature(
        key="fp16",
        title="fp16 and loss scaling",
        setting="precision=fp16",
        active=lambda config: config.precision.compute == "fp16",
        value=_text_of("precision.compute"),
    ),
    Feature(
        key="bf16_reduce",
        title="gradients summed in bf16",
        setting="precision.reduce=bf16",
        active=lambda config: config.precision.reduce == "bf16",
        value=_text_of("precision.reduce"),
    ),
    Feature(
        key="bf16_states",
        title="bf16 moments, rounded stochastically",
        setting="precision.optimizer_states=bf16",
        active=lambda config: config.precision.optimizer_states == "bf16",
        value=_text_of("precision.optimizer_states"),
    ),
    Feature(
        key="fp8",
        title="linear layers in fp8",
        setting="precision.linear=fp8",
        active=lambda config: config.precision.linear == "fp8",
        value=_text_of("precision.linear"),
    ),
    Feature(
        key="skip_step",
        title="skipping bad steps",
        setting="skip_step=skip",
        active=lambda config: config.skip_step.are_on,
        value=_skip_step_text,
    ),
    Feature(
        key="compression",
        title="compressed gradients",
        setting="compression=onebit",
        active=lambda config: config.compression.method != "none",
        value=_text_of("compression.method"),
    ),
    Feature(
        key="quantised_weights",
        title="quantised gathers of weights",
        setting="compression.weights=int8",
        active=lambda config: config.compression.weights != "none",
        value=_text_of("compression.weights"),
    ),
    Feature(
        key="pipeline_payload",
        title="rounded transfers between stages",
        setting="comm.pipeline_payload=fp8",
        active=lambda config: config.comm.pipeline_payload != "compute",
        value=_text_of("comm.pipeline_payload"),
    ),
    Feature(
        key="chunked_loss",
        title="the loss in chunks of tokens",
        setting="loss.chunk_tokens=N",
        active=lambda config: config.loss.chunk_tokens is not None,
        value=_text_of("loss.chunk_tokens"),
    ),
    Feature(
        key="recomputation",
        title="recomputation",
        setting="recompute.mode=full",
        active=lambda config: config.recompute.mode != "none",
        value=_text_of("recompute.mode"),
    ),
    Feature(
        key="offload",
        title="activation offloading",
        setting="offload=schedule",
        active=lambda config: config.offload.is_active,
        value=_text_of("offload.policy"),
    ),
    Feature(
        key="experts",
        title="mixture of experts",
        setting="model.moe.num_experts > 0",
        active=lambda config: config.model.moe.num_experts > 0,
        value=_text_of("model.moe.num_experts"),
    ),
    Feature(
        key="balance",
        title="experts that move",
        setting="balance.interval_steps > 0",
        active=lambda config: config.balance.interval_steps > 0,
        value=_text_of("balance.interval_steps"),
    ),
    Feature(
        key="copies",
        title="copies of experts",
        setting="balance.num_redundant_experts > 0",
        active=lambda config: config.balance.num_redundant_experts > 0,
        value=_text_of("balance.num_redundant_experts"),
    ),
    Feature(
        key="mtp",
        title="multi-token prediction",
        setting="model.mtp.num_modules > 0",
        active=lambda config: config.model.mtp.num_modules > 0,
        value=_text_of("model.mtp.num_modules"),
    ),
    Feature(
        key="mla",
        title="latent attention",
        setting="model.mla.kv_lora_rank > 0",
        active=lambda config: config.model.uses_mla,
        value=_text_of("model.mla.kv_lora_rank"),
    ),
    Feature(
        key="post_validation",
        title="steps that do not wait for the norm",
        setting="optimizer.post_validation=true",
        active=lambda config: config.optimizer.post_validation,
        value=_text_of("optimizer.post_validation"),
    ),
    Feature(
        key="batch_ramp",
        title="a batch that grows",
        setting="training.batch_ramp.ramp_samples=N",
        active=lambda config: config.training.batch_ramp.ramp_samples is not None,
        value=_text_of("training.batch_ramp.ramp_samples"),
    ),
    Feature(
        key="documents",
        title="batches of documents under a budget of tokens",
        setting="data.batching=documents",
        active=lambda config: config.data.batching == "documents",
        value=_text_of("data.batching"),
    ),
    Feature(
        key="tied_embeddings",
        title="tied embeddings",
        setting="model.tie_embeddings=true",
        active=lambda config: config.model.tie_embeddings,
        value=_text_of("model.tie_embeddings"),
    ),
    Feature(
        key="deepspeed_engine",
        title="the DeepSpeed engine",
        setting="zero.engine=deepspeed",
        active=lambda config: config.zero.engine == "deepspeed",
        value=_text_of("zero.engine"),
    ),
    Feature(
        key="onebit_adam",
        title="DeepSpeed's 1-bit Adam",
        setting="optimizer.name=onebit_adam",
        active=lambda config: config.optimizer.name == "onebit_adam",
        value=_text_of("optimizer.name"),
    ),
    Feature(
        key="not_1f1b",
        title="any schedule but 1F1B",
        setting="schedule=NAME",
        active=lambda config: config.schedule.name != "1f1b",
        value=_text_of("schedule.name"),
    ),
    Feature(
        key="checkpoints",
        title="checkpoints",
        setting="checkpoint=default",
        active=lambda config: config.checkpoint.enabled or config.checkpoint.resume is not None,
        value=lambda config: _text_of(
            "checkpoint.enabled" if config.checkpoint.enabled else "checkpoint.resume"
        )(config),
    ),
    Feature(
        key="host_parameters",
        title="parameters on the host",
        setting="zero.offload_parameters=true",
        active=lambda config: config.zero.offload_parameters,
        value=_text_of("zero.offload_parameters"),
    ),
    Feature(
        key="host_states",
        title="optimizer on the host",
        setting="optimizer.offload.tier=host",
        active=lambda config: config.optimizer.offload.tier == "host",
        value=_text_of("optimizer.offload.tier"),
    ),
    Feature(
        key="disk_states",
        title="moments on disk",
        setting="optimizer.offload.tier=disk",
        active=lambda config: config.optimizer.offload.tier == "disk",
        value=_text_of("optimizer.offload.tier"),
    ),
    Feature(
        key="cpu_adam",
        title="DeepSpeed's CPUAdam",
        setting="optimizer=cpu_adam",
        active=lambda config: config.optimizer.kernel == "cpu_adam",
        value=_text_of("optimizer.kernel"),
    ),
)


def active_features(config: TrainConfig) -> tuple[Feature, ...]:
    """The features that `config` uses, in the order of `FEATURES`."""
    return tuple(feature for feature in FEATURES if feature.active(config))
