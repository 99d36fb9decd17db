"""Assembly: from a config to one rank's mesh, stages, optimizer, runtime and data. Nothing else knows the order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from framework.config import TrainConfig
from framework.config_rules import build_schedule
from framework.costs import schedule_costs
from framework.data.batch_plan import BatchPlan, BatchRampConfig
from framework.data.loader import BatchLoader, TokenDataset
from framework.data.prepare import PreparedData
from framework.optimizer import ModelOptimizer
from framework.rebalance import Balancer
from framework.recompute import as_executed, recompute_plan
from models.config import ModelConfig
from models.cost import model_cost
from models.partition import partition
from models.transformer import TransformerStage
from parallel.collectives import Axis, ByteMeter
from parallel.expert import CommunicationPoint, ExpertParallel, even_placement
from parallel.mesh import Mesh, build_mesh
from parallel.pipeline.action import Schedule
from parallel.pipeline.overlap import Interleaver
from parallel.pipeline.runtime import Runtime
from parallel.pipeline.simulate import bubble_formula, simulate
from parallel.pipeline.stage import Stage
from parallel.pipeline.verify import verify
from parallel.zero import ShardedStage

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXPERT_PAYLOAD_DTYPES = {"compute": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The mesh axes that collectives of the trainer run over, one byte meter for all."""

    tensor: Axis
    replica: Axis
    expert: Axis
    expert_replica: Axis
    ends: Axis
    world: Axis
    meter: ByteMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBubble:
    """The bubble that theory gives for the schedule's configured costs; simulated_span: by span, not makespan."""

    simulated: float
    simulated_span: float
    formula: float | None


class ExpectedBubbles:
    """The `ExpectedBubble` of each schedule of a run, worked out once for each number of micro-batches."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._found: dict[int, ExpectedBubble] = {}

    def of(self, schedule: Schedule) -> ExpectedBubble:
        """`schedule` is the one that the run executes for its number of micro-batches."""
        count = schedule.num_microbatches
        if count not in self._found:
            self._found[count] = expected_bubble(self._config, schedule)
        return self._found[count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Everything one rank trains with. `validation` is None where nothing is held out.

    balancer: None where experts stay where they are.
    schedule: of a step with the full batch; while it grows, `runtime.schedule_for` has that of each size.
    """

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
    expected_bubbles: ExpectedBubbles
    device: torch.device
    balancer: Balancer | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """The stages of this rank, in order."""
        return [stage.module for stage in self.runtime.stages.values()]


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
    schedule = lowered_schedule(config, config.schedule.num_microbatches)
    verify(schedule)
    mesh = build_mesh(config.parallel, mirrored=schedule.num_directions > 1)
    meter = ByteMeter()
    axes = Axes(
        tensor=Axis(group=mesh.tensor, name="tensor", meter=meter),
        replica=Axis(group=mesh.replica, name="data", meter=meter),
        expert=Axis(group=mesh.expert, name="expert", meter=meter),
        expert_replica=Axis(group=mesh.expert_replica, name="expert_data", meter=meter),
        ends=Axis(group=mesh.ends, name="pipeline", meter=meter),
        world=Axis(group=mesh.world, name="world", meter=meter),
        meter=meter,
    )
    vocab_size = config.model.vocab_size or data.vocab_size
    slices = partition(
        config.model, schedule.num_stages, seq_length=config.data.seq_length, vocab_size=vocab_size
    )
    # Without overlap it still measures what is exposed.
    interleaver = Interleaver(overlap=config.overlaps_experts) if axes.expert.size > 1 else None
    experts = expert_parallel(config, axes.expert, interleaver)
    plan = recompute_plan(config, schedule, vocab_size=vocab_size, on_cpu=device.type == "cpu")
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
            experts=experts,
            recomputed=plan,
            device="meta",
            dtype=COMPUTE_DTYPES[config.precision.compute],
        )
        stages[index] = ShardedStage(
            module,
            config.zero,
            replica=axes.replica,
            tensor=axes.tensor,
            expert_replica=axes.expert_replica,
            dtype=COMPUTE_DTYPES[config.precision.compute],
            device=device,
            seed=config.seed,
            is_tied=schedule.num_stages > 1 and has_tie(config.model),
            compression=config.compression,
        )
        runtime_stages[index] = Stage(index, module, stages[index])
    runtime = Runtime(
        runtime_stages,
        schedule,
        group=mesh.pipeline,
        reverse_group=mesh.pipeline_reverse,
        device=device,
        meter=meter,
        reschedule=lambda count: lowered_schedule(config, count),
        p2p_chunk_bytes=config.comm.p2p_chunk_bytes,
        interleaver=interleaver,
    )
    validation = None
    if data.validation is not None:
        # Whole batches of the full size, however small the training batch still is.
        whole = replace(config.batch_plan, ramp=BatchRampConfig())
        validation = _loader(config, mesh, TokenDataset(data.validation), whole)
    cost = model_cost(config.model, seq_length=config.data.seq_length, vocab_size=vocab_size)
    return Assembly(
        config=config,
        mesh=mesh,
        axes=axes,
        schedule=schedule,
        stages=stages,
        runtime=runtime,
        optimizer=ModelOptimizer(stages.values(), config.optimizer, tensor=axes.tensor, world=axes.world),
        train=_loader(config, mesh, TokenDataset(data.train), config.batch_plan),
        validation=validation,
        num_validation_batches=0 if validation is None else _num_validation_batches(config, validation),
        vocab_size=vocab_size,
        training_flops_per_token=cost.training_flops_per_token,
        expected_bubbles=ExpectedBubbles(config),
        device=device,
        balancer=balancer(config),
    )


def lowered_schedule(config: TrainConfig, num_microbatches: int) -> Schedule:
    """What the ranks execute in a step of so many micro-batches.

    Raises ValueError: where the schedule does not take them.
    """
    counted = replace(config.schedule, num_microbatches=num_microbatches)
    return as_executed(config, build_schedule(counted, config.parallel))


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
        experts_by_rank=even_placement(config.model.moe.num_experts, axis.size),
        point=point,
        payload_dtype=EXPERT_PAYLOAD_DTYPES[config.comm.expert_payload],
    )


def expected_bubble(config: TrainConfig, schedule: Schedule) -> ExpectedBubble:
    """The bubbles of `schedule`, as it is executed, at the configured costs; and its published formula's."""
    costs = schedule_costs(config, schedule)
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
