"""What works on a machine, and what of it a config needs: found by trying it, on the devices that ranks would use.

Pure functions judge; `probe_rank` tries, in ranks of its own, since a process that has started CUDA cannot be forked.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.deepspeed import start as deepspeed
from counterflow.framework.devices import Devices, device_problems
from counterflow.framework.optim.apex import why_no_apex
from counterflow.framework.trainer.process_group import process_group
from counterflow.models.cost import model_cost
from counterflow.parallel.ops.fp8 import MULTIPLE, fp8_product, why_no_fp8
from counterflow.parallel.ops.weight_grad import grouped_weight_gradient

_LINK_BYTES = 8 << 20
_DISK_BYTES = 32 << 20
_TRIES = 5
# Masters and both moments of AdamW, in fp32.
_CHECKPOINT_BYTES_PER_PARAMETER = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked for. what: a version, a size, or why it does not work."""

    name: str
    works: bool
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Between two local ranks. bytes_per_s: of a message from one to the other, and of an all-reduce's buffer."""

    backend: str
    p2p_bytes_per_s: float
    all_reduce_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpeed:
    """Of the file system that runs are written to. bytes_per_s: of one file, until it is on the disk."""

    folder: str
    bytes_per_s: float
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a rank found on its device."""

    devices: tuple[Finding, ...]
    kernels: tuple[Finding, ...]
    link: LinkSpeed | None


def versions() -> tuple[Finding, ...]:
    """Of what the project stands on; a package that is not there does not work."""
    found = [Finding(name="python", works=True, what=platform.python_version())]
    for name in ("torch", "hydra-core", "wandb", "transformers", "tokenizers", "safetensors"):
        try:
            found.append(Finding(name=name, works=True, what=importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(name=name, works=False, what="not installed"))
    cuda: str | None = torch.version.cuda
    built = "" if cuda is not None else "this torch was built without it"
    found.append(Finding(name="CUDA", works=cuda is not None, what=cuda or built))
    return tuple(found)


def backends() -> tuple[Finding, ...]:
    """Of torch.distributed."""
    has_nccl = dist.is_nccl_available()
    nccl = "this torch was built without it"
    if has_nccl:
        from torch.cuda.nccl import version

        nccl = ".".join(map(str, version()))
    return (
        Finding(name="gloo", works=dist.is_gloo_available()),
        Finding(name="nccl", works=has_nccl, what=nccl),
    )


def disk_speed(folder: Path) -> DiskSpeed:
    """Of the nearest folder at or above `folder` that is there; nothing is left in it.

    Raises OSError: where it cannot be written to.
    """
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    chunk = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".counterflow-doctor-") as file:
        begin = time.perf_counter()
        for _ in range(_DISK_BYTES // len(chunk)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - begin
    return DiskSpeed(
        folder=str(folder), bytes_per_s=_DISK_BYTES / seconds, free_bytes=shutil.disk_usage(folder).free
    )


def checkpoint_bytes(config: TrainConfig) -> int:
    """About the size of one checkpoint of a run of `config`."""
    vocab_size = config.expected_vocab_size
    cost = model_cost(config.model, seq_length=config.data.seq_length, vocab_size=vocab_size)
    return _CHECKPOINT_BYTES_PER_PARAMETER * cost.parameters


def missing(
    config: TrainConfig,
    device_type: str,
    *,
    devices: Sequence[Finding],
    backends: Sequence[Finding],
    kernels: Sequence[Finding],
    disk: DiskSpeed | None,
) -> list[str]:
    """What `config` needs and this machine does not have: a sentence each, with the setting that needs it."""
    problems = device_problems(config)
    found = {each.name: each for each in (*devices, *backends, *kernels)}
    wanted: list[tuple[bool, str, str]] = [
        (device_type == "cuda", "nccl", "device=cuda"),
        (device_type == "cpu" and config.parallel.world_size > 1, "gloo", "ranks on a CPU"),
        (config.precision.linear == "fp8", "_scaled_mm", "precision.linear=fp8"),
        (
            config.model.moe.num_experts > 0,
            "grouped_mm",
            f"model.moe.num_experts={config.model.moe.num_experts}",
        ),
        (config.optimizer.kernel == "torch", "fused AdamW", "optimizer.kernel=torch"),
    ]
    for is_wanted, name, setting in wanted:
        finding = found.get(name)
        if is_wanted and finding is not None and not finding.works:
            problems.append(f"{setting} needs {name}: {finding.what or 'it does not work here'}")
    size = checkpoint_bytes(config)
    if disk is not None and config.checkpoint.enabled and disk.free_bytes < size:
        problems.append(
            f"launcher.runs_dir: a checkpoint takes {size / 2**30:.1f} GiB and {disk.folder} has "
            f"{disk.free_bytes / 2**30:.1f} GiB free; name a folder on a larger disk, or set checkpoint=none"
        )
    return list(dict.fromkeys(problems))


def num_probe_ranks(device_type: str, devices: Devices) -> int:
    """Two where each has a device of its own."""
    return 2 if device_type == "cpu" else min(2, devices.num_gpus)


def probe_rank(config: TrainConfig, local_rank: int) -> Probe:
    """Entry of each of the ranks that try what works; the environment describes the process group."""
    with process_group(config, local_rank) as device:
        link = _link_speed(device) if dist.get_world_size() > 1 else None
        if local_rank > 0:
            return Probe(devices=(), kernels=(), link=link)
        return Probe(devices=_devices(device), kernels=tuple(kernels(device)), link=link)


def _devices(device: torch.device) -> tuple[Finding, ...]:
    if device.type != "cuda":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return (Finding(name="CPU", works=True, what=f"{platform.machine()}, {cores} cores"),)
    found: list[Finding] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        what = f"{properties.name}, capability {properties.major}.{properties.minor}, {memory}"
        found.append(Finding(name=f"GPU {index}", works=True, what=what))
    return tuple(found)


def tried(name: str, call: Callable[[], str | None]) -> Finding:
    """What became of `call`: it works, and what it returned is said of it; or it raised, and that is why."""
    try:
        return Finding(name=name, works=True, what=call() or "")
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Finding(name=name, works=False, what=first[:160])


def kernels(device: torch.device) -> Iterable[Finding]:
    """What layers and optimizers compute with, each tried forward and backward on small tensors on `device`."""
    yield tried("flash attention", lambda: _attention(device, SDPBackend.FLASH_ATTENTION))
    yield tried("cuDNN attention", lambda: _attention(device, SDPBackend.CUDNN_ATTENTION))
    yield tried("grouped_mm", lambda: _grouped_mm(device))
    yield tried("_scaled_mm", lambda: _scaled_mm(device))
    yield tried("fused AdamW", lambda: _fused_adamw(device))
    compiler = _compiler(device)
    yield Finding(name="inductor", works=compiler is not None, what=compiler or "no compiler was found")
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    for name, reason in (
        ("apex, optimizer", why_no_apex("optimizer", num_gpus)),
        ("apex, norms", why_no_apex("norm", num_gpus)),
        ("deepspeed", deepspeed.why_not()),
    ):
        yield Finding(name=name, works=reason is None, what=reason or "")


def _attention(device: torch.device, backend: SDPBackend) -> None:
    if backend is SDPBackend.CUDNN_ATTENTION and device.type != "cuda":
        raise RuntimeError("it is for GPUs")
    q, k, v = (
        torch.randn(1, 2, 64, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    _finite(q.grad)


def _grouped_mm(device: torch.device) -> str | None:
    """Says whether the kernel itself leaves a group without rows alone, which is made up for."""
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    grad = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    ends = torch.tensor([16, 16, 32], device=device, dtype=torch.int32)
    F.grouped_mm(x, torch.randn(3, 64, 64, device=device, dtype=torch.bfloat16), offs=ends)
    raw = F.grouped_mm(grad.t(), x, offs=ends)
    gradient = grouped_weight_gradient(x, grad, ends)
    _finite(gradient)
    if gradient[1].any():
        raise RuntimeError("a group without rows has a gradient")
    return None if not raw[1].any() else "groups without rows are cleared afterwards"


def _scaled_mm(device: torch.device) -> str | None:
    if (reason := why_no_fp8(device)) is not None:
        raise RuntimeError(reason)
    x, matrix = (torch.randn(MULTIPLE, MULTIPLE, device=device, dtype=torch.bfloat16) for _ in range(2))
    _finite(fp8_product(x, matrix))
    return "emulated" if device.type == "cpu" else None


def _fused_adamw(device: torch.device) -> None:
    parameter = torch.nn.Parameter(torch.ones(8, device=device))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()
    _finite(parameter)


def _compiler(device: torch.device) -> str | None:
    """What Inductor compiles with."""
    if device.type == "cuda":
        return "triton" if importlib.util.find_spec("triton") is not None else None
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _finite(tensor: Tensor | None) -> None:
    assert tensor is not None
    if not tensor.isfinite().all():
        raise RuntimeError("the result is not finite")


def _link_speed(device: torch.device) -> LinkSpeed:
    """The best of a few tries, between ranks 0 and 1; both call it."""
    rank = dist.get_rank()
    buffer = torch.zeros(_LINK_BYTES // 4, device=device)

    def there_and_back(message: Tensor) -> None:
        if rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)

    def seconds(call: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(_TRIES + 1):  # the first connects
            dist.barrier()
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - begin)
        return best

    latency_s = seconds(lambda: there_and_back(buffer[:1])) / 2
    p2p_s = seconds(lambda: there_and_back(buffer)) / 2
    all_reduce_s = seconds(lambda: dist.all_reduce(buffer))
    return LinkSpeed(
        backend="nccl" if device.type == "cuda" else "gloo",
        p2p_bytes_per_s=_LINK_BYTES / p2p_s,
        all_reduce_bytes_per_s=_LINK_BYTES / all_reduce_s,
        latency_s=latency_s,
    )


def probe_config(config: TrainConfig, device_type: str) -> TrainConfig:
    """What the ranks that try run with: the devices of `config`, nothing of its model."""
    return replace(config, device="cuda" if device_type == "cuda" else "cpu")
