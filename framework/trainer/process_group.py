"""A rank's way into the process group of its job, and out of it."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.devices import count_problems, devices_here
from counterflow.framework.errors import StoppedError
from counterflow.parallel.groups import abort_groups


@contextmanager
def process_group(config: TrainConfig, local_rank: int) -> Generator[torch.device]:
    """This rank is in the process group within; its device. Where it fails its groups are aborted, else destroyed."""
    device = start_process_group(config, local_rank)
    try:
        yield device
    except StoppedError:
        raise
    except BaseException:
        abort_groups()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def start_process_group(config: TrainConfig, local_rank: int) -> torch.device:
    """Join the process group that the environment describes; this rank's device.

    Its groups wait by the time-out of the start (see `CommConfig`). gloo on a CPU. With CUDA, NCCL for tensors on the
    device and gloo for those on the host.
    Raises ValueError: where `config.device` is not there for this rank.
    """
    devices = devices_here()
    if problems := count_problems(config.device, devices, None):
        raise ValueError(problems[0])
    kind = devices.kind(config.device)
    timeout = timedelta(seconds=config.comm.start_timeout_s(kind))
    if kind == "cuda":
        device = torch.device("cuda", devices.index(local_rank))
        torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", timeout=timeout, device_id=device, **_meeting_of_round(timeout)
        )
        return device
    dist.init_process_group("gloo", timeout=timeout, **_meeting_of_round(timeout))
    return torch.device("cpu")


def _meeting_of_round(timeout: timedelta) -> dict[str, Any]:
    """Where the ranks meet that torchrun has started again: the store that it keeps has addresses of dead ones."""
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if number == "0":
        return {}
    from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return {
        "store": PrefixStore(f"round-{number}", store),
        "rank": rank,
        "world_size": world_size,
    }
