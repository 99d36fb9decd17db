"""`counterflow bench overlap`: how much of the experts' exchange of tokens runs under computation, and what it gains.

Two pipeline ranks by two ranks that exchange tokens, over a slow network. The same steps run with
the halves of a pair interleaved and without, in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.framework.bench.compute import timed
from counterflow.framework.trainer.collector import frozen_objects
from counterflow.models.config import ModelConfig, MoEConfig
from counterflow.models.partition import partition
from counterflow.models.transformer import TransformerStage, materialize
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.expert.exchange import (
    CommunicationPoint,
    ExpertParallel,
    begin_exchange,
    combine,
    dispatch,
    even_placement,
)
from counterflow.parallel.mesh import MeshConfig, build_mesh
from counterflow.parallel.ops.loss import vocab_parallel_cross_entropy
from counterflow.parallel.ops.weight_grad import WeightGradStore
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.ir.action import Kind, Schedule
from counterflow.parallel.pipeline.ir.trace import COMPUTE_ACTIVITIES, Activity, Interval, Trace, exclusive
from counterflow.parallel.pipeline.runtime.adoption import adopt
from counterflow.parallel.pipeline.runtime.overlap import Interleaver
from counterflow.parallel.pipeline.runtime.plain_parameters import PlainParameters
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.pipeline.schedules.registry import generate

NUM_RANKS, PIPELINE_RANKS, EXPERT_RANKS = 4, 2, 2
LAYERS_PER_STAGE = 2
# Each token goes to experts on so many nodes (DeepSeek-V3: at most 4), so the exchange outweighs the messages between
# stages as it does there.
NODES_PER_TOKEN = 4
WIDTH = 256
# The phases of a layer that compute, attention's and the experts' F, I and W each; and its four transfers.
PHASES, TRANSFERS = 6, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a stage does.

    phase_s: of a sleeping stage, time of each F, I and W of attention and of experts; 0: a mixture of experts that
        computes. tokens: of a micro-batch on one rank.
    """

    phase_s: float
    tokens: int


