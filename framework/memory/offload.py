"""What a run offloads: the config's budget in bytes, the schedule with what leaves and comes back, who moves it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterflow.framework.memory.recompute import peak_activation_bytes, unit_bytes
from counterflow.models.recompute import Plan
from counterflow.parallel.offload.plan import add_offload, least_budget_bytes
from counterflow.parallel.pipeline.analysis.copy_timing import CopyModel
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.ir.offload_sizes import UnitBytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from counterflow.framework.config.tree import TrainConfig
    from counterflow.parallel.offload.offloader import Offloader

# What is planned with is larger than the cost model's figure by this share: it leaves out tables and small tensors.
MARGIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBudget:
    """budget_bytes: what a rank may hold. sizes: by stage, the bytes of one micro-batch that moves are planned with."""

    budget_bytes: int
    sizes: tuple[UnitBytes, ...]


def activation_budget(
    config: TrainConfig, schedule: Schedule, plan: Plan, *, vocab_size: int, on_cpu: bool
) -> ActivationBudget:
    """The bytes of activations that a rank may hold. schedule: lowered, of a step of the full batch."""
    offload = config.offload
    budget = offload.budget_bytes
    if offload.budget_share is not None:
        peaks = peak_activation_bytes(config, schedule, plan, vocab_size=vocab_size, on_cpu=on_cpu)
        budget = math.floor(offload.budget_share * max(peaks))
    assert budget is not None, "offloading is active where there is a budget"
    sizes = tuple(
        UnitBytes(kept=math.ceil((1 + MARGIN) * size.kept), most=math.ceil((1 + MARGIN) * size.most))
        for size in unit_bytes(config, schedule, plan, vocab_size=vocab_size, on_cpu=on_cpu)
    )
    return ActivationBudget(budget_bytes=budget, sizes=sizes)


def offloaded(config: TrainConfig, schedule: Schedule, budget: ActivationBudget | None) -> Schedule:
    """The lowered `schedule` with OFFLOAD and RELOAD; itself where everything stays (`budget` is None).

    Raises ValueError: where a rank cannot keep within the budget.
    """
    if budget is None or config.offload.policy == "none":
        return schedule
    least = least_budget_bytes(schedule, budget.sizes)
    if least > budget.budget_bytes:
        raise ValueError(too_small(config, budget.budget_bytes, least))
    return add_offload(schedule, budget.sizes, budget_bytes=budget.budget_bytes, policy=config.offload.policy)


def too_small(config: TrainConfig, budget: int, least: int, step: str = "") -> str:
    """What is said where a rank needs `least` bytes. step: in which, as `in a step of 4 micro-batches `."""
    share = config.offload.budget_share
    if share is None:
        given, least_given = f"budget_bytes={budget}", f"budget_bytes={least}"
    else:
        least_share = math.ceil(1e3 * share * least / budget) / 1e3
        given = f"budget_share={share:g} ({budget} bytes)"
        least_given = f"budget_share={least_share:g}" if least_share <= 1 else "policy=none"
    return (
        f"offload.{given}: {step}a rank needs {least} bytes of activations for what it works on at once, whatever "
        f"leaves; set offload.{least_given}{'' if least_given == 'policy=none' else ' or more'}, or lower "
        "data.micro_batch_size or data.seq_length, or take a schedule with more micro-batches under way"
    )


def copy_model(config: TrainConfig, budget: ActivationBudget | None) -> CopyModel | None:
    """What a simulation of an offloaded schedule counts copies with; None: everything stays."""
    if budget is None:
        return None
    return CopyModel(
        sizes=budget.sizes, budget_bytes=budget.budget_bytes, bytes_per_s=config.offload.copy_bytes_per_s
    )


def offloader_for(
    config: TrainConfig,
    budget: ActivationBudget | None,
    modules: Mapping[int, nn.Module],
    *,
    device: torch.device,
) -> Offloader | None:
    """What moves the activations of this rank's stages; None: they stay.

    Raises OSError: where offload.folder takes no file.
    """
    from counterflow.parallel.offload.offloader import Offloader
    from counterflow.parallel.offload.tier import DiskTier, HostTier

    if budget is None:
        return None
    offload = config.offload
    is_disk = offload.tier == "disk"
    folder = Path(offload.folder or config.launcher.runs_dir)
    return Offloader(
        DiskTier(folder) if is_disk else HostTier(pinned=device.type != "cpu"),
        device=device,
        budget_bytes=budget.budget_bytes,
        min_bytes=offload.min_bytes,
        unit_bytes={stage: budget.sizes[stage].kept for stage in modules},
        stay=[tensor for module in modules.values() for tensor in (*module.parameters(), *module.buffers())],
        bytes_per_s=offload.copy_bytes_per_s,
    )
