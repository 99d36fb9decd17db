"""The training loop, as functions: a step returns a record, the loop hands it on."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import deterministic as deterministic_kernels

from framework import run_checkpoint
from framework.build import Assembly, build, start_process_group
from framework.config import TrainConfig, to_mapping
from framework.lr import learning_rate
from framework.measure import StepOutcome, gather_timeline, measure, step_record, timeline_is_due
from framework.metrics.console import ConsoleSink
from framework.metrics.plot import plot_loss
from framework.metrics.record import Bubbles, RunSummary, StepRecord
from framework.metrics.sinks import Sink, Status, log_picture, open_sinks, wandb_dir
from framework.metrics.timeline import Timeline
from framework.metrics.timeline_render import write_files
from framework.run import RunContext
from parallel.collectives import all_reduce
from parallel.loss import vocab_parallel_cross_entropy
from parallel.pipeline.trace import Activity, Recorder
from parallel.zero import add_tied_gradients


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
    config = assembly.config
    recorder = Recorder(assembly.device)
    assembly.axes.meter.reset()
    # The ranks start together: what one of them logs or draws between steps is part of the step, not of its bubble.
    dist.barrier(group=assembly.mesh.world)
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
    ranks = measure(assembly, loss, trace)
    return StepOutcome(grad_norm=grad_norm, learning_rate=rate, ranks=ranks, trace=trace)


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


def train(
    assembly: Assembly, first_step: int, take_timeline: Callable[[Timeline], None] | None = None
) -> Iterator[StepRecord]:
    """Train from `first_step` to the end of the config, yielding a record after each step.

    take_timeline: called on rank 0 with the timeline of each step for which one is due.
    """
    config, training = assembly.config, assembly.config.training
    for step in range(first_step, training.num_steps):
        outcome = train_step(assembly, step)
        record = step_record(assembly, step, outcome)
        if timeline_is_due(config.logger, step, training.num_steps):
            timeline = gather_timeline(assembly, step, outcome)
            if timeline is not None and take_timeline is not None:
                take_timeline(timeline)
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
    # What is alive now stays; the collector need not walk over it in the middle of a step, on each rank at another.
    gc.collect()
    gc.freeze()
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

    def take_timeline(timeline: Timeline) -> None:
        paths = write_files(timeline, run.run_dir, ("json", "trace", "png"))
        log_picture(sinks, "timeline", paths["png"], timeline.step)

    try:
        for record in train(assembly, first_step, take_timeline):
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
