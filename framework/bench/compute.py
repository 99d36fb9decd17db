"""Real compute: a small Llama over two pipeline ranks, this project's schedules beside torch's 1F1B."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from counterflow.models.config import ModelConfig
from counterflow.models.partition import partition
from counterflow.models.transformer import TransformerStage, materialize
from counterflow.parallel.collectives import Axis
from counterflow.parallel.ops.loss import vocab_parallel_cross_entropy
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.api import build_pipeline
from counterflow.parallel.pipeline.schedules.registry import generate

VOCAB_SIZE = 4096
MODEL = ModelConfig(
    name="bench", hidden_size=384, intermediate_size=1024, num_layers=8, num_heads=8, num_kv_heads=4
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRow:
    """One schedule on real compute.

    tokens_per_s: of the median step. ratio_to_torch_1f1b: median over interleaved pairs of steps, above 1 is
    faster. limit_tokens_per_s: ranks x one process x (1 - theory_idle). ratio_to_limit: of the median step.
    """

    schedule: str
    num_microbatches: int
    theory_idle: float
    tokens_per_s: float
    ratio_to_torch_1f1b: float
    limit_tokens_per_s: float

    @property
    def ratio_to_limit(self) -> float:
        return self.tokens_per_s / self.limit_tokens_per_s


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return vocab_parallel_cross_entropy(logits, targets, Axis(), vocab_size=VOCAB_SIZE).mean()


def make_stage(index: int, num_stages: int, seq_length: int) -> nn.Module:
    """Stage `index` of the bench model, cut by cost."""
    cut = partition(MODEL, num_stages, seq_length=seq_length, vocab_size=VOCAB_SIZE)[index]
    stage = TransformerStage(
        MODEL,
        cut.layers,
        first=cut.first,
        last=cut.last,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=VOCAB_SIZE,
    )
    materialize(stage, device="cpu", seed=0)
    return stage


def measure_compute(
    schedules: Sequence[str],
    num_microbatches: int,
    repeats: int,
    *,
    micro_batch_size: int = 2,
    seq_length: int = 128,
    report: Callable[[ComputeRow], None] | None = None,
) -> list[ComputeRow]:
    """Measure every schedule on the ranks of the default process group; every rank calls this, all get the rows.

    Each round times one process alone, torch's 1F1B and each schedule, one after the other; `repeats` rounds
    follow one that is not counted. One thread a rank.
    """
    torch.set_num_threads(1)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    shape = (num_microbatches * micro_batch_size, seq_length)
    tokens = torch.randint(VOCAB_SIZE, shape, generator=generator)
    targets = torch.randint(VOCAB_SIZE, shape, generator=generator)

    steps: dict[str, Callable[[], object]] = {
        "one process": _one_process_step(tokens, targets, num_microbatches, seq_length),
        "torch": _torch_step(tokens, targets, num_microbatches, seq_length),
    }
    theory: dict[str, float] = {}
    for name in schedules:
        schedule = generate(name, num_ranks, num_microbatches)
        theory[name] = simulate(schedule, Costs()).bubble_makespan
        pipeline = build_pipeline(
            lambda index, count=schedule.num_stages: make_stage(index, count, seq_length),
            name,
            num_microbatches=num_microbatches,
        )
        steps[name] = lambda pipeline=pipeline: pipeline.step(tokens, targets, loss_fn, share_losses=False)

    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            elapsed = timed(step, idle=name == "one process" and rank > 0)
            if repeat > 0:
                times[name].append(elapsed)
    one_process = tokens.numel() / statistics.median(times["one process"])
    rows = [
        ComputeRow(
            schedule=name,
            num_microbatches=num_microbatches,
            theory_idle=theory[name],
            tokens_per_s=tokens.numel() / statistics.median(times[name]),
            ratio_to_torch_1f1b=statistics.median(
                theirs / ours for ours, theirs in zip(times[name], times["torch"], strict=True)
            ),
            limit_tokens_per_s=num_ranks * one_process * (1 - theory[name]),
        )
        for name in schedules
    ]
    if report is not None and rank == 0:
        for row in rows:
            report(row)
    return rows


def timed(step: Callable[[], object], *, idle: bool = False) -> float:
    """Seconds from the first rank's start to the last rank's end (one host: one clock); `idle` ranks only wait."""
    dist.barrier()
    begin = time.perf_counter()
    if not idle:
        step()
    times = torch.tensor([-begin, time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times.sum())


def _one_process_step(
    tokens: Tensor, targets: Tensor, num_microbatches: int, seq_length: int
) -> Callable[[], object]:
    model = make_stage(0, 1, seq_length)

    def step() -> None:
        for x, y in zip(tokens.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True):
            (loss_fn(model(x), y) / num_microbatches).backward()

    return step


def _torch_step(
    tokens: Tensor, targets: Tensor, num_microbatches: int, seq_length: int
) -> Callable[[], object]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(make_stage(rank, num_ranks, seq_length), rank, num_ranks, torch.device("cpu"))
    runner = Schedule1F1B(stage, n_microbatches=num_microbatches, loss_fn=loss_fn)

    def step() -> None:
        if stage.is_first:
            runner.step(tokens)
        else:
            runner.step(target=targets if stage.is_last else None)

    return step
