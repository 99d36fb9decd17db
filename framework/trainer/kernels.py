"""Which kernels update and norm, and where the moments are: the config's choices, as far as this machine has them."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.optim.apex import KernelChoice, KernelUse, choose_kernel
from counterflow.framework.optim.optimizer import ModelOptimizer
from counterflow.framework.optim.updaters.apex import ApexAdamW
from counterflow.framework.optim.updaters.bf16_states import StochasticBf16AdamW
from counterflow.framework.optim.updaters.disk_states import DiskStates
from counterflow.framework.optim.updaters.host_states import HostStates
from counterflow.framework.optim.updaters.updater import TorchAdamW, Updater

logger = logging.getLogger(__name__)


def updater_for(config: TrainConfig, kernel: KernelChoice) -> Updater:
    """Who performs the update, and where the moments are; kernel: of torch's AdamW or apex's."""
    offload = config.optimizer.offload
    inner = _updater_in_memory(config, kernel)
    if offload.tier == "host":
        return HostStates(inner)
    if offload.tier == "disk":
        folder = Path(offload.folder or config.launcher.runs_dir)
        return DiskStates(inner, folder, offload.resident_bytes)
    return inner


def _updater_in_memory(config: TrainConfig, kernel: KernelChoice) -> Updater:
    if config.precision.optimizer_states == "bf16":
        return StochasticBf16AdamW(config.optimizer, config.seed)
    if config.optimizer.kernel == "cpu_adam":
        from counterflow.framework.deepspeed.cpu_adam import CpuAdam

        return CpuAdam(config.optimizer)
    if kernel.kernel == "apex":
        return ApexAdamW(config.optimizer)
    return TorchAdamW(config.optimizer)


def kernel_choices(config: TrainConfig, device: torch.device) -> dict[KernelUse, KernelChoice]:
    """What computes updates and norms.

    Raises ValueError: where apex is asked for and cannot be used.
    """
    num_gpus = int(device.type == "cuda")
    optimizer = config.optimizer
    # On the host there is no GPU.
    updating_gpus = 0 if optimizer.offload.tier == "host" else num_gpus
    kernel = "torch" if optimizer.kernel == "cpu_adam" else optimizer.kernel
    return {
        "optimizer": choose_kernel("optimizer", kernel, updating_gpus),
        "norm": choose_kernel("norm", config.precision.norm_kernel, num_gpus),
    }


def named_kernels(
    choices: dict[KernelUse, KernelChoice], optimizer: ModelOptimizer, *, is_first: bool
) -> dict[str, str]:
    """For the record; the first rank says in the log why apex is not used where it was looked for."""
    names = {"optimizer": optimizer.updater.name, "norm": f"{choices['norm'].kernel} norms"}
    if is_first:
        for use, choice in choices.items():
            level = logging.WARNING if choice.is_surprising else logging.INFO
            logger.log(level, "%s: %s (%s)", use, names[use], choice.reason)
    return names
