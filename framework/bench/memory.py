"""`counterflow bench memory`: the activations a rank holds, recomputed or offloaded, and what that costs in time."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from counterflow.framework.bench.config import MemoryBenchConfig
from counterflow.framework.checks.rules import check
from counterflow.framework.config.mapping import from_mapping
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.memory.activations import saved_bytes
from counterflow.framework.metrics.timeline import measured_costs
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.step import forward_backward
from counterflow.models.recompute import RecomputeConfig
from counterflow.parallel.offload.config import OffloadConfig
from counterflow.parallel.pipeline.analysis.copy_timing import CopyModel
from counterflow.parallel.pipeline.analysis.costs import Costs
from counterflow.parallel.pipeline.analysis.simulate import simulate
from counterflow.parallel.pipeline.ir.offload_sizes import UnitBytes
from counterflow.parallel.pipeline.ir.trace import Activity, Recorder, Trace

NONE, UNLIMITED = "none", "unlimited"
_VOCAB_SIZE, _SEQ_LENGTH = 512, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured. budget_share: of an offloaded one, None where it has no budget."""

    name: str
    config: TrainConfig
    policy: str = "none"
    budget_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case, measured. Tuples have one entry for each rank.

    budget_bytes: None without one. peak_bytes, simulated_peak_bytes: the most that was kept for backwards at once.
    step_s: of each counted step, the longest of any rank from its first action to its last. stall_s: of each counted
    step the time that all ranks waited for copies; simulated_stall_s. moved_bytes: out and back, by all ranks.
    hit_rate: backwards that found everything there.
    """

    name: str
    policy: str
    budget_share: float | None
    budget_bytes: int | None
    peak_bytes: tuple[int, ...]
    simulated_peak_bytes: tuple[int, ...]
    step_s: tuple[float, ...]
    stall_s: tuple[float, ...]
    simulated_stall_s: float
    moved_bytes: int
    hit_rate: float

    @property
    def prediction_error(self) -> float:
        """Of the peaks, the largest of any rank."""
        return max(
            abs(predicted - found) / found
            for predicted, found in zip(self.simulated_peak_bytes, self.peak_bytes, strict=True)
        )


def base_config(bench: MemoryBenchConfig, folder: Path) -> TrainConfig:
    """The model and layout of every case.

    Raises ValueError: where they do not fit each other.
    """
    config = from_mapping(
        TrainConfig,
        {
            "model": {
                "hidden_size": bench.hidden_size,
                "intermediate_size": 4 * bench.hidden_size,
                "num_layers": bench.num_layers,
                "num_heads": 8,
                "num_kv_heads": 8,
            },
            "parallel": {"pipeline_parallel_size": bench.num_ranks},
            "schedule": {"name": bench.schedule, "num_microbatches": bench.num_microbatches},
            "data": {
                "seq_length": _SEQ_LENGTH,
                "micro_batch_size": bench.tokens // _SEQ_LENGTH,
                "sources": [str(Path(json.__file__).parent)],
                "cache_dir": str(folder / "data"),
                "validation_fraction": 0.0,
            },
            "tokenizer": {"vocab_size": _VOCAB_SIZE},
            "logger": {"name": "none"},
            "checkpoint": {"enabled": False},
        },
    )
    check(config)
    return config


def cases_of(bench: MemoryBenchConfig, base: TrainConfig, folder: Path) -> list[Case]:
    """Everything kept, recomputed in two ways, and offloaded in each way within each budget.

    Raises ValueError: where a rank cannot keep within a budget.
    """

    def offloaded(name: str, **values: Any) -> TrainConfig:
        values |= {"tier": bench.tier, "folder": str(folder)}
        return replace(base, offload=OffloadConfig(policy=name, **values))  # type: ignore[arg-type]

    modules = ("attention",)
    cases = [
        Case(name=NONE, config=base),
        Case(
            name="selective (attention)",
            config=replace(base, recompute=RecomputeConfig(mode="selective", modules=modules)),
        ),
        Case(name="full", config=replace(base, recompute=RecomputeConfig(mode="full"))),
        Case(name=UNLIMITED, config=offloaded("schedule"), policy="schedule"),
    ]
    for share in bench.budgets:
        for policy in ("lru", "schedule"):
            config = offloaded(policy, budget_share=share)
            check(config)
            cases.append(
                Case(name=f"{policy}, {share:.0%}", config=config, policy=policy, budget_share=share)
            )
    return cases


class _Measured:
    """A case on this rank: its assembly, and what its steps gave."""

    def __init__(self, case: Case, assembly: Assembly) -> None:
        self.case, self.assembly = case, assembly
        self.traces: list[Trace] = []
        self.peak_bytes = 0
        self.moved_bytes = self.num_uses = self.num_hits = 0

    def first(self) -> None:
        """An uncounted step: connections and tables are made."""
        forward_backward(self.assembly, 0, Recorder(self.assembly.device))

    def look(self) -> None:
        """An uncounted step whose activations are counted."""
        with saved_bytes(nn.ModuleList(self.assembly.modules)) as meter:
            forward_backward(self.assembly, 1, Recorder(self.assembly.device))
        offloader = self.assembly.runtime.offloader
        self.peak_bytes = meter.peak if offloader is None else offloader.report.peak_bytes

    def step(self) -> None:
        dist.barrier()
        recorder = Recorder(self.assembly.device)
        forward_backward(self.assembly, 1, recorder)
        recorder.stop()
        self.traces.append(recorder.trace())
        if self.assembly.runtime.offloader is not None:
            report = self.assembly.runtime.offloader.report
            self.peak_bytes = max(self.peak_bytes, report.peak_bytes)
            self.moved_bytes = report.out_bytes + report.back_bytes
            self.num_uses += report.num_uses
            self.num_hits += report.num_hits


def measure_memory(
    bench: MemoryBenchConfig, cases: Sequence[Case], data: PreparedData, report: Callable[[Row], None]
) -> tuple[list[Row], float]:
    """Measure on the ranks of the default process group; every rank calls this, all get the rows and the copies' rate.

    The steps of all cases come in turn, after two uncounted ones. Copies are held to a rate at which moving what a
    forward keeps takes `copy_share` of that forward's time.
    """
    torch.set_num_threads(1)
    device = torch.device("cpu")
    none = _Measured(cases[0], build(cases[0].config, data, device))
    none.first()
    for _ in range(3):
        none.step()
    rate = _copy_rate(bench, none)
    found = [none]
    for case in cases[1:]:
        config = case.config
        if case.policy != "none":
            config = replace(config, offload=replace(config.offload, copy_bytes_per_s=rate))
        found.append(_Measured(case, build(config, data, device)))
    none.traces.clear()
    for each in found:
        if each is not none:
            each.first()
        each.look()
    for repeat in range(bench.repeats):
        for each in found[:: 1 if repeat % 2 else -1]:
            each.step()
    costs = _costs(none)
    rows = [_row(each, costs) for each in found]
    if dist.get_rank() == 0:
        for row in rows:
            report(row)
    return rows, rate


def _costs(measured: _Measured, step: int | None = None) -> Costs:
    """What each stage's actions took, over all ranks: the mean of one step, or of all that are counted."""
    everyone: list[list[Trace]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, measured.traces if step is None else measured.traces[step : step + 1])
    return measured_costs(
        [trace for of_rank in everyone for trace in of_rank], measured.assembly.schedule.num_stages
    )


