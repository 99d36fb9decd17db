"""The one table of settings that another setting switches off: what is set there and would do nothing is said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from operator import attrgetter

from counterflow.framework.config.mapping import dotted_names
from counterflow.framework.config.tree import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """`settings` (full names of values, or of nodes whose values are meant) do nothing unless `counts` holds.

    needs: what the user sets for them to count, as config text.
    """

    settings: tuple[str, ...]
    counts: Callable[[TrainConfig], bool]
    needs: str


DEPENDENCES: tuple[Dependence, ...] = (
    Dependence(
        settings=("precision.loss_scale",),
        counts=lambda config: config.precision.compute == "fp16",
        needs="precision=fp16",
    ),
    Dependence(
        settings=("optimizer.lr_schedule.decay_steps",),
        counts=lambda config: config.optimizer.lr_schedule.name == "wsd",
        needs="optimizer.lr_schedule.name=wsd",
    ),
    Dependence(
        settings=("optimizer.lr_schedule.min_ratio",),
        counts=lambda config: config.optimizer.lr_schedule.name != "constant",
        needs="optimizer.lr_schedule.name=cosine or wsd",
    ),
    Dependence(
        settings=("balance.policy", "balance.goal", "balance.max_swaps"),
        counts=lambda config: config.balance.interval_steps > 0,
        needs="balance.interval_steps=N",
    ),
    Dependence(
        settings=("balance.num_nodes",),
        counts=lambda config: config.balance.interval_steps > 0 or config.balance.num_redundant_experts > 0,
        needs="balance.interval_steps=N or balance.num_redundant_experts=N",
    ),
    Dependence(
        settings=("compression.block_size", "compression.error_feedback", "compression.warmup_steps"),
        counts=lambda config: config.compression.method != "none",
        needs="compression=NAME",
    ),
    Dependence(
        settings=("compression.density",),
        counts=lambda config: config.compression.method == "topk",
        needs="compression=topk",
    ),
    Dependence(
        settings=("compression.rank",),
        counts=lambda config: config.compression.method == "powersgd",
        needs="compression=powersgd",
    ),
    Dependence(
        settings=("compression.weights_block_size",),
        counts=lambda config: config.compression.weights != "none",
        needs="compression.weights=NAME",
    ),
    Dependence(
        settings=("offload.tier", "offload.min_bytes", "offload.folder", "offload.copy_bytes_per_s"),
        counts=lambda config: config.offload.is_active,
        needs="offload=NAME with a budget",
    ),
    Dependence(
        settings=("optimizer.offload.resident_bytes",),
        counts=lambda config: config.optimizer.offload.tier == "disk",
        needs="optimizer.offload.tier=disk",
    ),
    Dependence(
        settings=("skip_step.window_steps", "skip_step.min_steps"),
        counts=lambda config: (
            config.skip_step.max_loss_z is not None or config.skip_step.max_norm_z is not None
        ),
        needs="skip_step.max_loss_z or skip_step.max_norm_z",
    ),
    Dependence(
        settings=("skip_step.max_consecutive", "skip_step.max_total"),
        counts=lambda config: config.skip_step.are_on,
        needs="skip_step=skip",
    ),
)


def without_effect(config: TrainConfig, dependences: Iterable[Dependence] = DEPENDENCES) -> list[str]:
    """One sentence for each value of `config` that is not its default and does nothing."""
    default, names = TrainConfig(), dotted_names(TrainConfig)
    found: list[str] = []
    for each in dependences:
        if each.counts(config):
            continue
        for setting in each.settings:
            for name in (key for key in names if key == setting or key.startswith(f"{setting}.")):
                value: object = attrgetter(name)(config)
                if not is_dataclass(value) and value != attrgetter(name)(default):
                    found.append(f"{name}={value} does nothing: it needs {each.needs}")
    return list(dict.fromkeys(found))
