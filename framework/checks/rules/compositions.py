"""Which features do not compose: the rows of the table of rules that are about two features, or about one alone.

Features that no row of `REFUSALS` names compose, and a test against one process stands for each pair of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from counterflow.framework.checks.rules.rule import Finding, Nodes, Rule, merged
from counterflow.framework.config.features import FEATURES, Feature
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.planning.workload import Workload
from counterflow.parallel.pipeline.schedules.registry import all_schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What has to hold beside the features for them to be refused. text: as config text. example: the values of it."""

    text: str
    holds: Callable[[TrainConfig], bool]
    example: Nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`first` and `second` (keys of features) are refused together; `first` by itself where `second` is None.

    where: None: always.
    """

    first: str
    second: str | None = None
    where: Where | None = None
    reason: str
    remedy: str

    @property
    def features(self) -> tuple[Feature, ...]:
        """One or two."""
        return tuple(_FEATURES[key] for key in (self.first, self.second) if key is not None)

    @property
    def name(self) -> str:
        """As `fp16 with the DeepSpeed engine at zero.stage=0`."""
        where = "" if self.where is None else f" at {self.where.text}"
        return " with ".join(feature.title for feature in self.features) + where


_FEATURES = {feature.key: feature for feature in FEATURES}
_UNSHARDED = Where(
    text="zero.stage=0", holds=lambda config: config.zero.stage == 0, example={"zero": {"stage": 0}}
)


def _engine_refuses(second: str, reason: str, remedy: str, where: Where | None = None) -> Refusal:
    return Refusal(
        first="deepspeed_engine",
        second=second,
        where=where,
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
    *(
        _engine_refuses(
            schedule.name,
            "at stage 3 it gives wrong gradients where several forwards are under way, and it does not split a "
            "backward",
            "set schedule=1f1b",
        )
        for schedule in all_schedules().values()
        if not schedule.alternates
    ),
    _engine_refuses(
        "bf16",
        "there it wraps the optimizer in a loss scaler, and gradients are added up in bf16",
        "set zero.stage=1, or precision=fp32",
        where=_UNSHARDED,
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
    Refusal(
        first="quantised_weights",
        where=_UNSHARDED,
        reason="every rank updates all parameters and gathers none",
        remedy="set zero.stage to 1, 2 or 3, or compression.weights=none",
    ),
    Refusal(
        first="batch_ramp",
        second="csv",
        reason="steps differ in their number of micro-batches, and a file has one",
        remedy="set training.batch_ramp.ramp_samples=null and training.batch_ramp.start_num_microbatches=null, or take "
        "a schedule by its name",
    ),
)


def rule_of(refusal: Refusal) -> Rule:
    """The row as a rule."""

    def find(workload: Workload) -> Iterator[Finding]:
        config, where = workload.config, refusal.where
        if not all(feature.active(config) for feature in refusal.features):
            return
        if where is not None and not where.holds(config):
            return
        value = " with ".join(dict.fromkeys(feature.value(config) for feature in refusal.features))
        titles = [feature.title for feature in refusal.features]
        if len(titles) == 2:
            at = "" if where is None else f" at {where.text}"
            value += "" if where is None else f" and {where.text}"
            reason = f"{' does not compose with '.join(titles)}{at}: {refusal.reason}"
        elif where is None:
            reason = f"{titles[0]} is not supported: {refusal.reason}"
        else:
            reason = f"with {where.text} {refusal.reason}"
        yield Finding(value=value, reason=reason, remedy=refusal.remedy)

    # What is on by default and composes with less than the others do is off, unless the row is about it.
    example: Nodes = {"checkpoint": {"enabled": False}}
    for feature in refusal.features:
        example = merged(example, feature.example)
    if refusal.where is not None:
        example = merged(example, refusal.where.example)
    return Rule(name=refusal.name, find=find, example=example)


RULES = tuple(map(rule_of, REFUSALS))
