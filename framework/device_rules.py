"""What a config asks of this machine's devices: told before a rank starts."""

from __future__ import annotations

from framework.apex import KernelUse, choose_kernel
from framework.config import TrainConfig
from framework.deepspeed.start import why_not


def device_problems(config: TrainConfig) -> list[str]:
    """Why `config` cannot run here; torch is imported only for a config that asks for something."""
    return _deepspeed_problems(config) + _gpu_problems(config)


def _deepspeed_problems(config: TrainConfig) -> list[str]:
    problems: list[str] = []
    if config.zero.engine == "deepspeed" and (reason := why_not()) is not None:
        problems.append(f"zero.engine=deepspeed: {reason}, or set zero.engine=native")
    if config.optimizer.kernel == "cpu_adam":
        from framework.deepspeed.cpu_adam import why_no_cpu_adam

        if (reason := why_no_cpu_adam()) is not None:
            problems.append(f"optimizer.kernel=cpu_adam: {reason}; or set optimizer=adamw")
    return problems


def _gpu_problems(config: TrainConfig) -> list[str]:
    precision = config.precision
    wanted: dict[KernelUse, str] = {"optimizer": config.optimizer.kernel, "norm": precision.norm_kernel}
    if "apex" not in wanted.values() and precision.linear != "fp8":
        return []
    import torch

    # Only counted: what asks a device for more must not happen before ranks are forked.
    num_gpus = torch.cuda.device_count()
    problems: list[str] = []
    for use, kernel in wanted.items():
        try:
            if kernel == "apex":
                choose_kernel(use, "apex", num_gpus)
        except ValueError as error:
            problems.append(str(error))
    if precision.linear == "fp8" and num_gpus == 0:
        problems.append(
            "precision.linear=fp8: products in fp8 are computed by GPUs of CUDA capability 8.9 and up (Ada, Hopper, "
            "Blackwell), and there is no GPU here; set precision.linear=compute"
        )
    return problems
