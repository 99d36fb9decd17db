"""What `counterflow bench` takes: its own few values, not those of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBenchConfig:
    """`counterflow bench schedules`.

    mode: `sleep` (every action sleeps action_ms), `compute` (a small Llama on two ranks), or both.
    repeats: counted steps of each case. schedules: empty measures every schedule.
    num_ranks: ranks of the sleeping pipeline. num_microbatches: of a step; every schedule is measured with each.
    """

    mode: Literal["sleep", "compute", "both"] = "both"
    repeats: int = 5
    action_ms: float = 30.0
    num_ranks: int = 8
    num_microbatches: tuple[int, ...] = (32,)
    schedules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("repeats", "num_ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not self.action_ms > 0:
            raise ValueError(
                f"action_ms={self.action_ms}: a positive time in milliseconds; 30 is the default"
            )
        if not self.num_microbatches or min(self.num_microbatches) < 1:
            raise ValueError(
                f"num_microbatches={list(self.num_microbatches)}: one number or more, each at least 1, as in "
                "num_microbatches=[20,32]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class P2PBenchConfig:
    """`counterflow bench p2p`.

    tensor_mib: sizes of an activation. chunk_kib: sizes of a chunk, each beside the whole transfer.
    mbit_per_s: rates of emulated links beside loopback; [] measures loopback only.
    action_ms: what F, I and W sleep in a step. repeats: counted repeats of each case.
    """

    tensor_mib: tuple[float, ...] = (4.0,)
    chunk_kib: tuple[int, ...] = (256, 1024)
    mbit_per_s: tuple[float, ...] = (1000.0,)
    num_ranks: int = 4
    action_ms: float = 30.0
    repeats: int = 9

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= 64:
            raise ValueError(f"num_ranks={self.num_ranks}: a link has two ends; from 2 to 64")
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats}: must be at least 1")
        if not self.action_ms > 0:
            raise ValueError(
                f"action_ms={self.action_ms}: a positive time in milliseconds; 30 is the default"
            )
        for name, smallest in (("tensor_mib", 0.25), ("chunk_kib", 4), ("mbit_per_s", 1)):
            values = getattr(self, name)
            if any(value < smallest for value in values) or not (values or name == "mbit_per_s"):
                raise ValueError(f"{name}={list(values)}: one number or more, each at least {smallest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBenchConfig:
    """`counterflow bench optimizer`.

    num_steps: in a row, for it is between two steps that something is gained. repeats: counted rows of each kind.
    """

    schedules: tuple[str, ...] = ("1f1b", "zb1p", "zb_h2", "zbv", "dualpipe")
    num_ranks: int = 4
    num_microbatches: int = 8
    action_ms: float = 30.0
    num_steps: int = 6
    repeats: int = 3

    def __post_init__(self) -> None:
        for name, smallest in (("num_ranks", 1), ("num_microbatches", 1), ("num_steps", 2), ("repeats", 1)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {smallest}")
        if not self.action_ms > 0:
            raise ValueError(
                f"action_ms={self.action_ms}: a positive time in milliseconds; 30 is the default"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapBenchConfig:
    """`counterflow bench overlap`: two pipeline ranks by two that exchange tokens.

    mode: `sleep` (attention and experts sleep phase_ms in each of F, I and W), `compute` (they compute), or both.
    schedules: of those that have pairs. num_microbatches: of a step. repeats: counted steps with overlap, and without.
    alltoall_share: of a sleeping layer's time, what its exchanges of tokens take where nothing hides them.
    mbit_per_s: what each rank sends at most. network: `namespaces` (an emulated link; Linux, root), `injected` (a
        wait per byte in the exchange), or `auto`: the first where it can be made.
    tokens: of a micro-batch on one rank, in `compute`.
    """

    mode: Literal["sleep", "compute", "both"] = "sleep"
    schedules: tuple[str, ...] = ("dualpipe",)
    num_microbatches: int = 20
    repeats: int = 5
    phase_ms: float = 20.0
    alltoall_share: float = 0.35
    mbit_per_s: float = 400.0
    network: Literal["auto", "namespaces", "injected"] = "auto"
    tokens: int = 512

    def __post_init__(self) -> None:
        known = ("dualpipe", "dualpipe_v", "interleaved_1f1b")
        if unknown := [name for name in self.schedules if name not in known]:
            raise ValueError(f"schedules={unknown}: has no pairs to overlap; choose from {', '.join(known)}")
        if not self.schedules:
            raise ValueError("schedules=[]: nothing to measure; name one, as in schedules=[dualpipe]")
        if self.num_microbatches < 4 or self.num_microbatches % 2:
            raise ValueError(
                f"num_microbatches={self.num_microbatches}: an even number, at least 4, for both directions"
            )
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats}: must be at least 1")
        for name in ("phase_ms", "mbit_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: set it above 0")
        if not 0 < self.alltoall_share < 1:
            raise ValueError(
                f"alltoall_share={self.alltoall_share}: a share between 0 and 1, 0.35 is the default"
            )
        if self.tokens < 64 or self.tokens % 64:
            raise ValueError(f"tokens={self.tokens}: a multiple of 64, the length of a sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedBenchConfig:
    """`counterflow bench deepspeed`.

    stages: of ZeRO, one row for each. model: an option of `model`. num_steps: of both engines, by turns.
    """

    stages: tuple[int, ...] = (0, 1, 2, 3)
    model: str = "tiny"
    data_parallel_size: int = 2
    tensor_parallel_size: int = 1
    num_microbatches: int = 2
    num_steps: int = 20

    def __post_init__(self) -> None:
        if not self.stages or not set(self.stages) <= {0, 1, 2, 3}:
            raise ValueError(f"stages={list(self.stages)}: stages of ZeRO, as in stages=[0,3]")
        if self.num_steps < 2:
            raise ValueError(f"num_steps={self.num_steps}: at least 2, for the first is not timed")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionBenchConfig:
    """`counterflow bench compression`.

    methods: options of `compression`, beside `none`. model: an option of `model`, whose gradient is summed.
    everywhere: every rank gets the whole sum (ZeRO 0), or its own range (ZeRO 1 to 3).
    mbit_per_s: what each rank sends at most on an emulated link, beside loopback; null measures loopback only.
    compute_ms: what a step sleeps before its reduction. repeats: counted steps of each method.
    """

    methods: tuple[str, ...] = ("onebit", "int8", "int4", "fp8", "topk", "powersgd")
    model: str = "small"
    num_ranks: int = 2
    everywhere: bool = True
    mbit_per_s: float | None = 200.0
    compute_ms: float = 0.0
    repeats: int = 5

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= 64:
            raise ValueError(f"num_ranks={self.num_ranks}: a sum is of several ranks; from 2 to 64")
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats}: must be at least 1")
        if self.compute_ms < 0:
            raise ValueError(f"compute_ms={self.compute_ms}: a time in milliseconds, 0 or more")
        if self.mbit_per_s is not None and not self.mbit_per_s >= 1:
            raise ValueError(f"mbit_per_s={self.mbit_per_s}: at least 1, or null for loopback only")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBenchConfig:
    """`counterflow bench memory`: a pipeline whose activations are kept, recomputed, or offloaded within budgets.

    budgets: shares of what the rank that holds most would hold. tier: see `OffloadConfig`.
    copy_share: copies are held to the rate at which moving out what a forward keeps takes this share of its time.
    hidden_size, num_layers: of the model; tokens: of a micro-batch. repeats: counted steps of each case, in turn.
    """

    schedule: str = "gpipe"
    num_ranks: int = 2
    num_microbatches: int = 12
    budgets: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    tier: Literal["host", "disk"] = "disk"
    copy_share: float = 0.8
    hidden_size: int = 256
    num_layers: int = 4
    tokens: int = 512
    repeats: int = 5

    def __post_init__(self) -> None:
        for name, smallest in (("num_ranks", 1), ("num_microbatches", 1), ("num_layers", 1), ("repeats", 1)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {smallest}")
        if any(not 0 < share < 1 for share in self.budgets):
            raise ValueError(
                f"budgets={list(self.budgets)}: shares between 0 and 1, as in budgets=[0.2,0.4,0.6,0.8]"
            )
        if not self.copy_share > 0:
            raise ValueError(f"copy_share={self.copy_share}: a share of a forward's time, above 0")
        if self.hidden_size < 32 or self.hidden_size % 32:
            raise ValueError(f"hidden_size={self.hidden_size}: a multiple of 32, for eight heads")
        if self.tokens < 128 or self.tokens % 128:
            raise ValueError(f"tokens={self.tokens}: a multiple of 128, the length of a sequence")