def _copy_rate(bench: MemoryBenchConfig, none: _Measured) -> float:
    """Bytes in a second, the same on every rank: of the stage that keeps the most for its time.

    By the quickest of the steps so far: what a busy machine adds is not the forward's.
    """
    forwards = [_costs(none, step).forward for step in range(len(none.traces))]
    quickest = [
        min(times) for times in zip(*(each for each in forwards if isinstance(each, tuple)), strict=True)
    ]
    return max(
        size.kept / (bench.copy_share * forward_s)
        for size, forward_s in zip(_sizes(none), quickest, strict=True)
    )


def _sizes(measured: _Measured) -> tuple[UnitBytes, ...]:
    return measured.assembly.workload.unit_bytes


def _row(measured: _Measured, costs: Costs) -> Row:
    assembly, case = measured.assembly, measured.case
    config, schedule = assembly.config, assembly.schedule
    budget = assembly.workload.activation_budget
    simulated_stall_s = 0.0
    if budget is None:
        predicted = assembly.workload.peak_activation_bytes(schedule)
    else:
        copies = CopyModel(
            sizes=_sizes(measured),
            budget_bytes=budget.budget_bytes,
            bytes_per_s=config.offload.copy_bytes_per_s,
        )
        simulation = simulate(schedule, costs, copies)
        predicted, simulated_stall_s = simulation.peak_bytes, sum(simulation.stall)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyone,
        {
            "peak": measured.peak_bytes,
            "moved": measured.moved_bytes,
            "uses": measured.num_uses,
            "hits": measured.num_hits,
            "step": [trace.pipeline_s for trace in measured.traces],
            "stall": [trace.account()[Activity.OFFLOAD_WAIT.category] for trace in measured.traces],
        },
    )
    num_uses = sum(each["uses"] for each in everyone)
    return Row(
        name=case.name,
        policy=case.policy,
        budget_share=case.budget_share,
        budget_bytes=None if budget is None else budget.budget_bytes,
        peak_bytes=tuple(each["peak"] for each in everyone),
        simulated_peak_bytes=tuple(predicted),
        step_s=tuple(map(max, zip(*(each["step"] for each in everyone), strict=True))),
        stall_s=tuple(map(sum, zip(*(each["stall"] for each in everyone), strict=True))),
        simulated_stall_s=simulated_stall_s,
        moved_bytes=sum(each["moved"] for each in everyone),
        hit_rate=sum(each["hits"] for each in everyone) / num_uses if num_uses else 1.0,
    )


def step_ratio(row: Row, none: Row) -> float:
    """How long its steps take, over those that keep everything: the median of the ratios of each turn."""
    return statistics.median(one / other for one, other in zip(row.step_s, none.step_s, strict=True))
