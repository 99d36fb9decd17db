"""Assembly: from a config to one rank's mesh, stages, optimizer, runtime and data. Nothing else knows the order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.batch_plan import BatchPlan, BatchRampConfig
from counterflow.framework.data.documents import DocumentLoader
from counterflow.framework.data.loader import BatchLoader, StepData, TokenDataset
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.devices import count_problems, devices_here
from counterflow.framework.experts.routing import routing_state
from counterflow.framework.memory.offload import offloader_for
from counterflow.framework.optim.apex import KernelChoice, KernelUse, choose_kernel
from counterflow.framework.optim.optimizer import ModelOptimizer
from counterflow.framework.optim.step_guard import StepGuard, StepUndo
from counterflow.framework.optim.updaters.apex import ApexAdamW, use_apex_norms
from counterflow.framework.optim.updaters.bf16_states import StochasticBf16AdamW
from counterflow.framework.optim.updaters.disk_states import DiskStates
from counterflow.framework.optim.updaters.host_states import HostStates, nothing_moves
from counterflow.framework.optim.updaters.updater import TorchAdamW, Updater
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.assembly import Assembly, Axes, ExpectedBubbles
from counterflow.framework.trainer.rebalance import Balancer, initial_placement
from counterflow.models.config import ModelConfig
from counterflow.models.fp8 import use_fp8
from counterflow.models.partition import partition
from counterflow.models.transformer import TransformerStage
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.expert.exchange import CommunicationPoint, ExpertParallel
from counterflow.parallel.mesh import Mesh, build_mesh
from counterflow.parallel.ops.fp8 import why_no_fp8
from counterflow.parallel.pipeline.runtime.overlap import Interleaver
from counterflow.parallel.pipeline.runtime.payload import payload_of
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.stage import ShardedStage

logger = logging.getLogger(__name__)
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPERT_PAYLOAD_DTYPES = {"compute": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def start_process_group(config: TrainConfig, local_rank: int) -> torch.device:
    """Join the process group that the environment describes; this rank's device.

    gloo on a CPU. With CUDA, NCCL for tensors on the device and gloo for those on the host.
    Raises ValueError: where `config.device` is not there for this rank.
    """
    timeout = timedelta(seconds=config.comm.timeout_s)
    devices = devices_here()
    if problems := count_problems(config.device, devices, None):
        raise ValueError(problems[0])
    if devices.kind(config.device) == "cuda":
        device = torch.device("cuda", devices.index(local_rank))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
        return device
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def build(config: TrainConfig, data: PreparedData, device: torch.device) -> Assembly:
    """Assemble this rank; torch.distributed is initialised.

    Raises ValueError: where the layout does not fit the processes, the schedule or the model.
    """
    vocab_size = config.model.vocab_size or data.vocab_size
    workload = Workload(config, vocab_size=vocab_size, on_cpu=device.type == "cpu")
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
        stages[index] = _sharded(module, config, axes, is_tied=is_tied, device=device)
        runtime_stages[index] = Stage(index, module, stages[index])
    runtime = Runtime(
        runtime_stages,
        schedule,
        group=mesh.pipeline,
        reverse_group=mesh.pipeline_reverse,
        device=device,
        meter=axes.meter,
        reschedule=workload.schedule,
        p2p_chunk_bytes=config.comm.p2p_chunk_bytes,
        p2p_payload=payload_of(config.comm.pipeline_payload),
        interleaver=interleaver,
        offloader=offloader_for(
            config,
            workload.room,
            {index: stage.module for index, stage in runtime_stages.items()},
            device=device,
        ),
    )
    validation = None
    if data.validation is not None:
        # Whole batches of the full size, however small the training batch still is.
        whole = replace(config.batch_plan, ramp=BatchRampConfig())
        validation = _loader(config, mesh, TokenDataset(data.validation), whole)
    note = nothing_moves(
        config.optimizer.offload.tier, offload_parameters=config.zero.offload_parameters, device=device
    )
    if note is not None and mesh.rank == 0:
        logger.warning("%s", note)
    guard = StepGuard(
        config.skip_step, config.precision.loss_scale if config.precision.compute == "fp16" else None
    )
    optimizer = optimizer or ModelOptimizer(
        stages.values(),
        config.optimizer,
        tensor=axes.tensor,
        world=axes.world,
        updater=updater_for(config, kernels["optimizer"]),
        guard=guard,
        squares=ApexAdamW.squares if kernels["optimizer"].kernel == "apex" else None,
    )
    return Assembly(
        config=config,
        mesh=mesh,
        axes=axes,
        schedule=schedule,
        stages=stages,
        runtime=runtime,
        optimizer=optimizer,
        train=_training_data(workload, mesh, TokenDataset(data.train)),
        validation=validation,
        num_validation_batches=0 if validation is None else _num_validation_batches(config, validation),
        workload=workload,
        expected_bubbles=ExpectedBubbles(workload),
        device=device,
        balancer=balancer(config),
        undo=step_undo(stages.values(), [stage.module for stage in runtime_stages.values()])
        if guard.can_skip
        else None,
        kernels=named_kernels(kernels, optimizer, is_first=mesh.rank == 0),
    )


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
    module: TransformerStage, config: TrainConfig, axes: Axes, *, is_tied: bool, device: torch.device
) -> ShardedStage:
    context = ZeroContext(
        config=config.zero,
        replica=axes.replicas,
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


def updater_for(config: TrainConfig, kernel: KernelChoice) -> Updater:
    """Who performs the update, and where the moments are; kernel: of torch's AdamW or apex's."""
    offload = config.optimizer.offload
    inner = _updater_in_memory(config, kernel)
    if offload.tier == "host":
        return HostStates(inner)
    if offload.tier == "disk":
        folder = Path(offload.folder or config.launcher.runs_dir)
        return DiskStates(inner, folder, offload.resident_bytes)
    return inner


def _updater_in_memory(config: TrainConfig, kernel: KernelChoice) -> Updater:
    if config.precision.optimizer_states == "bf16":
        return StochasticBf16AdamW(config.optimizer, config.seed)
    if config.optimizer.kernel == "cpu_adam":
        from counterflow.framework.deepspeed.cpu_adam import CpuAdam

        return CpuAdam(config.optimizer)
    if kernel.kernel == "apex":
        return ApexAdamW(config.optimizer)
    return TorchAdamW(config.optimizer)


def kernel_choices(config: TrainConfig, device: torch.device) -> dict[KernelUse, KernelChoice]:
    """What computes updates and norms.

    Raises ValueError: where apex is asked for and cannot be used.
    """
    num_gpus = int(device.type == "cuda")
    optimizer = config.optimizer
    # On the host there is no GPU.
    updating_gpus = 0 if optimizer.offload.tier == "host" else num_gpus
    kernel = "torch" if optimizer.kernel == "cpu_adam" else optimizer.kernel
    return {
        "optimizer": choose_kernel("optimizer", kernel, updating_gpus),
        "norm": choose_kernel("norm", config.precision.norm_kernel, num_gpus),
    }


def named_kernels(
    choices: dict[KernelUse, KernelChoice], optimizer: ModelOptimizer, *, is_first: bool
) -> dict[str, str]:
    """For the record; the first rank says in the log why apex is not used where it was looked for."""
    names = {"optimizer": optimizer.updater.name, "norm": f"{choices['norm'].kernel} norms"}
    if is_first:
        for use, choice in choices.items():
            level = logging.WARNING if choice.is_surprising else logging.INFO
            logger.log(level, "%s: %s (%s)", use, names[use], choice.reason)
    return names


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


def _num_validation_batches(config: TrainConfig, loader: BatchLoader) -> int:
    return min(config.data.validation_batches, loader.num_samples // config.global_batch_size)
