"""What a step measured, from every rank, and the record and the timeline made of it."""

from __future__ import annotations

import math
import resource
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.framework.metrics.config import LoggerConfig
from counterflow.framework.metrics.hardware import device_name, peak_flops
from counterflow.framework.metrics.record import MoERecord, OffloadRecord, StepRecord
from counterflow.framework.metrics.stragglers import slowest
from counterflow.framework.metrics.timeline import Timeline, build_timeline
from counterflow.framework.optim.step_guard import StepVerdict
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import COMPUTE_DTYPES
from counterflow.parallel.collectives import Axis, all_gather_into, named
from counterflow.parallel.mesh import ranks_along
from counterflow.parallel.offload.offloader import OffloadReport
from counterflow.parallel.pipeline.ir.trace import (
    CATEGORIES,
    COMPUTE_CATEGORIES,
    OTHER,
    Inflation,
    Trace,
    align,
    clock_id,
)

# Tokens that experts exchange; parameters and gradients of experts among the ranks that hold the same ones.
_EXPERT_AXES = ("expert", "expert_data")
BYTE_AXES = ("tensor", "data", "pipeline", "world", *_EXPERT_AXES)


# Fields of `RankStep` that are filled in where they are, so that the host waits for none of them alone.
_ON_DEVICE = dict.fromkeys(("loss", "mtp_loss", "reduction_squares", "reduction_error_squares"), 0.0)


