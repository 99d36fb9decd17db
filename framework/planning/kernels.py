"""The time of one operator on a device: pure functions of its sizes.

Two kinds of device answer the same questions. `ModelledKernels` knows the datasheet and a few efficiencies of
data/calibration.yaml; framework/planning/measured.py interpolates in efficiencies that were measured operator by
operator.

Note [A product by tiles]
A product [m, k] x [k, n] is cut into tiles of 256 x 128 of its output (of 64 or more rows where it has no more), one
for each processor at a time, so it takes whole waves of them: the last wave may be nearly empty. Each tile also pays
for its start and end, as if it were `TILE_OVERHEAD` longer along k. What is left under the peak is
`gemm_efficiency`, one number for a device. It takes at least as long as its operands take from and to memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from counterflow.framework.config.mapping import from_mapping
from counterflow.framework.planning.cluster import Device
from counterflow.framework.planning.data_files import DATA, load_yaml

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "TN", "NN", "NT"
TILE_ROWS, TILE_COLUMNS = 256, 128
LEAST_ROWS = 64
TILE_OVERHEAD = 64
BF16 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """What of a datasheet's figures is reached, each a share of it and within a bound.

    gemm, fp8_gemm: of the peak, by a large product. attention: of the peak, by a fused attention. memory: of the
    bandwidth. intra, inter: of the links within and between nodes. launch_s: the least time from one kernel to the
    next on the device. host_s: what the host takes to launch one; 0: it is never behind.
    """

    gemm: float
    memory: float = 0.85
    attention: float = 0.55
    fp8_gemm: float = 0.6
    intra: float = 0.8
    inter: float = 0.8
    launch_s: float = 5e-6
    host_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gemm", "memory", "attention", "fp8_gemm", "intra", "inter"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"efficiency {name}={value}: a share of a peak; above 0, at most 1")


def efficiencies(name: str) -> Efficiencies:
    """Those of data/calibration.yaml under `name`."""
    return from_mapping(Efficiencies, load_yaml(DATA / "calibration.yaml")[name]["constants"])


class Kernels(Protocol):
    """Seconds of an operator. moved: what reads and writes so many bytes, `num_kernels` kernels in all."""

    def gemm(self, m: int, k: int, n: int, layout: str = FORWARD, *, fp8: bool = False) -> float: ...
    def grouped_gemm(
        self, groups: int, rows: int, k: int, n: int, layout: str = FORWARD, *, fp8: bool = False
    ) -> float: ...
    def attention(
        self, batch: int, seq: int, heads: int, kv_heads: int, qk_dim: int, v_dim: int, *, backward: bool
    ) -> float: ...
    def moved(self, num_bytes: float, kind: str = "default", *, num_kernels: int = 1) -> float: ...


def attention_flops(batch: int, seq: int, heads: int, qk_dim: int, v_dim: int, *, backward: bool) -> float:
    """Of a causal attention, counted halved. Its backward computes the scores again: 5 products against 2."""
    forward = batch * heads * seq * seq * (qk_dim + v_dim)
    return forward * (2.5 if backward else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledKernels:
    """Times from the datasheet and `share`."""

    device: Device
    share: Efficiencies

    def gemm(self, m: int, k: int, n: int, layout: str = FORWARD, *, fp8: bool = False) -> float:
        return self.batched_gemm(1, m, k, n, fp8=fp8)

    def batched_gemm(self, batch: int, m: int, k: int, n: int, *, fp8: bool = False) -> float:
        """`batch` products of [m, k] x [k, n]. See Note [A product by tiles]."""
        device, share = self.device, self.share
        if fp8 and device.fp8_flops:
            peak = device.fp8_flops * share.fp8_gemm
        else:
            peak = device.bf16_flops * share.gemm
        rows = min(TILE_ROWS, math.ceil(m / LEAST_ROWS) * LEAST_ROWS)
        tiles = batch * math.ceil(m / rows) * math.ceil(n / TILE_COLUMNS)
        waves = math.ceil(tiles / device.num_processors)
        filled = tiles / (waves * device.num_processors)
        padded = tiles * rows * TILE_COLUMNS
        compute = 2.0 * padded * (k + TILE_OVERHEAD) / (peak * filled)
        memory = batch * BF16 * (m * k + k * n + m * n) / (device.bandwidth_bytes_per_s * share.memory)
        return max(compute, memory, share.launch_s)

    def grouped_gemm(
        self, groups: int, rows: int, k: int, n: int, layout: str = FORWARD, *, fp8: bool = False
    ) -> float:
        if layout == WEIGHT_GRADIENT:  # m and n are weights' sides, and the rows are summed over
            return self.batched_gemm(groups, n, rows, k, fp8=fp8)
        return self.batched_gemm(groups, rows, k, n, fp8=fp8)

    def attention(
        self, batch: int, seq: int, heads: int, kv_heads: int, qk_dim: int, v_dim: int, *, backward: bool
    ) -> float:
        flops = attention_flops(batch, seq, heads, qk_dim, v_dim, backward=backward)
        peak = self.device.bf16_flops * self.share.attention
        if backward:
            peak *= (
                0.8  # of FlashAttention-2's figures, arXiv 2307.08691, section 4.1: backward against forward
            )
        return max(flops / peak, self.share.launch_s)

    def moved(self, num_bytes: float, kind: str = "default", *, num_kernels: int = 1) -> float:
        rate = self.device.bandwidth_bytes_per_s * self.share.memory
        return max(num_bytes / rate, num_kernels * self.share.launch_s)
