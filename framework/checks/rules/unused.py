"""Settings that another setting switches off: what is set there and would do nothing is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from operator import attrgetter

from counterflow.framework.checks.rules.rule import Finding, Nodes, Rule
from counterflow.framework.config.mapping import dotted_names
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.planning.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """`settings` (full names of values, or of nodes whose values are meant) do nothing unless `counts` holds.

    needs: what the user sets for them to count, as config text. example: a config in which all of them are set.
    """

    settings: tuple[str, ...]
    counts: Callable[[TrainConfig], bool]
    needs: str
    example: Nodes


_EXPERTS_OVER_RANKS = {
    "model": {"moe": {"num_experts": 4}},
    "parallel": {"data_parallel_size": 2, "expert_parallel_size": 2},
}

DEPENDENCES: tuple[Dependence, ...] = (
    Dependence(
        settings=("precision.loss_scale",),
        counts=lambda config: config.precision.compute == "fp16",
        needs="precision=fp16",
        example={"precision": {"loss_scale": {"initial_scale": 1024.0}}},
    ),
    Dependence(
        settings=("optimizer.lr_schedule.decay_steps",),
        counts=lambda config: config.optimizer.lr_schedule.name == "wsd",
        needs="optimizer.lr_schedule.name=wsd",
        example={"optimizer": {"lr_schedule": {"decay_steps": 5}}},
    ),
    Dependence(
        settings=("optimizer.lr_schedule.min_ratio",),
        counts=lambda config: config.optimizer.lr_schedule.name != "constant",
        needs="optimizer.lr_schedule.name=cosine or wsd",
        example={"optimizer": {"lr_schedule": {"name": "constant", "min_ratio": 0.5}}},
    ),
    Dependence(
        settings=("balance.policy", "balance.goal", "balance.max_swaps"),
        counts=lambda config: config.balance.interval_steps > 0,
        needs="balance.interval_steps=N",
        example={"balance": {"policy": "pack", "goal": 1.5, "max_swaps": 2}},
    ),
    Dependence(
        settings=("balance.num_nodes",),
        counts=lambda config: config.balance.interval_steps > 0 or config.balance.num_redundant_experts > 0,
        needs="balance.interval_steps=N or balance.num_redundant_experts=N",
        example={**_EXPERTS_OVER_RANKS, "balance": {"num_nodes": 2}},
    ),
    Dependence(
        settings=("compression.block_size", "compression.error_feedback", "compression.warmup_steps"),
        counts=lambda config: config.compression.method != "none",
        needs="compression=NAME",
        example={"compression": {"block_size": 64, "error_feedback": False, "warmup_steps": 3}},
    ),
    Dependence(
        settings=("compression.density",),
        counts=lambda config: config.compression.method == "topk",
        needs="compression=topk",
        example={"compression": {"method": "int8", "density": 0.1}},
    ),
    Dependence(
        settings=("compression.rank",),
        counts=lambda config: config.compression.method == "powersgd",
        needs="compression=powersgd",
        example={"compression": {"method": "int8", "rank": 2}},
    ),
    Dependence(
        settings=("compression.weights_block_size",),
        counts=lambda config: config.compression.weights != "none",
        needs="compression.weights=NAME",
        example={"compression": {"weights_block_size": 64}},
    ),
    Dependence(
        settings=("offload.tier", "offload.min_bytes", "offload.folder", "offload.copy_bytes_per_s"),
        counts=lambda config: config.offload.is_active,
        needs="offload=NAME with a budget",
        example={"offload": {"tier": "disk", "min_bytes": 1, "folder": "x", "copy_bytes_per_s": 1e9}},
    ),
    Dependence(
        settings=("optimizer.offload.resident_bytes",),
        counts=lambda config: config.optimizer.offload.tier == "disk",
        needs="optimizer.offload.tier=disk",
        example={"optimizer": {"offload": {"resident_bytes": 8192}}},
    ),
    Dependence(
        settings=("skip_step.window_steps", "skip_step.min_steps"),
        counts=lambda config: (
            config.skip_step.max_loss_z is not None or config.skip_step.max_norm_z is not None
        ),
        needs="skip_step.max_loss_z or skip_step.max_norm_z",
        example={"skip_step": {"skip_non_finite": True, "window_steps": 50, "min_steps": 10}},
    ),
    Dependence(
        settings=("skip_step.max_consecutive", "skip_step.max_total"),
        counts=lambda config: config.skip_step.are_on,
        needs="skip_step=skip",
        example={"skip_step": {"max_consecutive": 2, "max_total": 7}},
    ),
    Dependence(
        settings=("zero.units",),
        counts=lambda config: config.zero.stage >= 2 or config.zero.engine == "deepspeed",
        needs="zero.stage=2 or 3",
        example={"zero": {"stage": 1, "units": "stage"}},
    ),
    Dependence(
        settings=("zero.prefetch_units",),
        counts=lambda config: (
            (config.zero.stage == 3 and config.zero.units == "block") or config.zero.engine == "deepspeed"
        ),
        needs="zero.stage=3 with zero.units=block",
        example={"zero": {"stage": 2, "prefetch_units": 2}},
    ),
    Dependence(
        settings=("zero.reshard_after",),
        counts=lambda config: config.zero.stage == 3 or config.zero.engine == "deepspeed",
        needs="zero.stage=3",
        example={"zero": {"stage": 2, "reshard_after": "step"}},
    ),
    Dependence(
        settings=("training.batch_ramp.increment",),
        counts=lambda config: config.training.batch_ramp.ramp_samples is not None,
        needs="training.batch_ramp.ramp_samples=N and start_num_microbatches=N",
        example={"training": {"batch_ramp": {"increment": 2}}},
    ),
    Dependence(
        settings=("schedule.search_seed",),
        counts=lambda config: config.schedule.name == "auto",
        needs="schedule=auto",
        example={"schedule": {"search_seed": 3}},
    ),
    Dependence(
        settings=("comm.expert_payload",),
        counts=lambda config: config.parallel.expert_parallel_size > 1,
        needs="parallel.expert_parallel_size=N",
        example={"comm": {"expert_payload": "bf16"}},
    ),
    Dependence(
        settings=("comm.pipeline_payload",),
        counts=lambda config: config.parallel.pipeline_parallel_size > 1,
        needs="parallel.pipeline_parallel_size=N",
        example={"comm": {"pipeline_payload": "bf16"}},
    ),
)


@cache
def _values(setting: str) -> tuple[str, ...]:
    """The full names of the values at or below `setting`."""
    names = dotted_names(TrainConfig)
    below = (name for name in names if name == setting or name.startswith(f"{setting}."))
    return tuple(name for name in below if not is_dataclass(attrgetter(name)(TrainConfig())))


def _rule_of(row: Dependence) -> Rule:
    def find(workload: Workload) -> Iterator[Finding]:
        if row.counts(workload.config):
            return
        for name in (name for setting in row.settings for name in _values(setting)):
            value: object = attrgetter(name)(workload.config)
            if value != attrgetter(name)(TrainConfig()):
                yield Finding(
                    value=f"{name}={value} does nothing",
                    reason=f"it needs {row.needs}",
                    remedy=f"set that, or leave {name} out",
                )

    return Rule(name=f"unused: {', '.join(row.settings)}", find=find, example=row.example, severity="warn")


def _warm_up(workload: Workload) -> Iterator[Finding]:
    config = workload.config
    if config.never_compresses:
        yield Finding(
            value=f"compression.method={config.compression.method}",
            reason=f"no gradient is compressed, for compression.warmup_steps={config.compression.warmup_steps} are "
            f"all of training.num_steps={config.training.num_steps}",
            remedy="lower the first or train longer",
        )


RULES = (
    *map(_rule_of, DEPENDENCES),
    Rule(
        name="unused: compression that the warm-up outlasts",
        find=_warm_up,
        example={"compression": {"method": "int8", "warmup_steps": 10}, "training": {"num_steps": 10}},
        severity="warn",
    ),
)
