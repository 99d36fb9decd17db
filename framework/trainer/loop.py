"""The training loop, as functions: a step returns a record, the loop hands it on."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils import deterministic as deterministic_kernels

from counterflow.framework.config.mapping import to_mapping
from counterflow.framework.config.tree import TrainConfig, TrainingConfig
from counterflow.framework.errors import StoppedError
from counterflow.framework.metrics.console import ConsoleSink
from counterflow.framework.metrics.guarded import GuardedSink
from counterflow.framework.metrics.plot import plot_loss
from counterflow.framework.metrics.record import StepRecord
from counterflow.framework.metrics.running import RunningSummary
from counterflow.framework.metrics.sinks import close_sinks, failures_of, log_picture, open_sinks, wandb_dir
from counterflow.framework.metrics.status import Status
from counterflow.framework.metrics.timeline import Timeline
from counterflow.framework.metrics.timeline_render import write_files
from counterflow.framework.trainer import checkpointing as run_checkpoint
from counterflow.framework.trainer import rebalance, rehearsal
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.collector import frozen_objects
from counterflow.framework.trainer.measure import (
    StepOutcome,
    UnfinishedStep,
    gather_timeline,
    step_record,
    timeline_is_due,
)
from counterflow.framework.trainer.process_group import process_group
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import begin_step, evaluate
from counterflow.framework.trainer.stop import StopRequest, stop_on_sigterm
from counterflow.parallel.groups import set_timeouts

logger = logging.getLogger(__name__)


def train(
    assembly: Assembly, first_step: int, take_timeline: Callable[[Timeline], None] | None = None
) -> Iterator[StepRecord]:
    """Train from `first_step` to the end of the config, yielding a record of each step.

    The record of a step that was made ahead comes after the next step, which validates it; a step after which
    anything is saved, evaluated, moved or drawn is not made ahead.
    take_timeline: called on rank 0 with the timeline of each step for which one is due.

    Raises StoppedError: after the step in which a rank was asked to stop, on every rank.
    """
    config, training = assembly.config, assembly.config.training
    unfinished: UnfinishedStep | None = None
    stopping: list[int] = []
    for step in range(first_step, training.num_steps):
        begun, earlier = begin_step(
            assembly, step, may_step_ahead=not (stopping or is_looked_at_after(config, step))
        )
        if unfinished is not None:
            outcome = unfinished.finish(earlier)
            stopping = stopping or asked_to_stop(outcome)
            yield _observed(assembly, step_record(assembly, outcome))
        unfinished = begun
        if assembly.optimizer.is_ahead:
            continue
        outcome, unfinished = begun.finish(), None
        stopping = stopping or asked_to_stop(outcome)
        record = _observed(assembly, step_record(assembly, outcome))
        # Of the last step of a run there is always one.
        if timeline_is_due(config.logger, training.num_steps - 1 if stopping else step, training.num_steps):
            timeline = gather_timeline(assembly, outcome)
            if timeline is not None and take_timeline is not None:
                take_timeline(timeline)
        if evaluation_is_due(training, step) and not stopping:
            record = replace(record, validation_loss=evaluate(assembly))
        if rebalance.is_due(config, step) and record.skipped is None:
            assert assembly.balancer is not None
            assert record.balance is not None
            record = replace(record, balance=assembly.balancer.rebalance(assembly, record.balance))
        yield record
        if stopping and step + 1 < training.num_steps:
            who = f"rank {stopping[0]}" if len(stopping) == 1 else f"{len(stopping)} ranks"
            raise StoppedError(f"SIGTERM asked {who} to stop; the run stopped after {step + 1} steps")


def asked_to_stop(outcome: StepOutcome) -> list[int]:
    """The ranks that had got SIGTERM when they ended the step: the same list on every rank."""
    return [rank for rank, step in enumerate(outcome.ranks) if step.is_asked_to_stop]


def _observed(assembly: Assembly, record: StepRecord) -> StepRecord:
    """`record` with how evenly experts were placed, where they may move; a step that was skipped does not count."""
    if assembly.balancer is None or record.moe is None or record.skipped is not None:
        return record
    return replace(record, balance=assembly.balancer.observe(record.moe))


def evaluation_is_due(training: TrainingConfig, step: int) -> bool:
    """Whether the validation loss is measured after `step`, counted from 0."""
    done, interval = step + 1, training.eval_interval_steps
    return done == training.num_steps or (interval > 0 and done % interval == 0)


def is_looked_at_after(config: TrainConfig, step: int) -> bool:
    """Whether parameters or ranks are looked at between `step` and the next: then it is not made ahead."""
    return (
        evaluation_is_due(config.training, step)
        or run_checkpoint.is_due(config, step + 1)
        or timeline_is_due(config.logger, step, config.training.num_steps)
        or rebalance.is_due(config, step)
    )


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed the generators of Python, NumPy and torch, and pick deterministic kernels where asked to."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    if deterministic:
        # As `use_deterministic_algorithms` does, which tells inductor too, and for that imports all of torch.compile.
        torch.set_deterministic_debug_mode("error")
        # It is for finding reads of uninitialised memory, and costs a fill of every new tensor.
        deterministic_kernels.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def run_rank(config: TrainConfig, run: RunContext) -> dict[str, Any] | None:
    """One rank's whole run; on rank 0 the summary as plain values.

    The environment holds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    with (
        process_group(config, int(os.environ.get("LOCAL_RANK", "0"))) as device,
        stop_on_sigterm(config.launcher.grace_s) as stop,
    ):
        return _run(config, run, device, stop)


