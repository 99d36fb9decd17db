"""Pipelines for a user's own modules and loop: no config, no trainer.

pipeline = build_pipeline(make_stage, "dualpipe", num_microbatches=8)
optimizer = torch.optim.AdamW(pipeline.parameters())
for inputs, targets in batches:
    optimizer.zero_grad()
    losses = pipeline.step(inputs, targets, loss_fn).losses
    optimizer.step()
pipeline.close()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis, broadcast
from counterflow.parallel.groups import MakeGroup, among, destroy_group
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import COMPUTE, Schedule
from counterflow.parallel.pipeline.runtime.overlap import Interleaver
from counterflow.parallel.pipeline.runtime.plain_parameters import PlainParameters
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.pipeline.schedules.registry import generate
from counterflow.parallel.pipeline.ties import (
    existing_parameters,
    refuse_ties_between_ranks,
    shared_parameters,
    unique_parameters,
)

logger = logging.getLogger(__name__)


class Pipeline:
    """This rank's part of a pipeline over plain modules. Built by `build_pipeline`; a context manager that closes it.

    step, evaluate, rehearse: those of the `Runtime`. groups: process groups that were made for it, which `close`
    destroys.
    """

    def __init__(self, runtime: Runtime, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self.runtime = runtime
        self.step = runtime.step
        self.evaluate = runtime.evaluate
        self.rehearse = runtime.rehearse
        self._groups = list(groups)

    def close(self) -> None:
        """Give the modules their own forwards back and destroy the process groups that were made for the pipeline.

        It waits for no other rank and may be called again; modules, gradients and the group it was built over stay.
        """
        self.runtime.close()
        for stage in self.runtime.stages.values():
            if isinstance(stage.parameters, PlainParameters):
                stage.parameters.close()
        while self._groups:
            destroy_group(self._groups.pop())

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def schedule(self) -> Schedule:
        return self.runtime.schedule

    @property
    def modules(self) -> dict[int, nn.Module]:
        """This rank's modules by stage."""
        return {index: stage.module for index, stage in self.runtime.stages.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's modules, each once; their gradients are complete after `step`."""
        yield from unique_parameters(self.modules.values())


def build_pipeline(
    make_stage: Callable[[int], nn.Module],
    schedule: str | Schedule,
    *,
    num_microbatches: int | None = None,
    num_chunks: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    early_sends: bool = True,
    uniform_shapes: bool = True,
    p2p_chunk_bytes: int | None = None,
    interleaver: Interleaver | None = None,
) -> Pipeline:
    """A pipeline over the ranks of `group`; every rank of it calls this.

    make_stage: stage index -> module, called for the stages this rank holds. It returns a tensor or a tuple of
        tensors, which are the arguments of the next stage. Linear layers get deferred weight gradients where
        the schedule splits the backward; the gradients of other layers are computed with the input gradient,
        which the log says once. Where the modules were there before, it is called for the other stages too, on the
        meta device, to find parameters that stages on different ranks share (parallel/pipeline/ties.py).
    schedule: a name (`gpipe`, `1f1b`, `dualpipe`, ...) with `num_microbatches` of a step (another step may have
        another number) and where it lets one choose `num_chunks` of a rank, or a Schedule of compute actions.
    early_sends: send each gradient before the weight gradients of its backward, each activation before the
        backward it is paired with.
    p2p_chunk_bytes: larger tensors travel between stages in chunks of at most this; None: whole.
    interleaver: where modules exchange tokens with other ranks, what they call `wait` of once a transfer has started
        (parallel/pipeline/runtime/overlap.py); the halves of a pair then run together.
    group: None is every rank, or this process alone where torch.distributed is not initialised. Two-copy
        schedules start both copies of a stage from the parameters of the lower rank, and sum their gradients.

    Raises ValueError: where the schedule does not fit the group, or breaks a rule (ScheduleError), or where stages on
    different ranks share a parameter.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    num_ranks = 1 if group is None else group.size()
    rank = 0 if group is None else group.rank()
    overlap = interleaver is not None and interleaver.overlap
    reschedule: Callable[[int], Schedule] | None = None
    if isinstance(schedule, str):
        name = schedule
        if num_microbatches is None:
            raise ValueError(f"schedule='{name}' needs num_microbatches; pass how many a step has")

        def with_count(count: int) -> Schedule:
            made = generate(name, num_ranks, count, num_chunks=num_chunks)
            return lower(made, zero_stage=0, early_sends=early_sends, overlap=overlap)

        reschedule = with_count
        schedule = generate(name, num_ranks, num_microbatches, num_chunks=num_chunks)
    if not all(action.kind in COMPUTE for actions in schedule.actions for action in actions):
        raise ValueError(
            f"schedule '{schedule.name}' has communication actions already; pass its compute actions alone"
        )
    if schedule.num_ranks != num_ranks:
        raise ValueError(
            f"the schedule '{schedule.name}' is for {schedule.num_ranks} ranks and the group has {num_ranks}; "
            "generate it for the size of the group"
        )
    lowered = lower(schedule, zero_stage=0, early_sends=early_sends, overlap=overlap)
    verify(lowered)
    existing = existing_parameters()
    modules = {index: make_stage(index) for index in sorted(set(lowered.stages_of(rank)))}
    refuse_ties_between_ranks(make_stage, modules, lowered, existing, group, device or torch.device("cpu"))
    shared = shared_parameters(modules)
    apart = [parameter for parameters in shared.values() for parameter in parameters]
    groups: list[dist.ProcessGroup] = []
    stages: dict[int, Stage] = {}
    plain: dict[int, PlainParameters] = {}
    make_group = None if group is None or num_ranks == 1 else among(group)
    mirrors = _mirror_groups(lowered, make_group)
    for index, module in modules.items():
        mirror = mirrors[index]
        if mirror is not None:
            groups.append(mirror)
            for tensor in (*module.parameters(), *module.buffers()):
                _copy_from_first(tensor, mirror)
        plain[index] = PlainParameters(module, mirror, apart=apart, shared=shared.get(index, ()))
        stages[index] = Stage(index, module, plain[index])
        _log_adoption(stages[index])

    def forget_zeros(unreached: range) -> None:
        for index in set(unreached) & set(plain):
            plain[index].forget_zeros()

    runtime = Runtime(
        stages,
        lowered,
        group=group,
        make_group=make_group,
        device=device,
        reschedule=reschedule,
        uniform_shapes=uniform_shapes,
        p2p_chunk_bytes=p2p_chunk_bytes,
        interleaver=interleaver,
        on_unreached=forget_zeros,
    )
    return Pipeline(runtime, groups)


def _copy_from_first(tensor: Tensor, mirror: dist.ProcessGroup) -> None:
    """Take the values of the lowest rank of `mirror`."""
    values = tensor.data.contiguous()
    broadcast(values, Axis(group=mirror, name="mirror"))
    if values.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(values)


def _mirror_groups(schedule: Schedule, make_group: MakeGroup | None) -> list[dist.ProcessGroup | None]:
    """For each stage the ranks with a copy of it; None where there is one, or this rank has none."""
    if make_group is None:
        return [None] * schedule.num_stages
    return [
        make_group(replicas, f"mirror of stage {stage}") if len(replicas) > 1 else None
        for stage, replicas in enumerate(map(schedule.replicas_of, range(schedule.num_stages)))
    ]


def _log_adoption(stage: Stage) -> None:
    adoption = stage.adoption
    if adoption.immediate:
        logger.info(
            "stage %d: weight gradients of %d parameters are deferred; those of %s are computed with the input "
            "gradient",
            stage.index,
            len(adoption.deferred),
            ", ".join(adoption.immediate),
        )