def sleeping_workload(phase_s: float, share: float, bytes_per_s: float) -> Workload:
    """Sleeping stages whose exchange takes `share` of a layer's time where nothing hides it."""
    transfer_s = PHASES * phase_s * share / (1 - share) / TRANSFERS
    row_bytes = 4 * WIDTH * NODES_PER_TOKEN
    return Workload(phase_s=phase_s, tokens=max(1, round(transfer_s * bytes_per_s / row_bytes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One step. step_s: from the earliest rank's start to the latest's end; the others are sums over ranks.

    steady_*: in the steady state, from the start of a rank's first pair to the end of its last. exposed: waits for
    tokens; compute: everything in forward, backward and weight gradient but that.
    """

    step_s: float
    exposed_s: float
    steady_exposed_s: float
    steady_compute_s: float
    num_handovers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule: steps with overlap and without, in turn; `traces` of the last of either, by global rank."""

    schedule: str
    num_stages: int
    num_microbatches: int
    compute: str
    with_overlap: tuple[Timing, ...]
    without: tuple[Timing, ...]
    traces_with: tuple[Trace, ...]
    traces_without: tuple[Trace, ...]

    @property
    def alltoall_share(self) -> float:
        """Of the time of a layer without overlap, in the steady state; median."""
        return statistics.median(
            each.steady_exposed_s / (each.steady_exposed_s + each.steady_compute_s) for each in self.without
        )

    @property
    def hidden_shares(self) -> list[float]:
        """Of the all-to-all time of the steady state, of each pair of steps."""
        pairs = zip(self.with_overlap, self.without, strict=True)
        return [1 - on.steady_exposed_s / off.steady_exposed_s for on, off in pairs]

    @property
    def hidden_share(self) -> float:
        """The median."""
        return statistics.median(self.hidden_shares)

    @property
    def hidden_share_of_step(self) -> float:
        """Warm-up and drain included, where there is nothing to hide behind; median."""
        pairs = zip(self.with_overlap, self.without, strict=True)
        return statistics.median(1 - on.exposed_s / off.exposed_s for on, off in pairs)

    @property
    def speedup(self) -> float:
        """Step time without overlap over with it, median of pairs."""
        pairs = zip(self.with_overlap, self.without, strict=True)
        return statistics.median(off.step_s / on.step_s for on, off in pairs)

    @property
    def speedup_of_minima(self) -> float:
        return min(each.step_s for each in self.without) / min(each.step_s for each in self.with_overlap)


@frozen_objects()
def measure_overlap(
    schedules: Sequence[str],
    num_microbatches: int,
    repeats: int,
    workload: Workload,
    *,
    injected_bytes_per_s: float | None = None,
    report: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure on the NUM_RANKS ranks of the default process group; every rank calls this, all get the rows.

    injected_bytes_per_s: where the network is not slow itself, how fast tokens are made to travel.
    """
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in schedules:
        schedule = generate(name, PIPELINE_RANKS, num_microbatches)
        benches = {
            overlap: _Bench(schedule, workload, overlap, injected_bytes_per_s) for overlap in (True, False)
        }
        timings: dict[bool, list[Timing]] = {True: [], False: []}
        for repeat in range(repeats + 1):
            for overlap in (True, False) if repeat % 2 else (False, True):
                timing = benches[overlap].step()
                if repeat > 0:
                    timings[overlap].append(timing)
        row = Row(
            schedule=name,
            num_stages=schedule.num_stages,
            num_microbatches=num_microbatches,
            compute="sleeping" if workload.phase_s else "real",
            with_overlap=tuple(timings[True]),
            without=tuple(timings[False]),
            traces_with=benches[True].gather_traces(),
            traces_without=benches[False].gather_traces(),
        )
        rows.append(row)
        if report is not None and dist.get_rank() == 0:
            report(row)
    return rows


class _Bench:
    """One schedule on this rank, ready to step."""

    def __init__(
        self, schedule: Schedule, workload: Workload, overlap: bool, injected_bytes_per_s: float | None
    ) -> None:
        config = MeshConfig(
            pipeline_parallel_size=PIPELINE_RANKS,
            data_parallel_size=EXPERT_RANKS,
            expert_parallel_size=EXPERT_RANKS,
        )
        mesh = build_mesh(config, mirrored=schedule.num_directions > 1)
        self._actions = lower(schedule, zero_stage=0, overlap=True).actions[mesh.coordinate.pipeline]
        self._interleaver = Interleaver(overlap=overlap)
        meter = ByteMeter()
        axis = Axis(group=mesh.expert, name="expert", meter=meter)
        point: CommunicationPoint = self._interleaver
        if injected_bytes_per_s is not None:
            point = PacedPoint(self._interleaver, meter, injected_bytes_per_s)
        make = _sleeping_stage if workload.phase_s else _computing_stage
        stages: dict[int, Stage] = {}
        for index in sorted(schedule.stages_of(mesh.coordinate.pipeline)):
            stages[index] = make(index, schedule.num_stages, axis, point, workload)
        lowered = lower(schedule, zero_stage=0, early_sends=True, overlap=overlap)
        self._runtime = Runtime(stages, lowered, group=mesh.pipeline, interleaver=self._interleaver)
        self._loss_fn = _zero_loss if workload.phase_s else _loss
        self._batch = [
            _microbatch(workload, index * EXPERT_RANKS + axis.rank)
            for index in range(schedule.num_microbatches)
        ]
        self._trace = Trace()

    def step(self) -> Timing:
        """Every rank takes part."""
        before = self._interleaver.num_handovers
        step_s = timed(self._run)
        start, end = steady_state(self._trace, self._actions)
        exposed_s = _seconds(self._trace.intervals, lambda each: each.activity is Activity.EXPERT_WAIT)
        steady = [each for each in exclusive(self._trace.intervals) if start <= each.start_s <= end]
        steady_exposed_s = _seconds(steady, lambda each: each.activity is Activity.EXPERT_WAIT)
        steady_compute_s = _seconds(steady, lambda each: each.activity in COMPUTE_ACTIVITIES)
        sums = torch.tensor([exposed_s, steady_exposed_s, steady_compute_s], dtype=torch.float64)
        dist.all_reduce(sums)
        exposed_s, steady_exposed_s, steady_compute_s = sums.tolist()
        return Timing(
            step_s=step_s,
            exposed_s=exposed_s,
            steady_exposed_s=steady_exposed_s,
            steady_compute_s=steady_compute_s,
            num_handovers=self._interleaver.num_handovers - before,
        )

    def _run(self) -> None:
        result = self._runtime.step(self._batch, self._batch, self._loss_fn, share_losses=False)
        self._trace = result.trace

    def gather_traces(self) -> tuple[Trace, ...]:
        """Of the last step, by global rank."""
        traces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(traces, self._trace)
        return tuple(traces)


def steady_state(trace: Trace, actions: Iterable[Any]) -> tuple[float, float]:
    """From the start of the first pair in `actions` to the end of the last; the trace may have run them apart."""
    halves = {
        (leaf.kind is Kind.F, leaf.stage, leaf.microbatch)
        for action in actions
        if action.kind is Kind.OVERLAP_F_B
        for leaf in action.leaves
    }
    of_pairs = [
        each
        for each in trace.compute
        if (each.activity is Activity.FORWARD, each.stage, each.microbatch) in halves
    ]
    start = min((each.start_s for each in of_pairs), default=0.0)
    return start, max((each.end_s for each in of_pairs), default=0.0)


def _seconds(intervals: Iterable[Interval], counts: Callable[[Interval], bool]) -> float:
    return sum(each.duration_s for each in intervals if counts(each))


class PacedPoint:
    """A communication point behind which tokens travel at a given rate, one transfer after the other.

    What a transfer sends is what `meter` counted since the one before.
    """

    def __init__(self, point: CommunicationPoint, meter: ByteMeter, bytes_per_s: float) -> None:
        self._point, self._meter, self._bytes_per_s = point, meter, bytes_per_s
        self._seen_bytes = 0
        self._free_at = 0.0

    def wait_here(self, work: dist.Work | None) -> None:
        self._point.wait_here(work)

    def wait(self, work: dist.Work | None) -> None:
        if work is not None:
            sent = self._meter.sent_bytes().get("expert", 0)
            self._free_at = (
                max(time.perf_counter(), self._free_at) + (sent - self._seen_bytes) / self._bytes_per_s
            )
            self._seen_bytes = sent
            work = cast(dist.Work, _Paced(work, self._free_at))
        self._point.wait(work)


class _Paced:
    """A transfer that is complete no sooner than `ready_at`."""

    def __init__(self, work: dist.Work, ready_at: float) -> None:
        self._work, self._ready_at = work, ready_at

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))


class _Sleep(torch.autograd.Function):
    """The identity; forward and backward sleep, and the backward files a weight gradient that sleeps as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phase: _Phase) -> Tensor:
        time.sleep(phase.seconds)
        ctx.phase = phase
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        phase: _Phase = ctx.phase
        time.sleep(phase.seconds)
        assert phase.weight_grad_sink is not None
        phase.weight_grad_sink.add(phase.weight, None, phase.weight[None], phase.weight[None])
        return grads[0], None


class _Phase(nn.Module):
    """Attention, or the experts."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1))
        self.weight_grad_sink: WeightGradStore | None = None

    def deferrable_parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,)

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = _Sleep.apply
        # The sum keeps the first stage's input, which needs no gradient, in the graph.
        return apply(x + self.weight, self)


class _SleepingStore(WeightGradStore):
    """Weight gradients that take `phase_s` and compute nothing."""

    def __init__(self, phase_s: float) -> None:
        super().__init__(lambda parameter: parameter)
        self._phase_s = phase_s

    def _accumulate(self, deferred: object) -> None:
        time.sleep(self._phase_s)


class _SleepingLayer(nn.Module):
    """x [T, WIDTH]; every token goes to NODES_PER_TOKEN experts of the next rank, by the real exchange."""

    def __init__(self, axis: Axis, point: CommunicationPoint, workload: Workload) -> None:
        super().__init__()
        self.attention, self.mlp = _Phase(workload.phase_s), _Phase(workload.phase_s)
        self._experts = ExpertParallel(
            axis=axis, experts_by_rank=even_placement(axis.size, axis.size), point=point
        )
        self._table = self._experts.locate(torch.device("cpu"))
        rows = workload.tokens * NODES_PER_TOKEN
        self._choice = torch.full((rows, 1), (axis.rank + 1) % axis.size)
        self._weights = torch.ones(rows, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        exchange = begin_exchange(self._experts, self._table, self._choice).finish()
        rows, _, _ = dispatch(x.repeat(NODES_PER_TOKEN, 1), self._weights, exchange)
        out = combine(self.mlp(rows), exchange)
        return x + out.view(NODES_PER_TOKEN, *x.shape).mean(0)


def _sleeping_stage(
    index: int, num_stages: int, axis: Axis, point: CommunicationPoint, workload: Workload
) -> Stage:
    module = nn.Sequential(*(_SleepingLayer(axis, point, workload) for _ in range(LAYERS_PER_STAGE)))
    stage = Stage(index, module, PlainParameters(module))
    stage.weight_grads = _SleepingStore(workload.phase_s)
    adopt(module, stage.weight_grads)
    return stage


VOCAB_SIZE, SEQ_LENGTH = 1024, 64


def _computing_stage(
    index: int, num_stages: int, axis: Axis, point: CommunicationPoint, workload: Workload
) -> Stage:
    """A mixture of experts of LAYERS_PER_STAGE layers a stage."""
    num_experts = 4 * axis.size
    model = ModelConfig(
        name="bench",
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_layers=LAYERS_PER_STAGE * num_stages,
        num_heads=4,
        num_kv_heads=4,
        max_seq_length=SEQ_LENGTH,
        moe=MoEConfig(num_experts=num_experts, num_experts_per_token=2),
    )
    cut = partition(model, num_stages, seq_length=SEQ_LENGTH, vocab_size=VOCAB_SIZE)[index]
    module = TransformerStage(
        model,
        cut.layers,
        first=cut.first,
        last=cut.last,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=VOCAB_SIZE,
        experts=ExpertParallel(
            axis=axis, experts_by_rank=even_placement(num_experts, axis.size), point=point
        ),
    )
    materialize(module, device="cpu", seed=0)
    return Stage(index, module, PlainParameters(module))


def _microbatch(workload: Workload, seed: int) -> Tensor:
    if workload.phase_s:
        return torch.zeros(workload.tokens, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (workload.tokens // SEQ_LENGTH, SEQ_LENGTH), generator=generator)


def _zero_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() * 0.0


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return vocab_parallel_cross_entropy(output, target, Axis(), vocab_size=VOCAB_SIZE).mean()
