"""Optimizer steps over this rank's fragments, and one global clip norm counted right across every axis.

Note [Post-validation]
An ordinary step waits until every rank of the pipeline has its gradients, for the norm of them all. With
`optimizer.post_validation` a rank that expects no clipping starts the sum of the norm, updates its stage at once
and goes on with the next step (`step_ahead`); when the norm is there, and before gradients are zeroed, it is held
against the limit (`validate`). Where it was too large or not finite, masters, moments and step count are put back
from copies and the step is done again, clipped: to the bit what the ordinary step gives, for the norm is the same
sum in the same order. After a step that was clipped the next one waits, for most likely it is clipped as well.
Where the step is not to be made at all (framework/optim/step_guard.py), it is undone.
Method: Qi et al., arXiv 2401.10241, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.rollback import Rollback
from counterflow.framework.optim.step_guard import StepGuard, StepVerdict
from counterflow.framework.optim.updaters.updater import Part, TorchAdamW, Updater
from counterflow.parallel.collectives import Axis, all_reduce
from counterflow.parallel.pipeline.ir.trace import Activity, Recorder
from counterflow.parallel.zero.layout import Fragment, PersistentBytes
from counterflow.parallel.zero.stage import ShardedStage
from counterflow.parallel.zero.unit import FlatUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedFragment:
    """A fragment with the unit it is cut from and its optimizer state, [stop - start] each."""

    unit: FlatUnit
    fragment: Fragment
    state: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What became of a step that was made ahead, and whether it was undone, and done again or skipped."""

    verdict: StepVerdict
    is_redone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """The sum of squares over all ranks, and the loss where the guard reads it, fp64 [1] or [2], once `work` (None: at
    once) is done."""

    sums: Tensor
    work: dist.Work | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """A step that is not validated yet."""

    norm: _Norm
    learning_rate: float


