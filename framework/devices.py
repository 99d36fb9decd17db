"""What a config asks of this machine's devices: told before a rank starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from counterflow.framework.config.tree import DeviceChoice, TrainConfig
from counterflow.framework.deepspeed.start import why_not
from counterflow.framework.errors import ConfigError
from counterflow.framework.optim.apex import KernelUse, choose_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The GPUs that this process sees. has_cuda: whether torch was built for them. visible: CUDA_VISIBLE_DEVICES."""

    num_gpus: int
    has_cuda: bool = True
    visible: str | None = None

    def kind(self, choice: DeviceChoice) -> Literal["cpu", "cuda"]:
        """What ranks compute on."""
        if choice == "auto":
            return "cuda" if self.num_gpus else "cpu"
        return choice

    def index(self, local_rank: int) -> int:
        """The GPU of a rank: its own place on the node, or the only one where each rank sees its own.

        Raises ValueError: where there is none for it.
        """
        if local_rank < self.num_gpus:
            return local_rank
        if self.num_gpus == 1:
            return 0  # that no other rank has it too is seen when the ranks compare (`shared_devices`)
        raise ValueError(
            f"LOCAL_RANK={local_rank}: this process sees {self.num_gpus} GPUs, so there is none for it; start at most "
            f"{self.num_gpus} ranks on a node, or set device=cpu"
        )


def devices_here() -> Devices:
    """Counted through NVML, which leaves CUDA untouched: ranks are forked from a process that has asked."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return Devices(
        num_gpus=torch.cuda.device_count(),
        has_cuda=torch.backends.cuda.is_built(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def device_kind(choice: DeviceChoice) -> Literal["cpu", "cuda"]:
    """What ranks compute on here; torch is imported for `auto` alone."""
    return devices_here().kind(choice) if choice == "auto" else choice


def device_problems(config: TrainConfig, num_ranks: int | None = None, *, joined: bool = False) -> list[str]:
    """Why `config` cannot run here with so many ranks on this node; None: their number is not known.

    torch is imported only for a config that asks for something. joined: see `count_problems`.
    """
    problems = _deepspeed_problems(config)
    if config.device != "cpu":
        problems += count_problems(config.device, devices_here(), num_ranks, joined=joined)
    return problems + _gpu_problems(config)


def check_devices(config: TrainConfig, num_ranks: int) -> None:
    """Hold `config` against this machine's devices, for `num_ranks` local ranks.

    Raises ConfigError: see `device_problems`.
    """
    if problems := device_problems(config, num_ranks):
        raise ConfigError(problems)


def count_problems(
    choice: DeviceChoice, devices: Devices, num_ranks: int | None, *, joined: bool = False
) -> list[str]:
    """Why a node with `devices` does not have one for each of its `num_ranks` ranks.

    joined: whoever started the ranks may show each of them a single GPU of its own.
    """
    if choice == "cuda" and devices.num_gpus == 0:
        if not devices.has_cuda:
            reason = "this torch was built without CUDA; install one that has it"
        elif devices.visible is not None:
            reason = f"no GPU is visible with CUDA_VISIBLE_DEVICES={devices.visible!r}; name one there"
        else:
            reason = "torch finds no GPU here; see what nvidia-smi says"
        return [f"device=cuda: {reason}, or set device=cpu"]
    if devices.kind(choice) == "cpu" or num_ranks is None or num_ranks <= devices.num_gpus:
        return []
    if joined and devices.num_gpus == 1:
        return []
    some = "1 GPU" if devices.num_gpus == 1 else f"{devices.num_gpus} GPUs"
    hidden = "" if devices.visible is None else f" with CUDA_VISIBLE_DEVICES={devices.visible!r}"
    return [
        f"device={choice}: {num_ranks} ranks on this node and {some}{hidden}, and each rank needs its own; lower "
        f"parallel.*_size to {devices.num_gpus} ranks on a node, start the rest on other nodes with torchrun, or set "
        "device=cpu"
    ]


def shared_devices(identities: Sequence[Mapping[str, str]]) -> list[str]:
    """The GPUs that two ranks would share; identities: of each rank, what `device_identity` gave."""
    owner: dict[tuple[tuple[str, str], ...], int] = {}
    for rank, identity in enumerate(identities):
        first = owner.setdefault(tuple(sorted(identity.items())), rank) if identity else rank
        if first != rank:
            return [
                f"device: ranks {first} and {rank} would share a GPU ({identity['uuid']}), and each rank needs its "
                "own; give each rank of a node its LOCAL_RANK from 0 on and every GPU, or one GPU of its own "
                "(CUDA_VISIBLE_DEVICES, --gpus-per-task), or set device=cpu"
            ]
    return []


def device_identity(choice: DeviceChoice, local_rank: int) -> dict[str, str]:
    """What no two ranks may have in common; empty on a CPU. Starts CUDA: not before a fork."""
    devices = devices_here()
    if devices.kind(choice) == "cpu":
        return {}
    import torch

    properties = torch.cuda.get_device_properties(devices.index(local_rank))
    # Parts of one GPU (MIG) may give the GPU's own, and are told apart by how they were made visible.
    return {"uuid": str(getattr(properties, "uuid", "")), "visible": devices.visible or ""}


def _deepspeed_problems(config: TrainConfig) -> list[str]:
    problems: list[str] = []
    if config.zero.engine == "deepspeed" and (reason := why_not()) is not None:
        problems.append(f"zero.engine=deepspeed: {reason}, or set zero.engine=native")
    if config.optimizer.kernel == "cpu_adam":
        from counterflow.framework.deepspeed.cpu_adam import why_no_cpu_adam

        if (reason := why_no_cpu_adam()) is not None:
            problems.append(f"optimizer.kernel=cpu_adam: {reason}; or set optimizer=adamw")
    return problems


def _gpu_problems(config: TrainConfig) -> list[str]:
    precision = config.precision
    wanted: dict[KernelUse, str] = {"optimizer": config.optimizer.kernel, "norm": precision.norm_kernel}
    if "apex" not in wanted.values() and precision.linear != "fp8":
        return []
    # Only counted: what asks a device for more must not happen before ranks are forked.
    num_gpus = 0 if config.device == "cpu" else devices_here().num_gpus
    problems: list[str] = []
    for use, kernel in wanted.items():
        try:
            if kernel == "apex":
                choose_kernel(use, "apex", num_gpus)
        except ValueError as error:
            problems.append(str(error))
    if precision.linear == "fp8" and num_gpus == 0:
        none = "device=cpu leaves them unused" if config.device == "cpu" else "there is no GPU here"
        problems.append(
            "precision.linear=fp8: products in fp8 are computed by GPUs of CUDA capability 8.9 and up (Ada, Hopper, "
            f"Blackwell), and {none}; set precision.linear=compute"
        )
    return problems
