"""The one table of what composes with what: read by the config check and rendered for the docs.

A pair of features that no row of `REFUSALS` names composes, and a parity test against one process stands for it.
A feature that is refused altogether is a row of the feature with itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from counterflow.framework.config.features import FEATURES, Feature, active_features

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`first` and `second` (keys of features) are refused together."""

    first: str
    second: str
    reason: str
    remedy: str


def _engine_refuses(second: str, reason: str, remedy: str) -> Refusal:
    return Refusal(
        first="deepspeed_engine",
        second=second,
        reason=reason,
        remedy=f"{remedy}, or zero.engine=native, which has it",
    )


REFUSALS: tuple[Refusal, ...] = (
    _engine_refuses(
        "pipeline_parallel",
        "its ZeRO-2 and 3 reduce and free by hooks of a whole backward, which the schedules split and interleave, and "
        "its own pipeline engine takes neither them nor our stages",
        "set parallel.pipeline_parallel_size=1",
    ),
    _engine_refuses(
        "not_1f1b",
        "at stage 3 it gives wrong gradients where several forwards are under way, and it does not split a backward",
        "set schedule=1f1b",
    ),
    _engine_refuses(
        "offload",
        "it gathers and frees parameters in memory of its own, which could not be told from activations",
        "set offload.policy=none",
    ),
    _engine_refuses(
        "experts",
        "it reduces every parameter over all data-parallel ranks, and experts have fewer replicas",
        "choose a model without experts",
    ),
    _engine_refuses(
        "mtp", "MTP modules run in the loss, outside of the forward it sees", "set model.mtp.num_modules=0"
    ),
    _engine_refuses(
        "chunked_loss",
        "the head runs in the loss, outside of the forward it sees",
        "set loss.chunk_tokens=null",
    ),
    _engine_refuses(
        "compression", "it reduces by itself and offers no place for ours", "set compression=none"
    ),
    _engine_refuses("quantised_weights", "it gathers by itself", "set compression.weights=none"),
    _engine_refuses("post_validation", "its step waits for the norm", "set optimizer.post_validation=false"),
    _engine_refuses("fp16", "its loss scaler is not the one of the records", "set precision=bf16"),
    _engine_refuses("fp8", "it has parameters in one precision", "set precision.linear=compute"),
    _engine_refuses("bf16_reduce", "its sums are set to fp32", "set precision.reduce=fp32"),
    _engine_refuses("bf16_states", "it keeps the moments", "set precision.optimizer_states=fp32"),
    _engine_refuses(
        "skip_step", "from stage 1 on it has updated by the time the norm is known", "set skip_step=none"
    ),
    _engine_refuses(
        "checkpoints", "masters and moments are flat partitions of its own", "set checkpoint=none"
    ),
    _engine_refuses("host_parameters", "it keeps the shards", "set zero.offload_parameters=false"),
    _engine_refuses("host_states", "it keeps masters and moments", "set optimizer.offload.tier=none"),
    _engine_refuses("disk_states", "it keeps masters and moments", "set optimizer.offload.tier=none"),
    _engine_refuses("cpu_adam", "it is given torch's AdamW", "set optimizer=adamw"),
    Refusal(
        first="onebit_adam",
        second="onebit_adam",
        reason="DeepSpeed has it no more (not in 0.19.8), and the backends of older ones were NCCL and MPI, not gloo",
        remedy="set optimizer=adamw and, for gradients of one bit, compression=onebit",
    ),
    Refusal(
        first="disk_states",
        second="post_validation",
        reason="copies of all moments would be in memory, to undo a step",
        remedy="set optimizer.post_validation=false, or optimizer.offload.tier=none",
    ),
    Refusal(
        first="disk_states",
        second="bf16_states",
        reason="the noise of the rounding is drawn for whole fragments, and from disk they come in parts",
        remedy="set precision.optimizer_states=fp32, or optimizer.offload.tier=none",
    ),
    Refusal(
        first="cpu_adam",
        second="bf16_states",
        reason="it updates moments in fp32",
        remedy="set precision.optimizer_states=fp32, or optimizer=adamw",
    ),
    Refusal(
        first="bf16_reduce",
        second="compression",
        reason="what is compressed is not sent as bf16",
        remedy="set precision.reduce=fp32, or compression=none",
    ),
    Refusal(
        first="bf16_reduce",
        second="copies",
        reason="copies stay equal only if their gradients are summed in one order, which is done in fp32",
        remedy="set precision.reduce=fp32, or balance.num_redundant_experts=0",
    ),
    Refusal(
        first="bf16_states",
        second="copies",
        reason="the noise of the rounding differs between the slots of an expert, and its copies would differ",
        remedy="set precision.optimizer_states=fp32, or balance.num_redundant_experts=0",
    ),
    Refusal(
        first="context_parallel",
        second="context_parallel",
        reason="attention does not cut a sequence over ranks yet",
        remedy="set parallel.context_parallel_size=1 and give those ranks to data_parallel_size or "
        "tensor_parallel_size",
    ),
    Refusal(
        first="documents",
        second="experts",
        reason="padding would be sent to experts and counted as load",
        remedy="set data.batching=windows, or take a model without experts",
    ),
    Refusal(
        first="documents",
        second="mtp",
        reason="further predictions would reach into padding",
        remedy="set data.batching=windows, or model.mtp.num_modules=0",
    ),
    Refusal(
        first="documents",
        second="batch_ramp",
        reason="the budget says how large a step is, not a number of micro-batches",
        remedy="set data.batching=windows, or training.batch_ramp.ramp_samples=null and "
        "training.batch_ramp.start_num_microbatches=null",
    ),
    Refusal(
        first="documents",
        second="csv",
        reason="steps differ in their number of micro-batches, and a file has one",
        remedy="set data.batching=windows, or take a schedule by its name",
    ),
    Refusal(
        first="copies",
        second="compression",
        reason="copies are in other places of their blocks, so compression would round their gradients otherwise",
        remedy="set balance.num_redundant_experts=0, or compression=none",
    ),
    Refusal(
        first="copies",
        second="quantised_weights",
        reason="copies are in other places of their blocks, so they would not be rounded to the same values",
        remedy="set balance.num_redundant_experts=0, or compression.weights=none",
    ),
)