class ModelOptimizer:
    """AdamW on the fp32 masters of every stage this rank holds.

    tensor, world: the axes over which the gradient norm is summed, each parameter counted once. updater: who does
    the update; None: torch. guard: decides whether a step is made; None: it always is, unless
    its norm is not finite. squares: the sum of squares of tensors, fp64; None: `sum_of_squares`.
    """

    def __init__(
        self,
        stages: Iterable[ShardedStage],
        config: OptimizerConfig,
        *,
        tensor: Axis,
        world: Axis,
        updater: Updater | None = None,
        guard: StepGuard | None = None,
        squares: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ) -> None:
        self._config, self._tensor, self._world = config, tensor, world
        self._stages = tuple(stages)
        self.updater = updater or TorchAdamW(config)
        self.guard = guard or StepGuard()
        self._squares = squares or sum_of_squares
        self.owned = [
            OwnedFragment(unit=unit, fragment=fragment, state=self.updater.new_state(fragment.master))
            for unit in self._units()
            for fragment in unit.fragments()
        ]
        self.num_steps = 0
        self._ahead: _Ahead | None = None
        self._expects_clip = False
        self._rollback: Rollback | None = None
        if config.post_validation:
            states = (tensor for owned in self.owned for tensor in owned.state.values())
            self._rollback = Rollback([*(unit.master for unit in self._units()), *states])

    def _units(self) -> Iterator[FlatUnit]:
        for stage in self._stages:
            yield from stage.units

    def _parts(self) -> list[Part]:
        return [
            Part(
                master=owned.fragment.master,
                grad=owned.fragment.grad,
                state=owned.state,
                weight_decay=self._config.weight_decay if owned.fragment.slot.placement.weight_decay else 0.0,
                key=_key_of(owned.fragment),
            )
            for owned in self.owned
        ]

    def close(self) -> None:
        """Close what the updater opened."""
        self.updater.close()

    def read_placements(self) -> None:
        """Take the placements of the parameters anew, after experts have been moved into others' slots."""
        for unit in self._units():
            unit.read_placements()
        slots = {(id(unit), slot.name): slot for unit in self._units() for slot in unit.slots}
        for index, owned in enumerate(self.owned):
            slot = slots[id(owned.unit), owned.fragment.slot.name]
            self.owned[index] = replace(owned, fragment=replace(owned.fragment, slot=slot))

    def restore(self, num_steps: int) -> None:
        """Go on after `num_steps` updates; the tensors of `owned` have been filled, masters and state."""
        assert not self.is_ahead
        self.num_steps = num_steps
        self._sync_parameters()

    @torch.no_grad()
    def gradient_norm(self, recorder: Recorder | None = None) -> float:
        """The norm of the whole model's reduced gradients.

        A rank counts the elements of its own shard. A parameter that every tensor-parallel rank holds whole is
        counted by the first of them, the second copy of a tied one by nobody, nor are further copies of an expert; the
        tensor axis is no such copy for experts, whose replicas it is a part of.
        """
        # Here a rank waits for the slowest one.
        with _recorded(recorder, Activity.COLLECTIVE_WAIT):
            return self._wait(self._start_norm())[0]

    def _start_norm(self, loss: Tensor | float = 0.0) -> _Norm:
        sums = torch.zeros(2 if self.guard.reads_loss else 1, dtype=torch.float64, device=self._device)
        if self.guard.reads_loss:
            sums[1] = loss
        counted: list[Tensor] = []
        for owned in self.owned:
            placement = owned.fragment.slot.placement
            is_replicated = placement.tensor_dim is None and placement.experts is None
            if placement.tied_to is None and not (is_replicated and self._tensor.rank > 0):
                ranges = owned.unit.counted_ranges(owned.fragment)
                counted += [owned.fragment.grad[each] for each in ranges]
        if counted:
            sums[0] = self._squares(counted)
        return _Norm(sums=sums, work=all_reduce(sums, self._world, op=dist.ReduceOp.SUM, async_op=True))

    @staticmethod
    def _wait(norm: _Norm) -> tuple[float, float]:
        """The norm, and the loss or 0."""
        if norm.work is not None:
            norm.work.wait()
        squares, *loss = norm.sums.tolist()
        return math.sqrt(squares), sum(loss)

    @torch.no_grad()
    def step(
        self, learning_rate: float, recorder: Recorder | None = None, loss: Tensor | float = 0.0
    ) -> StepVerdict:
        """Clip, update the masters and bring them to the parameters; the norm is that before clipping.

        loss: this rank's part of it. Where the guard says so the step is skipped.
        Raises FloatingPointError: where the norm is not finite and that is not to be skipped; nothing was updated.
        """
        assert not self.is_ahead, "the step before has to be validated first"
        with _recorded(recorder, Activity.COLLECTIVE_WAIT):
            norm, total = self._wait(self._start_norm(loss))
        skipped = self.guard.judge(total, norm, self.num_steps)
        if skipped is None:
            self._finish(norm, learning_rate)
        return StepVerdict(grad_norm=norm, skipped=skipped)

    @torch.no_grad()
    def update_unclipped(self, learning_rate: float) -> None:
        """Update without looking at the norm, whose value a dry run does not have."""
        self._update(learning_rate)

    @property
    def can_step_ahead(self) -> bool:
        """Whether the next step may be made before its norm is known; the same on every rank."""
        return self._rollback is not None and not self._expects_clip and not self.guard.may_change_scale

    @property
    def is_ahead(self) -> bool:
        """Whether the last step is not validated yet: parameters, moments and step count may still change."""
        return self._ahead is not None

    @torch.no_grad()
    def step_ahead(self, learning_rate: float, loss: Tensor | float = 0.0) -> None:
        """Update and publish as if nothing had to be clipped, without waiting for ranks of other stages.

        `validate` follows before the next step zeroes the gradients.
        """
        assert self._rollback is not None
        assert not self.is_ahead, "the step before has to be validated first"
        self._ahead = _Ahead(norm=self._start_norm(loss), learning_rate=learning_rate)
        self._rollback.keep()
        self._update(learning_rate)

    @torch.no_grad()
    def validate(self, recorder: Recorder | None = None) -> Validation:
        """Wait for the norm of the step that was made ahead; where it does not stand, undo it and do it again.

        Raises FloatingPointError: as `step`; the update was undone.
        """
        assert self._ahead is not None
        assert self._rollback is not None
        ahead, self._ahead = self._ahead, None
        with _recorded(recorder, Activity.COLLECTIVE_WAIT):
            norm, loss = self._wait(ahead.norm)
        error: FloatingPointError | None = None
        verdict = StepVerdict(grad_norm=norm)
        try:
            verdict = StepVerdict(grad_norm=norm, skipped=self.guard.judge(loss, norm, self.num_steps - 1))
        except FloatingPointError as raised:
            error = raised
        is_made = error is None and verdict.skipped is None
        if is_made and not self._is_clipped(norm):
            return Validation(verdict=verdict, is_redone=False)
        with _recorded(recorder, Activity.OPTIMIZER):
            self._rollback.restore()
            self.num_steps -= 1
            if is_made:
                self._finish(norm, ahead.learning_rate)
            else:
                self._sync_parameters()
        if error is not None:
            raise error
        return Validation(verdict=verdict, is_redone=True)

    def _is_clipped(self, norm: float) -> bool:
        limit = self._config.max_grad_norm
        return limit is not None and norm > limit

    def _clip_factor(self, norm: float) -> float:
        """By which gradients are multiplied where they are clipped; as torch.nn.utils.clip_grad_norm_ does."""
        assert self._config.max_grad_norm is not None
        return self._config.max_grad_norm / (norm + 1e-6)

    def _finish(self, norm: float, learning_rate: float) -> None:
        """The step, once the norm is known to be sound."""
        self._expects_clip = self._is_clipped(norm)
        if self._expects_clip:
            for unit in self._units():
                unit.grad.mul_(self._clip_factor(norm))
        self._update(learning_rate)

    def _update(self, learning_rate: float) -> None:
        self.updater.update(self._parts(), step=self.num_steps + 1, learning_rate=learning_rate)
        self.num_steps += 1
        self._sync_parameters()

    def _sync_parameters(self) -> None:
        for stage in self._stages:
            stage.sync_parameters()

    @property
    def _device(self) -> torch.device:
        return self.owned[0].fragment.grad.device if self.owned else torch.device("cpu")

    def persistent_bytes(self, *, experts_only: bool = False) -> PersistentBytes:
        """Parameters, gradients and optimizer state, with its copies, that stay on this rank between steps."""
        units = [unit for unit in self._units() if unit.has_experts or not experts_only]
        held = sum((unit.persistent_bytes() for unit in units), PersistentBytes(parameters=0, gradients=0))
        state = sum(
            tensor.nbytes for owned in self.owned if owned.unit in units for tensor in owned.state.values()
        )
        copies = 0 if self._rollback is None else sum(unit.master.nbytes for unit in units) + state
        buffers = 0 if experts_only else self.updater.resident_bytes
        if self.updater.is_on_disk:
            return held + PersistentBytes(parameters=0, gradients=0, optimizer=buffers, disk=state)
        if held.host:  # masters are there, and so are moments
            return held + PersistentBytes(parameters=0, gradients=0, host=state + buffers + copies)
        return held + PersistentBytes(parameters=0, gradients=0, optimizer=state + copies)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of one tensor or more, each squared and added up in fp64."""
    squares = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        squares += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return squares


def _key_of(fragment: Fragment) -> str:
    """The same for every copy of these elements, and for no others."""
    placement = fragment.slot.placement
    name, experts = placement.tied_to or fragment.slot.name, placement.experts or ()
    return f"{name}/{placement.tensor_start}/{experts}/{fragment.start}"


def _recorded(recorder: Recorder | None, activity: Activity) -> AbstractContextManager[None]:
    return nullcontext() if recorder is None else recorder.record(activity)
