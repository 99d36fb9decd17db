"""`counterflow bench deepspeed`: DeepSpeed's engine and our own sharding train the same model, step by step in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import seed_everything
from counterflow.framework.trainer.step import evaluate, train_step

# The bound for fp32, over all steps, as a plain difference of losses of about ln(vocabulary).
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """Of every step: the loss, the norm before clipping and seconds; and the validation loss after the last."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    step_s: tuple[float, ...]
    validation_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One stage of ZeRO."""

    stage: int
    native: EngineRun
    deepspeed: EngineRun

    @property
    def loss_difference(self) -> float:
        """The largest over the steps."""
        return max(abs(one - other) for one, other in zip(self.native.loss, self.deepspeed.loss, strict=True))

    @property
    def norm_difference(self) -> float:
        """The largest over the steps, relative."""
        pairs = zip(self.native.grad_norm, self.deepspeed.grad_norm, strict=True)
        return max(abs(one - other) / one for one, other in pairs)

    @property
    def holds(self) -> bool:
        return self.loss_difference <= LOSS_TOLERANCE

    @property
    def time_ratio(self) -> float:
        """DeepSpeed's step time over ours: the median over the pairs of steps but the first."""
        pairs = zip(self.deepspeed.step_s[1:], self.native.step_s[1:], strict=True)
        return statistics.median(one / other for one, other in pairs)


def compare_engines(
    config: TrainConfig,
    data: PreparedData,
    stages: Sequence[int],
    report: Callable[[EngineRow], None] | None = None,
) -> list[EngineRow]:
    """Train `config.training.num_steps` steps with both engines at each of `stages`; every rank calls this.

    config: checked with zero.engine=deepspeed. All ranks get the rows.
    """
    rows: list[EngineRow] = []
    for stage in stages:
        assemblies: dict[str, Assembly] = {}
        for engine in ("native", "deepspeed"):
            zero = replace(config.zero, stage=stage, engine=engine)
            seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
            assemblies[engine] = build(replace(config, zero=zero), data, torch.device("cpu"))
        runs = _train(assemblies, config.training.num_steps)
        row = EngineRow(stage=stage, native=runs["native"], deepspeed=runs["deepspeed"])
        for assembly in assemblies.values():
            assembly.close()
        rows.append(row)
        if report is not None and dist.get_rank() == 0:
            report(row)
    return rows


def _train(assemblies: dict[str, Assembly], num_steps: int) -> dict[str, EngineRun]:
    steps: dict[str, list[tuple[float, float, float]]] = {engine: [] for engine in assemblies}
    for step in range(num_steps):
        for engine, assembly in assemblies.items():
            outcome = train_step(assembly, step)
            loss = sum(rank.loss for rank in outcome.ranks)
            step_s = max(rank.step_s for rank in outcome.ranks)
            steps[engine].append((loss, outcome.verdict.grad_norm, step_s))
    runs: dict[str, EngineRun] = {}
    for engine, assembly in assemblies.items():
        losses, norms, seconds = zip(*steps[engine], strict=True)
        runs[engine] = EngineRun(
            loss=losses, grad_norm=norms, step_s=seconds, validation_loss=evaluate(assembly)
        )
    return runs
