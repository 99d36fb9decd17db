"""Devices, and the clusters that are built of them: what a time is predicted from.

Bandwidths are one way. A cluster is a file of conf/cluster; what a device is stands in
framework/planning/data/devices.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from counterflow.framework.config.mapping import from_mapping
from counterflow.framework.planning.data_files import DATA, load_yaml

CLUSTERS = Path(__file__).parents[2] / "conf" / "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, by its datasheet. num_processors: streaming multiprocessors, each of which computes one tile at a time.

    fp8_flops: 0 where it has none. measured: stem of the file of data/hardware with operator efficiencies measured
    on it; "": there is none, and `calibrated` names the efficiencies of data/calibration.yaml.
    """

    name: str
    bf16_flops: float
    memory_bytes: float
    bandwidth_bytes_per_s: float
    num_processors: int
    fp8_flops: float = 0.0
    measured: str = ""
    calibrated: str = "a100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal devices.

    intra_bytes_per_s: of a device to the others of its node together. inter_bytes_per_s: of the share that a device
    has of its node's network cards. latencies: of one message. dollars_per_gpu_hour: what an hour of a device costs.
    """

    name: str
    device: Device
    num_gpus: int
    gpus_per_node: int = 8
    intra_bytes_per_s: float
    intra_latency_s: float = 3e-6
    inter_bytes_per_s: float
    inter_latency_s: float = 8e-6
    dollars_per_gpu_hour: float = 2.0

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.gpus_per_node < 1:
            raise ValueError(
                f"cluster {self.name}: num_gpus={self.num_gpus}, gpus_per_node={self.gpus_per_node}: counts; set them "
                "to 1 or more"
            )
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            raise ValueError(
                f"cluster {self.name}: num_gpus={self.num_gpus} is no multiple of gpus_per_node={self.gpus_per_node}; "
                "plan for whole nodes"
            )

    def of_size(self, num_gpus: int) -> Cluster:
        """The same nodes, of another number of devices."""
        return replace(self, num_gpus=num_gpus)


@cache
def devices() -> dict[str, Device]:
    """Every device, by name."""
    found: dict[str, dict[str, Any]] = load_yaml(DATA / "devices.yaml")
    return {name: from_mapping(Device, {"name": name, **values}) for name, values in found.items()}


def cluster_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in CLUSTERS.glob("*.yaml")))


def load_cluster(name: str) -> Cluster:
    """The cluster of conf/cluster/NAME.yaml, or of the file that `name` is a path to.

    NAME_COUNT, where there is no such file, is the cluster NAME with COUNT devices, as in h800_2048.
    Raises ValueError: there is none.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else CLUSTERS / f"{name}.yaml"
    if path.is_file():
        return _read(path)
    stem, _, count = name.rpartition("_")
    if count.isdecimal() and (path := CLUSTERS / f"{stem}.yaml").is_file():
        return _read(path).of_size(int(count))
    raise ValueError(
        f"cluster={name}: no such cluster; choose one of {', '.join(cluster_names())}, add _COUNT for another number "
        "of devices, or give the path of a file like those of conf/cluster"
    )


def _read(path: Path) -> Cluster:
    values: dict[str, Any] = dict(load_yaml(path))
    name = values.pop("device", None)
    if name not in devices():
        raise ValueError(f"{path}: device={name}: no such device; choose one of {', '.join(devices())}")
    return Cluster(name=path.stem, device=devices()[name], **values)
