"""What one rank trains with, as records: filled in by build.py, read by the loop and all that measures or saves it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.loader import BatchLoader, StepData
from counterflow.framework.errors import StoppedError
from counterflow.framework.optim.optimizer import ModelOptimizer
from counterflow.framework.optim.step_guard import StepGuard, StepUndo
from counterflow.framework.planning.costs import schedule_costs
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.rebalance import Balancer
from counterflow.framework.trainer.stop import StopRequest
from counterflow.models.cost import model_cost
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.groups import abort_groups
from counterflow.parallel.mesh import Mesh
from counterflow.parallel.pipeline.analysis.simulate import simulate
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.schedules.registry import bubble_formula
from counterflow.parallel.zero.context import ReplicaAxes
from counterflow.parallel.zero.stage import ShardedStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The mesh axes that collectives of the trainer run over, one byte meter for all.

    replicas, expert_replicas: the ranks that hold the same parameters, and the same experts.
    """

    tensor: Axis
    replicas: ReplicaAxes
    expert: Axis
    expert_replicas: ReplicaAxes
    embedding: Axis
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

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._found: dict[int, ExpectedBubble] = {}

    def of(self, schedule: Schedule) -> ExpectedBubble:
        """`schedule` is the one that the run executes for its number of micro-batches."""
        count = schedule.num_microbatches
        if count not in self._found:
            self._found[count] = expected_bubble(self._workload, schedule)
        return self._found[count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Everything one rank trains with. `validation` is None where nothing is held out.

    undo: what a step that is skipped has changed; None: none is. kernels: what computes updates and norms, by use.
    balancer: None where experts stay where they are. stop: None where nobody can ask the run to stop.
    schedule: of a step with the full batch; while it grows, `runtime.schedule_for` has that of each size.
    """

    config: TrainConfig
    mesh: Mesh
    axes: Axes
    schedule: Schedule
    stages: dict[int, ShardedStage]
    runtime: Runtime
    optimizer: ModelOptimizer
    train: StepData
    validation: BatchLoader | None
    num_validation_batches: int
    workload: Workload
    expected_bubbles: ExpectedBubbles
    device: torch.device
    balancer: Balancer | None = None
    undo: StepUndo | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    stop: StopRequest | None = None

    def training_flops_per_token(self, context: float) -> int:
        """Of a token in a sample of `context` tokens."""
        cost = model_cost(self.config.model, seq_length=round(context), vocab_size=self.vocab_size)
        return cost.training_flops_per_token

    def close(self) -> None:
        """Close what `build` opened: files, threads and process groups; every rank calls it, between steps."""
        self.runtime.close()
        self.optimizer.close()
        self.mesh.close()

    def __enter__(self) -> Assembly:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A rank that is asked to stop does so where the others do.
        if kind is not None and not issubclass(kind, StoppedError):
            abort_groups()
        self.close()

    @property
    def vocab_size(self) -> int:
        return self.workload.vocab_size

    @property
    def guard(self) -> StepGuard:
        """What decides whether a step is made."""
        return self.optimizer.guard

    @property
    def modules(self) -> list[nn.Module]:
        """The stages of this rank, in order."""
        return [stage.module for stage in self.runtime.stages.values()]


def expected_bubble(workload: Workload, schedule: Schedule) -> ExpectedBubble:
    """The bubbles of `schedule`, as it is executed, at the configured costs; and its published formula's."""
    costs = schedule_costs(workload, schedule)
    formula = bubble_formula(schedule, costs)
    simulation = simulate(schedule, costs)
    return ExpectedBubble(
        simulated=simulation.bubble_makespan,
        simulated_span=simulation.bubble_span,
        formula=None if formula is None else formula.fraction,
    )