def refused(config: TrainConfig, refusals: Iterable[Refusal] = REFUSALS) -> list[str]:
    """One sentence for each row that refuses what `config` combines: values, reason and remedy."""
    active = {feature.key: feature for feature in active_features(config)}
    problems: list[str] = []
    for refusal in refusals:
        if refusal.first not in active or refusal.second not in active:
            continue
        values = dict.fromkeys(active[key].value(config) for key in (refusal.first, refusal.second))
        rule = (
            f"{active[refusal.first].title} is not supported"
            if refusal.first == refusal.second
            else f"{active[refusal.first].title} does not compose with {active[refusal.second].title}"
        )
        problems.append(f"{' with '.join(values)}: {rule}: {refusal.reason}; {refusal.remedy}")
    return problems


def to_markdown(features: Iterable[Feature] = FEATURES, refusals: Iterable[Refusal] = REFUSALS) -> str:
    """Two tables for the docs: each feature with its switch and what it does not compose with; why, and what to do."""
    features, refusals = tuple(features), tuple(refusals)
    titles = {feature.key: feature.title for feature in features}
    lines = ["| Feature | Switched on by | Composes with |", "| --- | --- | --- |"]
    for feature in features:
        rows = [refusal for refusal in refusals if feature.key in (refusal.first, refusal.second)]
        others = [titles[row.second if row.first == feature.key else row.first] for row in rows]
        if feature.title in others:
            verdict = "refused"
        else:
            verdict = f"all but {', '.join(others)}" if others else "all"
        lines.append(f"| {feature.title} | `{feature.setting}` | {verdict} |")
    lines += ["", "| Refused | Because | Instead |", "| --- | --- | --- |"]
    for row in refusals:
        both = dict.fromkeys(titles[key] for key in (row.first, row.second))
        lines.append(f"| {' with '.join(both)} | {row.reason} | {row.remedy} |")
    return "\n".join(lines) + "\n"
