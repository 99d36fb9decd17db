"""Assembly: from a config to one rank's mesh, stages, optimizer, runtime and data. Nothing else knows the order."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from framework.config import TrainConfig, build_schedule
from framework.data.loader import BatchLoader, TokenDataset
from framework.data.prepare import PreparedData
from framework.optimizer import ModelOptimizer
from models.cost import model_cost
from models.partition import partition
from models.transformer import TransformerStage
from parallel.collectives import Axis, ByteMeter
from parallel.mesh import Mesh, build_mesh
from parallel.pipeline.action import Schedule
from parallel.pipeline.passes import lower
from parallel.pipeline.runtime import Runtime
from parallel.pipeline.simulate import bubble_formula, costs_from, simulate
from parallel.pipeline.stage import Stage
from parallel.pipeline.verify import verify
from parallel.zero import ShardedStage

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The mesh axes that collectives of the trainer run over, one byte meter for all."""

    tensor: Axis
    replica: Axis
    ends: Axis
    world: Axis
    meter: ByteMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBubble:
    """The bubble that theory gives for the schedule's configured costs; simulated_span: by span, not makespan."""

    simulated: float
    simulated_span: float
    formula: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Everything one rank trains with. `validation` is None where nothing is held out."""

    config: TrainConfig
    mesh: Mesh
    axes: Axes
    schedule: Schedule
    stages: dict[int, ShardedStage]
    runtime: Runtime
    optimizer: ModelOptimizer
    train: BatchLoader
    validation: BatchLoader | None
    num_validation_batches: int
    vocab_size: int
    training_flops_per_token: int
    expected_bubble: ExpectedBubble
    device: torch.device


def start_process_group(config: TrainConfig, local_rank: int) -> torch.device:
    """Join the process group that the environment describes; this rank's device.

    gloo on a CPU. With CUDA, NCCL for tensors on the device and gloo for those on the host.
    """
    timeout = timedelta(seconds=config.comm.timeout_s)
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
        return device
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def build(config: TrainConfig, data: PreparedData, device: torch.device) -> Assembly:
    """Assemble this rank; torch.distributed is initialised.

    Raises ValueError: where the layout does not fit the processes, the schedule or the model.
    """
    compute_schedule = build_schedule(config.schedule, config.parallel)
    schedule = lower(
        compute_schedule,
        zero_stage=config.zero.stage,
        reshard_after=config.zero.reshard_after,
        early_sends=config.schedule.early_sends,
    )
    verify(schedule)
    mesh = build_mesh(config.parallel, mirrored=schedule.num_directions > 1)
    meter = ByteMeter()
    axes = Axes(
        tensor=Axis(group=mesh.tensor, name="tensor", meter=meter),
        replica=Axis(group=mesh.replica, name="data", meter=meter),
        ends=Axis(group=mesh.ends, name="pipeline", meter=meter),
        world=Axis(group=mesh.world, name="world", meter=meter),
        meter=meter,
    )
    vocab_size = config.model.vocab_size or data.vocab_size
    slices = partition(
        config.model, schedule.num_stages, seq_length=config.data.seq_length, vocab_size=vocab_size
    )
    stages: dict[int, ShardedStage] = {}
    runtime_stages: dict[int, Stage] = {}
    # In one order on every rank: the two ranks of a mirror pair share the collectives of both their stages.
    for index in sorted(schedule.stages_of(mesh.coordinate.pipeline)):
        module = TransformerStage(
            config.model,
            slices[index].layers,
            first=slices[index].first,
            last=slices[index].last,
            tensor=axes.tensor,
            sequence_parallel=config.parallel.sequence_parallel,
            vocab_size=vocab_size,
            device="meta",
            dtype=COMPUTE_DTYPES[config.precision.compute],
        )
        stages[index] = ShardedStage(
            module,
            config.zero,
            replica=axes.replica,
            tensor=axes.tensor,
            dtype=COMPUTE_DTYPES[config.precision.compute],
            device=device,
            seed=config.seed,
            is_tied=config.model.tie_embeddings and schedule.num_stages > 1,
        )
        runtime_stages[index] = Stage(index, module, stages[index])
    runtime = Runtime(
        runtime_stages,
        schedule,
        group=mesh.pipeline,
        reverse_group=mesh.pipeline_reverse,
        device=device,
        meter=meter,
    )
    validation = None if data.validation is None else _loader(config, mesh, TokenDataset(data.validation))
    cost = model_cost(config.model, seq_length=config.data.seq_length, vocab_size=vocab_size)
    return Assembly(
        config=config,
        mesh=mesh,
        axes=axes,
        schedule=schedule,
        stages=stages,
        runtime=runtime,
        optimizer=ModelOptimizer(stages.values(), config.optimizer, tensor=axes.tensor, world=axes.world),
        train=_loader(config, mesh, TokenDataset(data.train)),
        validation=validation,
        num_validation_batches=0 if validation is None else _num_validation_batches(config, validation),
        vocab_size=vocab_size,
        training_flops_per_token=cost.training_flops_per_token,
        expected_bubble=expected_bubble(config, schedule),
        device=device,
    )


def expected_bubble(config: TrainConfig, schedule: Schedule) -> ExpectedBubble:
    """The bubbles of `schedule`, as it is executed, at the configured costs; and its published formula's."""
    costs = costs_from(config.schedule.costs, schedule.num_stages)
    formula = bubble_formula(
        schedule.name,
        schedule.num_ranks,
        schedule.num_microbatches,
        costs,
        num_chunks=schedule.num_stages // schedule.num_ranks,
    )
    simulation = simulate(schedule, costs)
    return ExpectedBubble(
        simulated=simulation.bubble_makespan,
        simulated_span=simulation.bubble_span,
        formula=None if formula is None else formula.fraction,
    )


def _loader(config: TrainConfig, mesh: Mesh, dataset: TokenDataset) -> BatchLoader:
    return BatchLoader(
        dataset,
        seed=config.seed,
        seq_length=config.data.seq_length,
        micro_batch_size=config.data.micro_batch_size,
        num_microbatches=config.schedule.num_microbatches,
        data_parallel_rank=mesh.coordinate.data,
        data_parallel_size=mesh.config.data_parallel_size,
    )


def _num_validation_batches(config: TrainConfig, loader: BatchLoader) -> int:
    return min(config.data.validation_batches, loader.num_samples // loader.global_batch_size)
