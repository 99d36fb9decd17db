"""Bringing DeepSpeed up in a process whose torch.distributed is up already, and saying why where it cannot be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import warnings
from datetime import timedelta
from typing import Any

logger = logging.getLogger(__name__)
_OLDEST = (0, 19, 8)


def why_not() -> str | None:
    """Why this Python has no DeepSpeed that the engine can run on; None: it has. Imports nothing."""
    if importlib.util.find_spec("deepspeed") is None:
        return "the package deepspeed is not installed; pip install 'counterflow[deepspeed]'"
    version = importlib.metadata.version("deepspeed")
    if version_of(version) < _OLDEST:
        oldest = ".".join(str(number) for number in _OLDEST)
        return (
            f"deepspeed {version} is older than {oldest}, the first that accumulates gradients until it is told to "
            "step; pip install -U 'counterflow[deepspeed]'"
        )
    return None


def version_of(text: str) -> tuple[int, ...]:
    """The numbers at the front of a version, `0.19.8+cpu` -> (0, 19, 8)."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def import_deepspeed(*, on_cpu: bool = False) -> Any:
    """The module, its log turned down to warnings. on_cpu: whether ranks compute there, GPUs or not.

    Raises RuntimeError: where there is none, with the reason.
    """
    if (reason := why_not()) is not None:
        raise RuntimeError(reason)
    import torch

    if on_cpu or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # said, so that it does not warn that it had to guess
    import deepspeed

    # Its default is some thirty lines of every rank.
    deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def start(timeout_s: float) -> Any:
    """Import DeepSpeed and give it the process groups that there are; the module.

    Its shared-memory all-reduce of the CPU is left out: it is compiled at first use (a minute, on every machine)
    for what gloo does as well.
    """
    import torch.distributed as dist

    deepspeed = import_deepspeed(on_cpu=dist.get_backend() == "gloo")
    # One line for each call: it uses the names that torch 2.13 has replaced.
    warnings.filterwarnings("ignore", r".*torch\.distributed\..*is deprecated", FutureWarning)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(),
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=timeout_s),
        dist_init_required=False if deepspeed.comm.is_initialized() else None,
    )
    return deepspeed
