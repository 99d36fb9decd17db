"""What `counterflow bench` takes: its own few values, not those of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from counterflow.framework.keys import check_bounds, key


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBenchConfig:
    """`counterflow bench schedules`."""

    mode: Literal["sleep", "compute", "both"] = key(
        "both", "sleep (F, I and W sleep), compute (a small Llama on two ranks) or both"
    )
    repeats: int = key(5, "counted steps of each", at_least=1)
    action_ms: float = key(30.0, "time of one F, I or W of a stage", above=0)
    num_ranks: int = key(8, "ranks of the sleeping pipeline", at_least=1)
    num_microbatches: tuple[int, ...] = key((32,), "micro-batches of a step, one row for each", at_least=1)
    schedules: tuple[str, ...] = key((), "which, as in [1f1b,zbv]; []: every one that takes the sizes")

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.num_microbatches:
            raise ValueError("num_microbatches=[]: one number or more, as in num_microbatches=[20,32]")


@dataclass(frozen=True, slots=True, kw_only=True)
class P2PBenchConfig:
    """`counterflow bench p2p`."""

    tensor_mib: tuple[float, ...] = key((4.0,), "sizes of the activation", at_least=0.25)
    chunk_kib: tuple[int, ...] = key((256, 1024), "sizes of the chunks", at_least=4)
    mbit_per_s: tuple[float, ...] = key((1000.0,), "emulated links; [] for loopback only", at_least=1)
    num_ranks: int = key(4, "ranks of the pipeline")
    action_ms: float = key(30.0, "time of one F, I or W of a stage", above=0)
    repeats: int = key(9, "counted transfers and steps of each", at_least=1)

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= 64:
            raise ValueError(f"num_ranks={self.num_ranks}: a link has two ends; from 2 to 64")
        check_bounds(self)
        for name in ("tensor_mib", "chunk_kib"):
            if not getattr(self, name):
                raise ValueError(f"{name}=[]: nothing to measure; give one number or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBenchConfig:
    """`counterflow bench optimizer`."""

    schedules: tuple[str, ...] = key(("1f1b", "zb1p", "zb_h2", "zbv", "dualpipe"), "which")
    num_ranks: int = key(4, "ranks of the pipeline", at_least=1)
    num_microbatches: int = key(8, "micro-batches of a step", at_least=1)
    action_ms: float = key(30.0, "time of one F, I or W of a stage", above=0)
    num_steps: int = key(6, "steps of a row; what is gained is gained between two", at_least=2)
    repeats: int = key(3, "counted rows of each", at_least=1)

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapBenchConfig:
    """`counterflow bench overlap`: two pipeline ranks by two that exchange tokens."""

    mode: Literal["sleep", "compute", "both"] = key(
        "sleep", "sleep (attention and experts sleep phase_ms in F, I and W), compute or both"
    )
    schedules: tuple[str, ...] = key(
        ("dualpipe",), "dualpipe, dualpipe_v, interleaved_1f1b: those that have pairs"
    )
    num_microbatches: int = key(20, "micro-batches of a step")
    repeats: int = key(5, "counted steps of each", at_least=1)
    phase_ms: float = key(20.0, "time of a sleeping phase", above=0)
    alltoall_share: float = key(0.35, "of a layer's time, by which the tokens' size is chosen")
    mbit_per_s: float = key(400.0, "what each rank sends at most", above=0)
    network: Literal["auto", "namespaces", "injected"] = key(
        "auto", "namespaces (Linux, root), injected (a wait per byte) or auto: the first where it can be made"
    )
    tokens: int = key(512, "of a micro-batch")

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
        check_bounds(self)
        if not 0 < self.alltoall_share < 1:
            raise ValueError(
                f"alltoall_share={self.alltoall_share}: a share between 0 and 1, 0.35 is the default"
            )
        if self.tokens < 64 or self.tokens % 64:
            raise ValueError(f"tokens={self.tokens}: a multiple of 64, the length of a sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedBenchConfig:
    """`counterflow bench deepspeed`."""

    stages: tuple[int, ...] = key((0, 1, 2, 3), "of ZeRO, one row for each")
    model: str = key("tiny", "a choice of the group model")
    data_parallel_size: int = key(2, "ranks that share data out")
    tensor_parallel_size: int = key(1, "ranks that share a layer out")
    num_microbatches: int = key(2, "micro-batches of a step")
    num_steps: int = key(20, "of each engine")

    def __post_init__(self) -> None:
        if not self.stages or not set(self.stages) <= {0, 1, 2, 3}:
            raise ValueError(f"stages={list(self.stages)}: stages of ZeRO, as in stages=[0,3]")
        if self.num_steps < 2:
            raise ValueError(f"num_steps={self.num_steps}: at least 2, for the first is not timed")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionBenchConfig:
    """`counterflow bench compression`."""

    methods: tuple[str, ...] = key(("onebit", "int8", "int4", "fp8", "topk", "powersgd"), "which")
    model: str = key("small", "whose gradient")
    num_ranks: int = key(2, "ranks that reduce")
    everywhere: bool = key(True, "every rank gets the whole sum (ZeRO 0); false: its own range")
    mbit_per_s: float | None = key(200.0, "rate of the emulated link; null for loopback only", at_least=1)
    compute_ms: float = key(0.0, "compute of a step that stands beside the reduction", at_least=0)
    repeats: int = key(5, "counted reductions of each", at_least=1)

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= 64:
            raise ValueError(f"num_ranks={self.num_ranks}: a sum is of several ranks; from 2 to 64")
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBenchConfig:
    """`counterflow bench memory`: a pipeline whose activations are kept, recomputed, or offloaded within budgets."""

    schedule: str = key("gpipe", "the more micro-batches live at once, the lower a budget can be")
    num_ranks: int = key(2, "ranks of the pipeline", at_least=1)
    num_microbatches: int = key(12, "micro-batches of a step", at_least=1)
    budgets: tuple[float, ...] = key(
        (0.2, 0.4, 0.6, 0.8), "shares of what the rank that holds most would hold"
    )
    tier: Literal["host", "disk"] = key("disk", "where activations go: host or disk")
    copy_share: float = key(0.8, "what moving out takes of the forward's time", above=0)
    hidden_size: int = key(256, "of the model")
    num_layers: int = key(4, "of the model", at_least=1)
    tokens: int = key(512, "of a micro-batch")
    repeats: int = key(5, "counted steps of each", at_least=1)

    def __post_init__(self) -> None:
        check_bounds(self)
        if any(not 0 < share < 1 for share in self.budgets):
            raise ValueError(
                f"budgets={list(self.budgets)}: shares between 0 and 1, as in budgets=[0.2,0.4,0.6,0.8]"
            )
        if self.hidden_size < 32 or self.hidden_size % 32:
            raise ValueError(f"hidden_size={self.hidden_size}: a multiple of 32, for eight heads")
        if self.tokens < 128 or self.tokens % 128:
            raise ValueError(f"tokens={self.tokens}: a multiple of 128, the length of a sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultBenchConfig:
    """`counterflow bench faults`."""

    trials: int = key(100, "runs that are killed once each", at_least=1)
    seed: int = key(0, "of the moments")
    model: str = key("tiny", "of the runs")
    pipeline_parallel_size: int = key(1, "pipeline ranks", at_least=1)
    data_parallel_size: int = key(2, "data-parallel ranks", at_least=1)
    schedule: str = key("1f1b", "of the runs")
    zero_stage: int = key(3, "of the runs", at_least=0)
    num_steps: int = key(12, "of a run", at_least=2)
    interval_steps: int = key(2, "between checkpoints", at_least=1)

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBenchConfig:
    """`counterflow bench zero`."""

    mode: Literal["peers", "link", "both"] = key(
        "peers", "peers (fully_shard and DeepSpeed), link (what a slow link costs; Linux, root) or both"
    )
    data_parallel_sizes: tuple[int, ...] = key((4,), "ranks that parameters are sharded over", at_least=2)
    units: tuple[str, ...] = key(("block",), "of zero.units: block, stage")
    reduce: tuple[str, ...] = key(("microbatch", "step"), "of zero.reduce: microbatch, step")
    deepspeed: bool = key(True, "its engine trains as well")
    hidden_size: int = key(256, "of the model, a multiple of 16", at_least=16)
    num_layers: int = key(8, "of the model", at_least=1)
    vocab_size: int = key(7040, "of the model", at_least=257)
    seq_length: int = key(128, "tokens of a micro-batch", at_least=2)
    num_microbatches: int = key(2, "micro-batches of a step", at_least=1)
    repeats: int = key(5, "counted steps of each", at_least=1)
    mbit_per_s: float = key(400.0, "mode=link: what each rank sends at most", above=0)
    block_ms: float = key(40.0, "mode=link: time of a block's gather, and of its forward", above=0)

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, known in (("units", {"block", "stage"}), ("reduce", {"microbatch", "step"})):
            if not set(getattr(self, name)) <= known:
                raise ValueError(f"{name}={list(getattr(self, name))}: of {', '.join(sorted(known))}")
        if self.hidden_size % 16:
            raise ValueError(f"hidden_size={self.hidden_size}: a multiple of 16, for eight heads and the MLP")