def _run(
    config: TrainConfig, run: RunContext, device: torch.device, stop: StopRequest
) -> dict[str, Any] | None:
    seed_everything(config.seed, deterministic=config.is_deterministic(device.type))
    with build(config, run.data, device) as assembly:
        first_step = run_checkpoint.resume(assembly, run)
        if rehearsal.is_due(assembly):
            rehearsal.rehearse(assembly, first_step)
        return _train_and_record(replace(assembly, stop=stop), run, first_step)


@frozen_objects()
def _train_and_record(assembly: Assembly, run: RunContext, first_step: int) -> dict[str, Any] | None:
    config = assembly.config
    if assembly.mesh.rank > 0:
        for record in _started(train(assembly, first_step), config):
            run_checkpoint.save_if_due(assembly, run, record.step + 1)
        return None
    values = run.config_values or to_mapping(config)
    sinks = open_sinks(config.logger, run.run_dir, values, first_step, hidden=run.hidden)
    if run.show_progress:
        sinks.append(
            GuardedSink(
                "the console",
                lambda: ConsoleSink(
                    config.training.num_steps,
                    first_step=first_step,
                    stream=sys.stderr if run.json_output else sys.stdout,
                    every=config.training.log_interval_steps,
                ),
            )
        )
    stop = assembly.stop
    if stop is not None:
        stop.when_late(lambda: close_sinks(sinks, "interrupted", stop.close_s))
    status: Status = "failed"
    running = RunningSummary()
    started = time.perf_counter()

    def take_timeline(timeline: Timeline) -> None:
        with _no_harm("the timeline"):
            paths = write_files(timeline, run.run_dir, ("json", "trace", "png"))
            log_picture(sinks, "timeline", paths["png"], timeline.step)

    try:
        for record in _started(train(assembly, first_step, take_timeline), config):
            running.add(record)
            if record.moe is not None and not config.logger.keeps_loads_of(
                record.step, config.training.num_steps
            ):
                record = replace(record, moe=record.moe.without_loads())
            for sink in sinks:
                sink.log(record)
            run_checkpoint.save_if_due(assembly, run, record.step + 1)
        _draw_loss(config, run)
        summary = running.summary(
            run_dir=str(run.run_dir),
            wandb_dir=wandb_dir(sinks),
            seconds=time.perf_counter() - started,
            kernels=assembly.kernels,
            deterministic=config.is_deterministic(assembly.device.type),
            sink_failures=failures_of(sinks),
        )
        for sink in sinks:
            sink.summary(summary)
        status = "finished"
    except (KeyboardInterrupt, StoppedError):
        status = "interrupted"
        if stop is not None:
            stop.finish()
            close_sinks(sinks, status, stop.close_s)
        _draw_loss(config, run)
        raise
    finally:
        close_sinks(sinks, status, config.logger.timeout_s)
    return dataclasses.asdict(summary) | {"sink_failures": failures_of(sinks)}


def _started(records: Iterator[StepRecord], config: TrainConfig) -> Iterator[StepRecord]:
    """`records`; behind the first, groups no longer wait as long as they do at the start."""
    for number, record in enumerate(records):
        if number == 0:
            set_timeouts(config.comm.timeout_s)
        yield record


def _draw_loss(config: TrainConfig, run: RunContext) -> None:
    if config.logger.name != "none":
        with _no_harm("the picture of the loss"):
            plot_loss(run.run_dir)


@contextmanager
def _no_harm(what: str) -> Iterator[None]:
    """What is only for looking at does not stop a run: a failure within is logged."""
    try:
        yield
    except Exception as error:
        logger.warning("%s was not drawn: %s: %s", what, type(error).__name__, error)
