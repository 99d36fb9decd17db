"""The training loop, as functions: a step returns a record, the loop hands it on."""

from __future__ import annotations

import dataclasses
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import deterministic as deterministic_kernels

from framework import run_checkpoint
from framework.build import COMPUTE_DTYPES, Assembly, build, start_process_group
from framework.config import TrainConfig, to_mapping
from framework.lr import learning_rate
from framework.metrics.console import ConsoleSink
from framework.metrics.hardware import device_name, peak_flops
from framework.metrics.plot import plot_loss
from framework.metrics.record import Bubbles, RunSummary, StepRecord
from framework.metrics.sinks import Sink, Status, open_sinks, wandb_dir
from framework.run import RunContext
from parallel.collectives import all_gather_into, all_reduce
from parallel.loss import vocab_parallel_cross_entropy
from parallel.pipeline.trace import (
    CATEGORIES,
    COMPUTE_CATEGORIES,
    OTHER,
    Activity,
    Inflation,
    Recorder,
    Trace,
    clock_id,
)
from parallel.zero import add_tied_gradients

BYTE_AXES = ("tensor", "data", "pipeline", "world")


class RankStep(NamedTuple):
    """What one rank measured in a step; every field is a number, gathered from all ranks as one vector.

    forward_s to other_s: the account of the step, the categories of parallel.pipeline.trace in their order.
    split_backward_s, whole_backward_s: see `Inflation`; zero where not defined.
    start_s, clock_id: when the step began, and on which clock.
    """

    loss: float
    step_s: float
    pipeline_s: float
    span_s: float
    forward_s: float
    backward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    receive_wait_s: float
    send_wait_s: float
    collective_wait_s: float
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

    @property
    def account(self) -> dict[str, float]:
        """Seconds in each category; they add up to `step_s`."""
        return {category: getattr(self, f"{category}_s") for category in CATEGORIES}

    @property
    def busy_s(self) -> float:
        return sum(getattr(self, f"{category}_s") for category in COMPUTE_CATEGORIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A step's result before it is a record: the same on every rank, but for `trace`, which is this rank's."""

    grad_norm: float
    learning_rate: float
    ranks: tuple[RankStep, ...]
    trace: Trace


def token_loss(assembly: Assembly, num_valid_tokens: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss function of one micro-batch: the sum over its tokens, over the valid tokens of the global batch."""

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        losses = vocab_parallel_cross_entropy(
            logits, targets, assembly.axes.tensor, vocab_size=assembly.vocab_size
        )
        return losses.sum() / num_valid_tokens

    return loss_fn


def forward_backward(assembly: Assembly, step: int, recorder: Recorder) -> float:
    """Forward and backward of the global batch of `step`: this rank's part of the loss.

    Afterwards the gradients of every fragment are complete: summed over micro-batches, replicas, the tensor
    axis where partial, and both ends of a tie.
    """
    batch = assembly.train.batch(step)
    device = assembly.device
    result = assembly.runtime.step(
        [tokens.to(device) for tokens in batch.tokens],
        [targets.to(device) for targets in batch.targets],
        token_loss(assembly, batch.num_valid_tokens),
        loss_reduction="sum",
        share_losses=False,
        recorder=recorder,
    )
    with recorder.record(Activity.REDUCE):
        add_tied_gradients(assembly.stages.values(), assembly.axes.ends)
    # Tensor-parallel ranks all compute the loss; it is counted once.
    return float(result.losses.sum()) if assembly.axes.tensor.rank == 0 else 0.0


def train_step(assembly: Assembly, step: int) -> StepOutcome:
    """One optimizer step over the global batch of `step`."""
    config, meter = assembly.config, assembly.axes.meter
    recorder = Recorder(assembly.device)
    meter.reset()
    loss = forward_backward(assembly, step, recorder)
    rate = learning_rate(
        config.optimizer.lr_schedule,
        step,
        config.training.num_steps,
        config.optimizer.base_lr,
        config.parallel.data_parallel_size,
    )
    with recorder.record(Activity.OPTIMIZER):
        grad_norm = assembly.optimizer.step(rate, recorder)
    recorder.stop()
    trace = recorder.trace()
    sent = meter.sent_bytes()
    inflation = trace.inflation() or Inflation(0.0, 0.0)
    mine = RankStep(
        loss=loss,
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
    )
    return StepOutcome(grad_norm=grad_norm, learning_rate=rate, ranks=_gather(assembly, mine), trace=trace)


def _gather(assembly: Assembly, mine: RankStep) -> tuple[RankStep, ...]:
    vector = torch.tensor(mine, dtype=torch.float64, device=assembly.device)
    everyone = torch.empty(assembly.axes.world.size * len(mine), dtype=torch.float64, device=assembly.device)
    all_gather_into(everyone, vector, assembly.axes.world)
    return tuple(RankStep(*values) for values in everyone.view(-1, len(mine)).tolist())


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step_record(assembly: Assembly, step: int, outcome: StepOutcome) -> StepRecord:
    """The record of a step from what its ranks measured.

    bubble_measured is 1 - busy / (ranks x makespan): busy is time in F, B, I and W; the makespan is the longest
    time of any rank from its first action to the end of its last gradient reduction, without the optimizer.
    """
    config, ranks = assembly.config, outcome.ranks
    step_s = max(rank.step_s for rank in ranks)
    makespan_s = max(rank.pipeline_s for rank in ranks)
    by_stage: list[list[RankStep]] = [[] for _ in range(config.parallel.pipeline_parallel_size)]
    for index, rank in enumerate(ranks):
        by_stage[config.parallel.coordinate_of(index).pipeline].append(rank)
    busy_s = tuple(_mean(rank.busy_s for rank in members) for members in by_stage)
    mean_busy_s = _mean(busy_s)
    accounts = [
        [rank.account | {OTHER: rank.other_s + step_s - rank.step_s} for rank in of] for of in by_stage
    ]
    whole_backward_s = sum(rank.whole_backward_s for rank in ranks)
    num_samples = assembly.train.global_batch_size
    num_tokens = num_samples * config.data.seq_length
    flops_per_s = num_tokens * assembly.training_flops_per_token / step_s / len(ranks)
    peak = peak_flops(device_name(assembly.device), COMPUTE_DTYPES[config.precision.compute])
    return StepRecord(
        step=step,
        loss=sum(rank.loss for rank in ranks),
        grad_norm=outcome.grad_norm,
        learning_rate=outcome.learning_rate,
        step_s=step_s,
        num_tokens=num_tokens,
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
        bubble_measured=1 - mean_busy_s / makespan_s,
        bubble_measured_span=1 - mean_busy_s / max(rank.span_s for rank in ranks),
        bubble_simulated=assembly.expected_bubble.simulated,
        bubble_simulated_span=assembly.expected_bubble.simulated_span,
        bubble_formula=assembly.expected_bubble.formula,
        work_inflation=sum(rank.split_backward_s for rank in ranks) / whole_backward_s
        if whole_backward_s
        else None,
        bytes_by_axis={
            axis: int(sum(getattr(rank, f"{axis}_bytes") for rank in ranks)) for axis in BYTE_AXES
        },
        peak_memory_bytes=int(max(rank.peak_memory_bytes for rank in ranks)),
        peak_live_activations=tuple(
            int(max(rank.peak_live_activations for rank in members)) for members in by_stage
        ),
        peak_held_weight_grad_bytes=tuple(
            int(max(rank.peak_held_weight_grad_bytes for rank in members)) for members in by_stage
        ),
    )


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def evaluate(assembly: Assembly) -> float | None:
    """The validation loss per token over the held-out batches; None where nothing is held out."""
    if assembly.validation is None or assembly.num_validation_batches == 0:
        return None
    total = torch.zeros((), dtype=torch.float64, device=assembly.device)
    for index in range(assembly.num_validation_batches):
        batch = assembly.validation.batch(index)
        result = assembly.runtime.evaluate(
            [tokens.to(assembly.device) for tokens in batch.tokens],
            [targets.to(assembly.device) for targets in batch.targets],
            token_loss(assembly, batch.num_valid_tokens),
            share_losses=False,
        )
        if assembly.axes.tensor.rank == 0:
            total += result.losses.sum()
    all_reduce(total, assembly.axes.world)
    return float(total) / assembly.num_validation_batches


def train(assembly: Assembly, first_step: int) -> Iterator[StepRecord]:
    """Train from `first_step` to the end of the config, yielding a record after each step."""
    training = assembly.config.training
    for step in range(first_step, training.num_steps):
        record = step_record(assembly, step, train_step(assembly, step))
        done = step + 1
        interval = training.eval_interval_steps
        if done == training.num_steps or (interval and done % interval == 0):
            record = replace(record, validation_loss=evaluate(assembly))
        yield record


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed the generators of Python, NumPy and torch, and pick deterministic kernels where asked to."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        # It is for finding reads of uninitialised memory, and costs a fill of every new tensor.
        deterministic_kernels.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def run_rank(config: TrainConfig, run: RunContext) -> dict[str, Any] | None:
    """One rank's whole run; on rank 0 the summary as plain values.

    The environment holds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    device = start_process_group(config, int(os.environ.get("LOCAL_RANK", "0")))
    try:
        return _run(config, run, device)
    finally:
        dist.destroy_process_group()


def _run(config: TrainConfig, run: RunContext, device: torch.device) -> dict[str, Any] | None:
    seed_everything(config.seed, deterministic=config.deterministic)
    assembly = build(config, run.data, device)
    first_step = run_checkpoint.resume(assembly, run)
    if assembly.mesh.rank > 0:
        for record in train(assembly, first_step):
            run_checkpoint.save_if_due(assembly, run, record.step + 1)
        return None
    sinks: list[Sink] = list(open_sinks(config.logger, run.run_dir, to_mapping(config), first_step))
    if run.show_progress:
        sinks.append(
            ConsoleSink(
                config.training.num_steps,
                first_step=first_step,
                stream=sys.stderr if run.json_output else sys.stdout,
                every=config.training.log_interval_steps,
            )
        )
    status: Status = "failed"
    records: list[StepRecord] = []
    started = time.perf_counter()
    try:
        for record in train(assembly, first_step):
            records.append(record)
            for sink in sinks:
                sink.log(record)
            run_checkpoint.save_if_due(assembly, run, record.step + 1)
        if config.logger.name != "none":
            plot_loss(run.run_dir)
        summary = summarise(records, run, wandb_dir(sinks), time.perf_counter() - started)
        for sink in sinks:
            sink.summary(summary)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        for sink in sinks:
            sink.close(status)
    return dataclasses.asdict(summary)


def summarise(records: list[StepRecord], run: RunContext, wandb: str | None, seconds: float) -> RunSummary:
    """The outcome of a run; rates and the bubble are medians over its steps, the first left out if it can be."""
    steady = records[1:] or records
    last = records[-1]
    return RunSummary(
        run_dir=str(run.run_dir),
        final_loss=last.loss,
        validation_loss=last.validation_loss,
        tokens_per_s=float(np.median([record.tokens_per_s for record in steady])),
        bubble=Bubbles(
            measured=float(np.median([record.bubble_measured for record in steady])),
            simulated=last.bubble_simulated,
            formula=last.bubble_formula,
        ),
        wandb_dir=wandb,
        steps=last.step + 1,
        seconds=seconds,
    )