class RankStep(NamedTuple):
    """What one rank measured in a step; every field is a number, gathered from all ranks as one vector.

    forward_s to other_s: the account of the step, the categories of counterflow.parallel.pipeline.ir.trace in their
    order. split_backward_s, whole_backward_s: see `Inflation`; zero where not defined.
    start_s, clock_id: when the step began, and on which clock.
    gather_bytes: sent to gather parameters.
    reduction_bytes to reduction_error_squares: see `ReductionReport`, added up over the units of this rank.
    offload_out_bytes to offload_peak_bytes: see `OffloadReport`; zero without offloading.
    host_lead_s, host_starved: see `HostLead`; zero on a CPU.
    is_asked_to_stop: 1 where this rank has got SIGTERM.
    """

    loss: float
    mtp_loss: float
    step_s: float
    pipeline_s: float
    span_s: float
    forward_s: float
    backward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    receive_wait_s: float
    send_wait_s: float
    gather_wait_s: float
    collective_wait_s: float
    expert_wait_s: float
    offload_wait_s: float
    reduce_s: float
    optimizer_s: float
    other_s: float
    split_backward_s: float
    whole_backward_s: float
    start_s: float
    clock_id: float
    peak_live_activations: float
    peak_held_weight_grad_bytes: float
    peak_memory_bytes: float
    tensor_bytes: float
    data_bytes: float
    pipeline_bytes: float
    world_bytes: float
    expert_bytes: float
    expert_data_bytes: float
    gather_bytes: float
    reduction_bytes: float
    reduction_fp32_bytes: float
    reduction_squares: float
    reduction_error_squares: float
    offload_out_bytes: float
    offload_back_bytes: float
    offload_num_uses: float
    offload_num_hits: float
    offload_num_unplanned: float
    offload_peak_bytes: float
    host_lead_s: float = 0.0
    host_starved: float = 0.0
    is_asked_to_stop: float = 0.0

    @property
    def account(self) -> dict[str, float]:
        """Seconds in each category; they add up to `step_s`."""
        return {category: getattr(self, f"{category}_s") for category in CATEGORIES}

    @property
    def busy_s(self) -> float:
        return sum(getattr(self, f"{category}_s") for category in COMPUTE_CATEGORIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A step's result before it is a record: the same on every rank, but for `trace`, which is this rank's.

    moe: what the routers did; None: the model has none. loss_scale: None without fp16.
    """

    step: int
    verdict: StepVerdict
    learning_rate: float
    loss_scale: float | None
    ranks: tuple[RankStep, ...]
    trace: Trace
    moe: MoERecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredRanks:
    """What every rank measured, on its way here: fp64 [ranks, fields of RankStep], once `work` is done."""

    everyone: Tensor
    work: dist.Work | None

    def wait(self) -> tuple[RankStep, ...]:
        if self.work is not None:
            self.work.wait()
        return tuple(RankStep(*values) for values in self.everyone.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedStep:
    """A step that this rank has done, before the others are known to have. verdict: None, not validated yet."""

    step: int
    verdict: StepVerdict | None
    learning_rate: float
    loss_scale: float | None
    ranks: GatheredRanks
    trace: Trace
    moe: MoERecord | None = None

    def finish(self, verdict: StepVerdict | None = None) -> StepOutcome:
        """Once every rank has done it. verdict: where it was not known yet."""
        verdict = verdict or self.verdict
        assert verdict is not None, "the step is not validated yet"
        return StepOutcome(
            step=self.step,
            verdict=verdict,
            learning_rate=self.learning_rate,
            loss_scale=self.loss_scale,
            ranks=self.ranks.wait(),
            trace=self.trace,
            moe=self.moe,
        )


def gather_ranks(assembly: Assembly, loss: Tensor, mtp_loss: Tensor, trace: Trace) -> GatheredRanks:
    """Start to gather what every rank measured in the step of `trace`; all ranks call this.

    loss, mtp_loss: this rank's parts, which are not read here.
    """
    sent = assembly.axes.meter.sent_bytes()
    inflation, lead = trace.inflation() or Inflation(0.0, 0.0), trace.host_lead
    mine = RankStep(
        **_ON_DEVICE,
        step_s=trace.step_s,
        pipeline_s=trace.pipeline_s,
        span_s=trace.span_s,
        **{f"{category}_s": seconds for category, seconds in trace.account().items()},
        split_backward_s=inflation.split_s,
        whole_backward_s=inflation.whole_s,
        start_s=trace.start_s,
        clock_id=clock_id(),
        peak_live_activations=trace.peak_live_activations,
        peak_held_weight_grad_bytes=trace.peak_held_weight_grad_bytes,
        peak_memory_bytes=_peak_memory_bytes(assembly.device),
        **{f"{axis}_bytes": sent.get(axis, 0) for axis in BYTE_AXES},
        **_reductions(assembly),
        **_offload_report(assembly),
        **({} if lead is None else {"host_lead_s": lead.lead_s, "host_starved": lead.starved_share}),
        is_asked_to_stop=assembly.stop is not None and assembly.stop.requested.is_set(),
    )
    vector = torch.tensor(mine, dtype=torch.float64, device=assembly.device)
    on_device = {"loss": loss, "mtp_loss": mtp_loss, **_reduction_errors(assembly)}
    for name, value in on_device.items():
        vector[RankStep._fields.index(name)] = value
    everyone = torch.empty((assembly.axes.world.size, len(mine)), dtype=torch.float64, device=assembly.device)
    work = all_gather_into(everyone, vector, assembly.axes.world, async_op=True)
    return GatheredRanks(everyone=everyone, work=work)


def _reductions(assembly: Assembly) -> dict[str, float]:
    """What the gathers and reductions of this rank's units report, added up."""
    units = [unit for stage in assembly.stages.values() for unit in stage.units]
    reports = [unit.report for unit in units]
    return {
        "gather_bytes": sum(unit.gathered_bytes for unit in units),
        "reduction_bytes": sum(each.sent_bytes for each in reports if each),
        "reduction_fp32_bytes": sum(each.fp32_bytes for each in reports if each),
    }


def _reduction_errors(assembly: Assembly) -> dict[str, Tensor]:
    """What compressed reductions left out, and of what, as they are on the device."""
    units = [unit for stage in assembly.stages.values() for unit in stage.units]
    reports = [unit.report for unit in units if unit.report is not None]
    if not reports:
        return {}
    return {
        "reduction_squares": torch.stack([each.squares for each in reports]).double().sum(),
        "reduction_error_squares": torch.stack([each.error_squares for each in reports]).double().sum(),
    }


def _offload_report(assembly: Assembly) -> dict[str, float]:
    offloader = assembly.runtime.offloader
    report = OffloadReport() if offloader is None else offloader.report
    return {f"offload_{name}": value for name, value in asdict(report).items()}


def _offload(by_stage: Sequence[Sequence[RankStep]]) -> OffloadRecord:
    """What the ranks of each pipeline rank moved."""
    ranks = [rank for members in by_stage for rank in members]
    num_uses = sum(rank.offload_num_uses for rank in ranks)
    return OffloadRecord(
        out_bytes=int(sum(rank.offload_out_bytes for rank in ranks)),
        back_bytes=int(sum(rank.offload_back_bytes for rank in ranks)),
        hit_rate=sum(rank.offload_num_hits for rank in ranks) / num_uses if num_uses else 1.0,
        num_unplanned=int(sum(rank.offload_num_unplanned for rank in ranks)),
        stall_s=tuple(_mean(rank.offload_wait_s for rank in members) for members in by_stage),
        peak_bytes=tuple(int(max(rank.offload_peak_bytes for rank in members)) for members in by_stage),
    )


def _compression(ranks: Sequence[RankStep]) -> tuple[float, float]:
    """How many times fewer bytes the reductions sent, and their error over what they were to say."""
    sent, fp32, squares, error_squares = (
        sum(getattr(rank, f"reduction_{name}") for rank in ranks)
        for name in ("bytes", "fp32_bytes", "squares", "error_squares")
    )
    return fp32 / sent if sent else 1.0, math.sqrt(error_squares / squares) if squares else 0.0


def step_record(assembly: Assembly, outcome: StepOutcome) -> StepRecord:
    """The record of a step from what its ranks measured.

    bubble_measured is 1 - busy / (ranks x makespan): busy is time in F, B, I and W; the makespan is the longest
    time of any rank from its first action to the end of its last gradient reduction, without the optimizer.
    """
    config, ranks = assembly.config, outcome.ranks
    step_s = max(rank.step_s for rank in ranks)
    makespan_s = max(rank.pipeline_s for rank in ranks)
    by_stage: list[list[RankStep]] = [[] for _ in range(config.parallel.pipeline_parallel_size)]
    same_work: list[list[int]] = [[] for _ in by_stage]
    for index, rank in enumerate(ranks):
        stage = config.parallel.coordinate_of(index).pipeline
        by_stage[stage].append(rank)
        same_work[stage].append(index)
    rank_busy_s = [rank.busy_s for rank in ranks]
    slowest_rank = slowest(rank_busy_s, same_work)
    is_on_gpu = assembly.device.type == "cuda"
    busy_s = tuple(_mean(rank.busy_s for rank in members) for members in by_stage)
    mean_busy_s = _mean(busy_s)
    accounts = [
        [rank.account | {OTHER: rank.other_s + step_s - rank.step_s} for rank in of] for of in by_stage
    ]
    whole_backward_s = sum(rank.whole_backward_s for rank in ranks)
    batch = assembly.train.at(outcome.step)
    bubble = assembly.expected_bubbles.of(assembly.runtime.schedule_for(batch.num_microbatches))
    num_samples = batch.num_samples
    num_tokens = assembly.train.num_tokens(outcome.step)
    flops_per_token = assembly.training_flops_per_token(assembly.train.mean_context(outcome.step))
    flops_per_s = num_tokens * flops_per_token / step_s / len(ranks)
    peak = peak_flops(device_name(assembly.device), COMPUTE_DTYPES[config.precision.compute])
    compression = (None, None) if config.compression.method == "none" else _compression(ranks)
    return StepRecord(
        step=outcome.step,
        loss=sum(rank.loss for rank in ranks),
        mtp_loss=sum(rank.mtp_loss for rank in ranks) if config.model.mtp.num_modules else None,
        grad_norm=outcome.verdict.grad_norm,
        skipped=outcome.verdict.skipped,
        loss_scale=outcome.loss_scale,
        learning_rate=outcome.learning_rate,
        step_s=step_s,
        num_tokens=num_tokens,
        num_microbatches=batch.num_microbatches,
        padding_share=assembly.train.padding_share(outcome.step)
        if config.data.batching == "documents"
        else None,
        tokens_per_s=num_tokens / step_s,
        samples_per_s=num_samples / step_s,
        model_tflops_per_rank=flops_per_s / 1e12,
        mfu=None if peak is None else flops_per_s / peak,
        busy_s=busy_s,
        idle_s=tuple(makespan_s - busy for busy in busy_s),
        # Tenths of a microsecond: the clock gives no more, and the lines stay short.
        time_s={
            category: tuple(round(_mean(each[category] for each in of), 7) for of in accounts)
            for category in CATEGORIES
        },
        rank_busy_s=tuple(round(each, 6) for each in rank_busy_s),
        slowest_rank=slowest_rank.rank,
        slowest_over_peers=slowest_rank.over_peers,
        host_lead_s=tuple(min(rank.host_lead_s for rank in members) for members in by_stage)
        if is_on_gpu
        else None,
        host_starved=tuple(max(rank.host_starved for rank in members) for members in by_stage)
        if is_on_gpu
        else None,
        bubble_measured=1 - mean_busy_s / makespan_s,
        bubble_measured_span=1 - mean_busy_s / max(rank.span_s for rank in ranks),
        bubble_simulated=bubble.simulated,
        bubble_simulated_span=bubble.simulated_span,
        bubble_formula=bubble.formula,
        work_inflation=sum(rank.split_backward_s for rank in ranks) / whole_backward_s
        if whole_backward_s
        else None,
        bytes_by_axis={
            axis: int(sum(getattr(rank, f"{axis}_bytes") for rank in ranks))
            for axis in BYTE_AXES
            if config.model.moe.num_experts or axis not in _EXPERT_AXES
        },
        compression_ratio=compression[0],
        compression_error=compression[1],
        offload=None if assembly.runtime.offloader is None else _offload(by_stage),
        moe=outcome.moe,
        peak_memory_bytes=int(max(rank.peak_memory_bytes for rank in ranks)),
        pipeline_peak_memory_bytes=tuple(
            int(max(rank.peak_memory_bytes for rank in members)) for members in by_stage
        ),
        peak_live_activations=tuple(
            int(max(rank.peak_live_activations for rank in members)) for members in by_stage
        ),
        peak_held_weight_grad_bytes=tuple(
            int(max(rank.peak_held_weight_grad_bytes for rank in members)) for members in by_stage
        ),
    )


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def timeline_is_due(config: LoggerConfig, step: int, num_steps: int) -> bool:
    """Whether the timeline of `step`, counted from 0, is to be kept."""
    interval = config.timeline_interval_steps
    if config.name == "none" or interval == 0:
        return False
    return step + 1 == num_steps or (interval is not None and (step + 1) % interval == 0)


def gather_timeline(assembly: Assembly, outcome: StepOutcome) -> Timeline | None:
    """On rank 0 the timeline of the pipeline it is in, None elsewhere; all ranks call this."""
    mesh = assembly.mesh
    if (mesh.coordinate.data, mesh.coordinate.context, mesh.coordinate.tensor) != (0, 0, 0):
        return None
    traces: list[Trace] | None = None
    if mesh.rank == 0:
        traces = [outcome.trace] * mesh.config.pipeline_parallel_size
    if mesh.pipeline is not None:
        with named("gather of objects", Axis(group=mesh.pipeline, name="pipeline")):
            dist.gather_object(outcome.trace, traces, group=mesh.pipeline, group_dst=0)
    if traces is None:
        return None
    global_ranks = ranks_along(mesh.config, mesh.coordinate, "pipeline")
    clock = align(
        [outcome.ranks[rank].start_s for rank in global_ranks],
        [int(outcome.ranks[rank].clock_id) for rank in global_ranks],
    )
    batch = assembly.train.at(outcome.step)
    schedule = assembly.runtime.schedule_for(batch.num_microbatches)
    num_pipelines = mesh.config.world_size // mesh.config.pipeline_parallel_size
    return build_timeline(outcome.step, schedule, traces, global_ranks, clock, num_pipelines=num_pipelines)


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
