"""What a run offloads: the config's budget in bytes, the schedule with what leaves and comes back, who moves it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from framework.device_rules import device_kind
from framework.recompute import peak_activation_bytes, recompute_plan, unit_bytes
from parallel.offload.plan import add_offload, least_budget_bytes, without_offload
from parallel.offload.sizes import UnitBytes
from parallel.offload.timing import CopyModel
from parallel.pipeline.action import Schedule

if TYPE_CHECKING:
    import torch
    from torch import nn

    from framework.config import TrainConfig
    from parallel.offload.offloader import Offloader

# What is planned with is larger than the cost model's figure by this share: it leaves out tables and small tensors.
MARGIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """budget_bytes: what a rank may hold. sizes: by stage, the bytes of one micro-batch that moves are planned with."""

    budget_bytes: int
    sizes: tuple[UnitBytes, ...]


def room_of(
    config: TrainConfig, schedule: Schedule, *, vocab_size: int, on_cpu: bool | None = None
) -> Room | None:
    """The room there is for activations; None: for all that is made. schedule: lowered, offloaded or not."""
    offload = config.offload
    if not offload.is_active:
        return None
    on_cpu = device_kind(config.device) == "cpu" if on_cpu is None else on_cpu
    schedule = without_offload(schedule)
    plan = recompute_plan(config, schedule, vocab_size=vocab_size, on_cpu=on_cpu)
    budget = offload.budget_bytes
    if offload.budget_share is not None:
        peaks = peak_activation_bytes(config, schedule, plan, vocab_size=vocab_size, on_cpu=on_cpu)
        budget = math.floor(offload.budget_share * max(peaks))
    assert budget is not None, "offloading is active where there is a budget"
    sizes = tuple(
        UnitBytes(kept=math.ceil((1 + MARGIN) * size.kept), most=math.ceil((1 + MARGIN) * size.most))
        for size in unit_bytes(config, schedule, plan, vocab_size=vocab_size, on_cpu=on_cpu)
    )
    return Room(budget_bytes=budget, sizes=sizes)


def offloaded(
    config: TrainConfig, schedule: Schedule, *, vocab_size: int, on_cpu: bool | None = None
) -> Schedule:
    """The lowered `schedule` with OFFLOAD and RELOAD; itself where everything stays.

    Raises ValueError: where a rank cannot keep within the budget.
    """
    room = room_of(config, schedule, vocab_size=vocab_size, on_cpu=on_cpu)
    if room is None or config.offload.policy == "none":
        return schedule
    least = least_budget_bytes(schedule, room.sizes)
    if least > room.budget_bytes:
        raise ValueError(_too_small(config, room.budget_bytes, least))
    return add_offload(schedule, room.sizes, budget_bytes=room.budget_bytes, policy=config.offload.policy)


def _too_small(config: TrainConfig, budget: int, least: int) -> str:
    share = config.offload.budget_share
    if share is None:
        given, least_given = f"budget_bytes={budget}", f"budget_bytes={least}"
    else:
        least_share = math.ceil(1e3 * share * least / budget) / 1e3
        given = f"budget_share={share:g} ({budget} bytes)"
        least_given = f"budget_share={least_share:g}" if least_share <= 1 else "policy=none"
    return (
        f"offload.{given}: a rank needs {least} bytes of activations for what it works on at once, whatever leaves; "
        f"set offload.{least_given}{'' if least_given == 'policy=none' else ' or more'}, or lower "
        "data.micro_batch_size or data.seq_length, or take a schedule with more micro-batches under way"
    )


def copy_model(config: TrainConfig, schedule: Schedule, *, vocab_size: int) -> CopyModel | None:
    """What a simulation of the offloaded `schedule` counts copies with; None: everything stays."""
    room = room_of(config, schedule, vocab_size=vocab_size)
    if room is None:
        return None
    return CopyModel(
        sizes=room.sizes, budget_bytes=room.budget_bytes, bytes_per_s=config.offload.copy_bytes_per_s
    )


def offloader_for(
    config: TrainConfig,
    schedule: Schedule,
    modules: Mapping[int, nn.Module],
    *,
    vocab_size: int,
    device: torch.device,
) -> Offloader | None:
    """What moves the activations of this rank's stages; None: they stay. schedule: lowered.

    Raises OSError: where offload.folder takes no file.
    """
    from parallel.offload.offloader import Offloader
    from parallel.offload.tier import DiskTier, HostTier

    on_cpu = device.type == "cpu"
    room = room_of(config, schedule, vocab_size=vocab_size, on_cpu=on_cpu)
    if room is None:
        return None
    offload = config.offload
    is_disk = offload.tier == "disk"
    folder = Path(offload.folder or config.launcher.runs_dir)
    return Offloader(
        DiskTier(folder) if is_disk else HostTier(pinned=not on_cpu),
        device=device,
        budget_bytes=room.budget_bytes,
        min_bytes=offload.min_bytes,
        unit_bytes={stage: room.sizes[stage].kept for stage in modules},
        stay=[tensor for module in modules.values() for tensor in (*module.parameters(), *module.buffers())],
        bytes_per_s=offload.copy_bytes_per_s,
    )
