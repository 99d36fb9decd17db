"""Assembly: from a config to one rank's mesh, stages, optimizer, runtime and data. Nothing else knows the order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.batch_plan import BatchPlan, BatchRampConfig
from counterflow.framework.data.documents import DocumentLoader
from counterflow.framework.data.loader import BatchLoader, StepData, TokenDataset
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.experts.routing import routing_state
from counterflow.framework.memory.offload import offloader_for
from counterflow.framework.optim.apex import KernelChoice, KernelUse
from counterflow.framework.optim.optimizer import ModelOptimizer
from counterflow.framework.optim.step_guard import StepGuard, StepUndo
from counterflow.framework.optim.updaters.apex import ApexAdamW, use_apex_norms
from counterflow.framework.optim.updaters.host_states import nothing_moves
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.assembly import Assembly, Axes, ExpectedBubbles
from counterflow.framework.trainer.kernels import kernel_choices, named_kernels, updater_for
from counterflow.framework.trainer.rebalance import Balancer, initial_placement
from counterflow.models.config import ModelConfig
from counterflow.models.fp8 import use_fp8
from counterflow.models.partition import partition
from counterflow.models.transformer import TransformerStage
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.expert.exchange import CommunicationPoint, ExpertParallel
from counterflow.parallel.groups import among_rows
from counterflow.parallel.mesh import Mesh, build_mesh, pipelines_of
from counterflow.parallel.ops.fp8 import why_no_fp8
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.runtime.overlap import Interleaver
from counterflow.parallel.pipeline.runtime.payload import payload_of
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.stage import ShardedStage

logger = logging.getLogger(__name__)
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPERT_PAYLOAD_DTYPES = {"compute": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def build(config: TrainConfig, data: PreparedData, device: torch.device) -> Assembly:
    """Assemble this rank; torch.distributed is initialised.

    Raises ValueError: where the layout does not fit the processes, the schedule or the model.
    """
    workload = Workload.of(
        config, data_vocab_size=data.vocab_size, device_type="cpu" if device.type == "cpu" else "cuda"
    )
    return assemble(workload, device, lambda mesh: batches_of(workload, mesh, data))


def assemble(workload: Workload, device: torch.device, batches: Callable[[Mesh], Batches]) -> Assembly:
    """As `build`; what the rank trains on comes from `batches`."""
    config = workload.config
    model = build_model(workload, device)
    runtime = build_runtime(workload, model, device)
    guard = StepGuard(
        config.skip_step, config.precision.loss_scale if config.precision.compute == "fp16" else None
    )
    optimizer = model.optimizer or build_optimizer(config, model, guard, device)
    data = batches(model.mesh)
    return Assembly(
        config=config,
        mesh=model.mesh,
        axes=model.axes,
        schedule=model.schedule,
        stages=model.stages,
        runtime=runtime,
        optimizer=optimizer,
        train=data.train,
        validation=data.validation,
        num_validation_batches=data.num_validation_batches,
        workload=workload,
        expected_bubbles=ExpectedBubbles(workload),
        device=device,
        balancer=balancer(config),
        undo=step_undo(model.stages.values(), [stage.module for stage in runtime.stages.values()])
        if guard.can_skip
        else None,
        kernels=named_kernels(model.kernels, optimizer, is_first=model.mesh.rank == 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """This rank's part of the model, on its mesh.

    stages: the parameters of each stage, by index. runtime_stages: what the runtime runs. kernels: what computes
    updates and norms, by use. interleaver: where tokens of experts are waited for; None: none travel.
    optimizer: that of DeepSpeed's engine; None: the project's own trains it.
    """

    mesh: Mesh
    axes: Axes
    schedule: Schedule
    stages: dict[int, ShardedStage]
    runtime_stages: dict[int, Stage]
    kernels: dict[KernelUse, KernelChoice]
    interleaver: Interleaver | None
    optimizer: ModelOptimizer | None


def build_model(workload: Workload, device: torch.device) -> BuiltModel:
    """Mesh, groups and stages with their initial values. In one order on every rank: groups are made together.

    Raises ValueError: as `build`.
    """
    config, vocab_size = workload.config, workload.vocab_size
    schedule = workload.schedule(workload.full_size)
    mesh = build_mesh(
        config.parallel, mirrored=schedule.num_directions > 1, shard_size=config.zero.shard_size
    )
    axes = _axes_of(mesh)
    slices = partition(
        config.model, schedule.num_stages, seq_length=config.data.seq_length, vocab_size=vocab_size
    )
    # Without overlap it still measures what is exposed.
    interleaver = Interleaver(overlap=config.overlaps_experts) if axes.expert.size > 1 else None
    experts = expert_parallel(config, axes.expert, interleaver)
    kernels = kernel_choices(config, device)
    stages: dict[int, ShardedStage] = {}
    runtime_stages: dict[int, Stage] = {}
    optimizer: ModelOptimizer | None = None
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
            experts=experts,
            recomputed=workload.recompute_plan,
            loss_chunk_tokens=config.loss.chunk_tokens,
            device="meta",
            dtype=COMPUTE_DTYPES[config.precision.compute],
        )
        if config.zero.engine == "deepspeed":
            # Not above: it imports DeepSpeed, which takes a second.
            from counterflow.framework.deepspeed.engine import build_engine

            runtime_stages[index], optimizer = build_engine(
                module, config, mesh, tensor=axes.tensor, world=axes.world, device=device
            )
            continue
        _choose_kernels(module, config, kernels["norm"], device)
        is_tied = schedule.num_stages > 1 and has_tie(config.model)
        stages[index] = _sharded(
            module, config, axes, pipeline=mesh.coordinate.pipeline, is_tied=is_tied, device=device
        )
        runtime_stages[index] = Stage(index, module, stages[index])
    return BuiltModel(
        mesh=mesh,
        axes=axes,
        schedule=schedule,
        stages=stages,
        runtime_stages=runtime_stages,
        kernels=kernels,
        interleaver=interleaver,
        optimizer=optimizer,
    )


def build_runtime(workload: Workload, model: BuiltModel, device: torch.device) -> Runtime:
    """What executes the schedule over the stages of `model`."""
    config = workload.config
    return Runtime(
        model.runtime_stages,
        model.schedule,
        group=model.mesh.pipeline,
        make_group=among_rows(pipelines_of(model.mesh.config)),
        device=device,
        meter=model.axes.meter,
        reschedule=workload.schedule,
        p2p_chunk_bytes=config.comm.p2p_chunk_bytes,
        p2p_payload=payload_of(config.comm.pipeline_payload),
        interleaver=model.interleaver,
        offloader=offloader_for(
            config,
            workload.activation_budget,
            {index: stage.module for index, stage in model.runtime_stages.items()},
            device=device,
        ),
    )


def build_optimizer(
    config: TrainConfig, model: BuiltModel, guard: StepGuard, device: torch.device
) -> ModelOptimizer:
    """What updates the masters of `model`; guard: what decides whether a step is made."""
    note = nothing_moves(
        config.optimizer.offload.tier, offload_parameters=config.zero.offload_parameters, device=device
    )
    if note is not None and model.mesh.rank == 0:
        logger.warning("%s", note)
    kernel = model.kernels["optimizer"]
    return ModelOptimizer(
        model.stages.values(),
        config.optimizer,
        tensor=model.axes.tensor,
        world=model.axes.world,
        updater=updater_for(config, kernel),
        guard=guard,
        squares=ApexAdamW.squares if kernel.kernel == "apex" else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """What a rank trains on, and what is held out; validation: None where nothing is."""

    train: StepData
    validation: BatchLoader | None = None
    num_validation_batches: int = 0


def batches_of(workload: Workload, mesh: Mesh, data: PreparedData) -> Batches:
    """This rank's part of the prepared `data`."""
    config = workload.config
    train = _training_data(workload, mesh, TokenDataset(data.train))
    if data.validation is None:
        return Batches(train=train)
    # Whole batches of the full size, however small the training batch still is.
    whole = replace(config.batch_plan, ramp=BatchRampConfig())
    validation = _loader(config, mesh, TokenDataset(data.validation), whole)
    count = min(config.data.validation_batches, validation.num_samples // config.global_batch_size)
    return Batches(train=train, validation=validation, num_validation_batches=count)


def _axes_of(mesh: Mesh) -> Axes:
    meter = ByteMeter()

    def replicas(groups: Sequence[dist.ProcessGroup | None], name: str) -> ReplicaAxes:
        whole, shard, across = (Axis(group=group, name=name, meter=meter) for group in groups)
        return ReplicaAxes(whole=whole, shard=shard, across=across)

    return Axes(
        tensor=Axis(group=mesh.tensor, name="tensor", meter=meter),
        replicas=replicas((mesh.replica, mesh.shard, mesh.shard_replica), "data"),
        expert=Axis(group=mesh.expert, name="expert", meter=meter),
        expert_replicas=replicas(
            (mesh.expert_replica, mesh.expert_shard, mesh.expert_shard_replica), "expert_data"
        ),
        embedding=Axis(group=mesh.embedding, name="pipeline", meter=meter),
        world=Axis(group=mesh.world, name="world", meter=meter),
        meter=meter,
    )


def _choose_kernels(
    module: TransformerStage, config: TrainConfig, norm: KernelChoice, device: torch.device
) -> None:
    if config.precision.linear == "fp8":
        problem = why_no_fp8(device)
        if problem is not None:
            raise ValueError(f"precision.linear=fp8: {problem}; set precision.linear=compute")
        use_fp8(module)
    if norm.kernel == "apex":
        use_apex_norms(module)


def _sharded(
    module: TransformerStage,
    config: TrainConfig,
    axes: Axes,
    *,
    pipeline: int,
    is_tied: bool,
    device: torch.device,
) -> ShardedStage:
    context = ZeroContext(
        config=config.zero,
        replica=axes.replicas,
        pipeline=pipeline,
        tensor=axes.tensor,
        expert_replica=axes.expert_replicas,
        expert=axes.expert,
        dtype=COMPUTE_DTYPES[config.precision.compute],
        device=device,
        compression=config.compression,
        host_masters=config.optimizer.offload.tier == "host" and device.type != "cpu",
        reduce_dtype=COMPUTE_DTYPES[config.precision.reduce],
    )
    return ShardedStage(module, context, blocks=module.blocks(), seed=config.seed, is_tied=is_tied)


def balancer(config: TrainConfig) -> Balancer | None:
    """What moves experts between ranks; None: nothing does."""
    if config.balance.interval_steps == 0:
        return None
    return Balancer(
        config.balance,
        num_experts=config.model.moe.num_experts,
        num_groups=config.model.moe.num_groups,
        ep_size=config.parallel.expert_parallel_size,
    )


def step_undo(stages: Iterable[ShardedStage], modules: Iterable[nn.Module]) -> StepUndo:
    """Copies of what a step changes before it is known whether it is made."""
    reductions = (unit.reduction for stage in stages for unit in stage.units)
    return StepUndo(routing_state(modules).values(), reductions)


def has_tie(model: ModelConfig) -> bool:
    """Whether a last stage that is not the first holds a copy of the embedding: for the head, or for MTP modules."""
    return model.tie_embeddings or model.mtp.num_modules > 0


def expert_parallel(
    config: TrainConfig, axis: Axis, point: CommunicationPoint | None = None
) -> ExpertParallel | None:
    """Who holds which experts of each layer, and how tokens get there; None: the model has no experts."""
    if config.model.moe.num_experts == 0:
        return None
    return ExpertParallel(
        axis=axis,
        experts_by_rank=initial_placement(
            config.balance, num_experts=config.model.moe.num_experts, ep_size=axis.size
        ),
        num_nodes=config.balance.num_nodes,
        point=point,
        payload_dtype=EXPERT_PAYLOAD_DTYPES[config.comm.expert_payload],
    )


def _training_data(workload: Workload, mesh: Mesh, dataset: TokenDataset) -> StepData:
    config = workload.config
    if config.data.batching == "windows":
        return _loader(config, mesh, dataset, config.batch_plan)
    assert config.data.tokens_per_step is not None
    return DocumentLoader(
        dataset,
        seed=config.seed,
        seq_length=config.data.seq_length,
        tokens_per_step=config.data.tokens_per_step,
        micro_batch_tokens=config.data.micro_batch_size * config.data.seq_length,
        pad_multiple=config.parallel.tensor_parallel_size if config.parallel.sequence_parallel else 1,
        data_parallel_rank=mesh.coordinate.data,
        data_parallel_size=mesh.config.data_parallel_size,
        next_count=workload.next_size,
    )


def _loader(config: TrainConfig, mesh: Mesh, dataset: TokenDataset, plan: BatchPlan) -> BatchLoader:
    return BatchLoader(
        dataset,
        seed=config.seed,
        seq_length=config.data.seq_length,
        micro_batch_size=config.data.micro_batch_size,
        plan=plan,
        data_parallel_rank=mesh.coordinate.data,
        data_parallel_size=mesh.config.data_parallel_size,
    )
