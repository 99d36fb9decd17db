"""Operators timed by efficiencies that were measured on the device: data/hardware, whose files name their source.

A shape that was measured has its own efficiency; several measurements of it count as their mean time. Another shape
has that of its nearest ones, weighted by the inverse square of their distance in the logarithms of the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from counterflow.framework.planning.cluster import Device
from counterflow.framework.planning.data_files import DATA, load_yaml
from counterflow.framework.planning.kernels import FORWARD, INPUT_GRADIENT, attention_flops

NUM_NEIGHBOURS = 4
# Names of the three products in the table of grouped ones.
_STAGES = {"TN": "fwd", "NN": "bwd_grad_act", "NT": "bwd_grad_w"}

Sizes = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Surface:
    """Efficiencies by sizes. default: where nothing was measured."""

    points: Mapping[Sizes, float]
    default: float

    def at(self, sizes: Sizes) -> float:
        if (exact := self.points.get(sizes)) is not None:
            return exact
        distances = sorted(
            (
                sum((math.log(mine) - math.log(its)) ** 2 for mine, its in zip(sizes, point, strict=True)),
                value,
            )
            for point, value in self.points.items()
        )[:NUM_NEIGHBOURS]
        if not distances:
            return self.default
        weights = [1 / max(distance, 1e-12) for distance, _ in distances]
        return sum(weight * value for weight, (_, value) in zip(weights, distances, strict=True)) / sum(
            weights
        )


def surface(rows: Iterable[tuple[Sizes, float]], default: float) -> Surface:
    """Rows of (sizes, efficiency); of several for the same sizes the first."""
    found: dict[Sizes, float] = {}
    for sizes, value in rows:
        found.setdefault(sizes, value)
    return Surface(found, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKernels:
    """Times of operators in bf16; `fp8` is not measured, and refused."""

    device: Device
    products: Mapping[str, Surface]
    grouped: Mapping[str, Surface]
    forward_attention: Surface
    backward_attention: Surface
    memory: Mapping[str, Mapping[str, float]]
    network: Mapping[str, Any]

    def gemm(self, m: int, k: int, n: int, layout: str = FORWARD, *, fp8: bool = False) -> float:
        self._refuse(fp8)
        share = self.products[layout].at((m, k, n))
        compute = 2.0 * m * k * n / (self.device.bf16_flops * share)
        return max(compute, self.moved(2 * (m * k + k * n + m * n)))

    def grouped_gemm(
        self, groups: int, rows: int, k: int, n: int, layout: str = FORWARD, *, fp8: bool = False
    ) -> float:
        """k, n: of the product of `layout`, as in `gemm`; the table has the weight's sides, n outputs and k
        inputs.
        """
        self._refuse(fp8)
        outputs, inputs = (k, n) if layout == INPUT_GRADIENT else (n, k)
        share = self.grouped[layout].at((groups, rows, outputs, inputs))
        return 2.0 * groups * rows * k * n / (self.device.bf16_flops * share)

    def attention(
        self, batch: int, seq: int, heads: int, kv_heads: int, qk_dim: int, v_dim: int, *, backward: bool
    ) -> float:
        of = self.backward_attention if backward else self.forward_attention
        share = of.at((batch, seq, heads, kv_heads, qk_dim, v_dim))
        # The efficiencies count a causal attention whole.
        flops = 2 * attention_flops(batch, seq, heads, qk_dim, v_dim, backward=backward)
        return flops / (self.device.bf16_flops * share)

    def moved(self, num_bytes: float, kind: str = "default", *, num_kernels: int = 1) -> float:
        found = self.memory.get(kind, self.memory["default"])
        return num_bytes / (found["gbytes_per_s"] * 1e9 * found["efficiency"]) + found[
            "latency_us"
        ] * 1e-6 * (num_kernels if num_bytes else 0)

    def _refuse(self, fp8: bool) -> None:
        if fp8:
            raise ValueError(
                f"precision=fp8: products in fp8 were not measured on {self.device.name}; choose precision=bf16"
            )


@cache
def measured_kernels(device: Device) -> MeasuredKernels:
    """Those of the file that `device.measured` names."""
    data = load_yaml(DATA / "hardware" / f"{device.measured}.yaml")
    products = {
        layout: surface(
            (((m, k, n), value) for _, m, k, n, its, _, value in data["matmul"] if its == layout),
            data["matmul_default"],
        )
        for layout in _STAGES
    }
    grouped = {
        layout: surface(
            (
                ((groups, rows, n, k), value)
                for groups, rows, n, k, its, value in data["grouped_matmul"]
                if its == stage
            ),
            data["grouped_matmul_default"],
        )
        for layout, stage in _STAGES.items()
    }
    attention = [
        surface(
            ((tuple(row[:6]), row[7]) for row in data[f"sdp_{way}"] if row[6]), data[f"sdp_{way}_default"]
        )
        for way in ("fwd", "bwd")
    ]
    return MeasuredKernels(
        device=device,
        products=products,
        grouped=grouped,
        forward_attention=attention[0],
        backward_attention=attention[1],
        memory=data["memory_bandwidth"],
        network=data["network"],
    )
