"""The one table of what composes with what: read by the config check and rendered for the docs.

A pair of features that no row of `REFUSALS` names composes, and a parity test against one process stands for it.
A feature that is refused altogether is a row of the feature with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from framework.config import TrainConfig


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`first` and `second` (keys of features) are refused together."""

    first: str
    second: str
    reason: str
    remedy: str


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
    _schedule("naive", "naive schedule"),
    _schedule("gpipe", "GPipe"),
    _schedule("1f1b", "1F1B"),
    _schedule("interleaved_1f1b", "interleaved 1F1B"),
    _schedule("zb1p", "ZB-H1"),
    _schedule("zb_h2", "ZB-H2"),
    _schedule("zbv", "ZB-V"),
    _schedule("v_half", "V-Half"),
    _schedule("v_min", "V-Min"),
    _schedule("dualpipe", "DualPipe, two copies"),
    _schedule("dualpipe_v", "DualPipe in a V"),
    _schedule("auto", "a searched schedule"),
    _schedule("csv", "a schedule from a file"),
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
        key="compression",
        title="compressed gradients",
        setting="compression=onebit",
        active=lambda config: config.compression.method != "none",
        value=_text_of("compression.method"),
    ),
    Feature(
        key="recomputation",
        title="recomputation",
        setting="recompute.mode=full",
        active=lambda config: config.recompute.mode != "none",
        value=_text_of("recompute.mode"),
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
        key="tied_embeddings",
        title="tied embeddings",
        setting="model.tie_embeddings=true",
        active=lambda config: config.model.tie_embeddings,
        value=_text_of("model.tie_embeddings"),
    ),
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        first="context_parallel",
        second="context_parallel",
        reason="attention does not cut a sequence over ranks yet",
        remedy="set parallel.context_parallel_size=1 and give those ranks to data_parallel_size or "
        "tensor_parallel_size",
    ),
)


def active_features(config: TrainConfig) -> tuple[Feature, ...]:
    """The features that `config` uses, in the order of `FEATURES`."""
    return tuple(feature for feature in FEATURES if feature.active(config))


def refusal_of(first: str, second: str, refusals: Iterable[Refusal] = REFUSALS) -> Refusal | None:
    """The row that refuses the features with these keys together, in either order."""
    for refusal in refusals:
        if {refusal.first, refusal.second} == {first, second}:
            return refusal
    return None


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
    """The table for the docs: how each feature is switched on, and what it does not compose with."""
    features, refusals = tuple(features), tuple(refusals)
    titles = {feature.key: feature.title for feature in features}
    lines = ["| Feature | Switched on by | Composes with |", "| --- | --- | --- |"]
    for feature in features:
        rows = [refusal for refusal in refusals if feature.key in (refusal.first, refusal.second)]
        if any(refusal.first == refusal.second for refusal in rows):
            verdict = f"refused: {rows[0].reason}"
        elif rows:
            exceptions = "; ".join(
                f"{titles[row.second if row.first == feature.key else row.first]} ({row.reason})"
                for row in rows
            )
            verdict = f"everything but {exceptions}"
        else:
            verdict = "everything here that is not refused"
        lines.append(f"| {feature.title} | `{feature.setting}` | {verdict} |")
    return "\n".join(lines) + "\n"
