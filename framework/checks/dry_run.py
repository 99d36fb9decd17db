"""The memory of a step, rank by rank, before any rank starts: a dry run of the very step on tensors without values.

Note [Dry run]
Each rank is built and run in this process as it would be in its own: same stages, same schedule, same gathers and
messages, on tensors that have a shape and a storage but no memory (torch's FakeTensorMode) and over a process group
that sends nothing (its `fake` backend). `LiveBytes` counts what is alive at each operation, as it does in a real run,
so what is predicted and what is measured differ only by what kernels take and give back within an operation, and by
how evenly tokens are spread over experts, which a dry run takes for granted.

Ranks of one pipeline rank do the same, so one of each is run.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.batch_plan import StepBatch
from counterflow.framework.data.loader import Batch
from counterflow.framework.experts import routing
from counterflow.framework.memory.live import LiveBytes, Peak
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import Batches, assemble
from counterflow.framework.trainer.step import TokenLoss
from counterflow.parallel.memory_parts import memory_of
from counterflow.parallel.mesh import Coordinate
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.ir.trace import Recorder
from counterflow.parallel.pipeline.runtime.p2p import TensorSpec, channels_of
from counterflow.parallel.zero.stage import add_tied_gradients

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRank:
    """The peak of every rank at pipeline coordinate `pipeline` in a step after the first."""

    pipeline: int
    peak: Peak


def dry_run(config: TrainConfig, *, vocab_size: int | None = None) -> list[DryRank]:
    """The peak of each pipeline rank; no rank is started, and torch.distributed is not initialised.

    vocab_size: None, what the model or the tokenizer is asked for.
    Raises ValueError: where the layout does not fit the schedule or the model, or activations are offloaded.
    """
    if config.offload.is_active:
        raise ValueError(
            f"offload.policy={config.offload.policy}: when activations have left depends on a link, which a dry run "
            "does not have; set offload.policy=none, or measure it"
        )
    workload = Workload.of(config, data_vocab_size=vocab_size, device_type="cpu")
    found: list[DryRank] = []
    for pipeline in range(config.parallel.pipeline_parallel_size):
        rank = config.parallel.rank_of(Coordinate(pipeline=pipeline, data=0, context=0, tensor=0))
        with _alone_as(rank, config.parallel.world_size):
            found.append(DryRank(pipeline=pipeline, peak=_peak_of(workload)))
    return found


@contextmanager
def _alone_as(rank: int, world_size: int) -> Generator[None]:
    """This process is `rank` of a job whose other ranks are not there."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        dist.destroy_process_group()


def _peak_of(workload: Workload) -> Peak:
    batches = Batches(train=_ShapesOnly(workload.config))
    assembly = assemble(workload, _CPU, lambda _: batches)
    _dry_step(assembly)  # as in a run: what the first step leaves is there in the second
    with LiveBytes(held_by(assembly)) as live:
        assembly.runtime.observe = live.mark
        _dry_step(assembly)
    return live.peak


def held_by(assembly: Assembly) -> dict[str, list[torch.Tensor]]:
    """The tensors that a rank keeps between steps, by the part of memory."""
    held: dict[str, list[torch.Tensor]] = {"optimizer": []}
    for stage in assembly.stages.values():
        for unit in stage.units:
            for part, tensors in unit.held().items():
                held.setdefault(part, []).extend(tensors)
    for owned in assembly.optimizer.owned:
        held["optimizer"] += owned.state.values()
    return held


def _dry_step(assembly: Assembly) -> None:
    """As framework/trainer/step.py, but for the values that nobody has."""
    batch = assembly.train.batch(0)
    runtime, schedule = assembly.runtime, assembly.schedule
    _announce_shapes(assembly)
    routing.begin_step(assembly.modules, batch.num_valid_tokens)
    runtime.step(
        batch.tokens,
        batch.targets,
        TokenLoss(assembly, batch.num_valid_tokens),
        num_microbatches=schedule.num_microbatches,
        loss_reduction="sum",
        share_losses=False,
        recorder=Recorder(_CPU),
    )
    add_tied_gradients(assembly.stages.values(), assembly.axes.embedding)
    if runtime.observe is not None:
        runtime.observe("optimizer")
    with memory_of("optimizer"):
        assembly.optimizer.update_unclipped(1e-3)


def _announce_shapes(assembly: Assembly) -> None:
    """What headers of activations would say (parallel/pipeline/runtime/p2p.py)."""
    config, runtime = assembly.config, assembly.runtime
    length = config.data.seq_length
    if config.parallel.sequence_parallel:
        length //= config.parallel.tensor_parallel_size
    shape = (config.data.micro_batch_size, length, config.model.hidden_size)
    dtype = next(assembly.modules[0].parameters()).dtype
    for source, destination, channel in channels_of(assembly.schedule):
        if destination == runtime.rank and channel.kind is Kind.SEND_F:
            flow = runtime.transport.incoming(source, channel)
            flow.specs, flow.uniform = (TensorSpec(shape, dtype),), True


class _ShapesOnly:
    """Batches of the full size, without values."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def batch(self, step: int) -> Batch:
        config = self._config
        shape = (config.data.micro_batch_size, config.data.seq_length)
        tokens, targets = (
            [torch.zeros(shape, dtype=torch.int64) for _ in range(config.schedule.num_microbatches)]
            for _ in range(2)
        )
        return Batch(
            tokens=tokens,
            targets=targets,
            num_valid_tokens=config.global_batch_size * config.data.seq_length,
            num_samples=config.global_batch_size,
        )

    num_samples = 0

    def at(self, step: int) -> StepBatch:
        raise NotImplementedError

    def samples_before(self, step: int) -> int:
        return 0

    def num_tokens(self, step: int) -> int:
        return 0

    def mean_context(self, step: int) -> float:
        return float(self._config.data.seq_length)

    def padding_share(self, step: int) -> float:
        return 0.0
