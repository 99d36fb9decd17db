"""AdamW over this rank's fragments, and one global clip norm counted right across every axis.

Note [Post-validation]
An ordinary step waits until every rank of the pipeline has its gradients, for the norm of them all. With
`optimizer.post_validation` a rank that expects no clipping starts the sum of the norm, updates its stage at once
and goes on with the next step (`step_ahead`); when the norm is there, and before gradients are zeroed, it is held
against the limit (`validate`). Where it was too large or not finite, masters, moments and step count are put back
from copies and the step is done again, clipped: to the bit what the ordinary step gives, for the norm is the same
sum in the same order. After a step that was clipped the next one waits, for most likely it is clipped as well.
Method: Qi et al., arXiv 2401.10241, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from framework.optimizer_config import OptimizerConfig
from framework.rollback import Rollback
from parallel.collectives import Axis, all_reduce
from parallel.pipeline.trace import Activity, Recorder
from parallel.zero import FlatUnit, Fragment, PersistentBytes, ShardedStage

STATE_NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedFragment:
    """A fragment with the unit it is cut from and its optimizer state, fp32 [stop - start] each."""

    unit: FlatUnit
    fragment: Fragment
    state: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What became of a step that was made ahead: its norm before clipping, and whether it was done again."""

    norm: float
    is_redone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """The sum of squares over all ranks, fp64 scalar, once `work` (None: at once) is done."""

    squares: Tensor
    work: dist.Work | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """A step that is not validated yet."""

    norm: _Norm
    learning_rate: float


class ModelOptimizer:
    """torch's fused AdamW on the fp32 masters of every stage this rank holds.

    tensor, world: the axes over which the gradient norm is summed, each parameter counted once.
    """

    def __init__(
        self, stages: Iterable[ShardedStage], config: OptimizerConfig, *, tensor: Axis, world: Axis
    ) -> None:
        self._config, self._tensor, self._world = config, tensor, world
        self._stages = tuple(stages)
        self.owned: list[OwnedFragment] = []
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for unit in self._units():
            for fragment in unit.fragments():
                fragment.master.grad = fragment.grad
                groups[fragment.slot.placement.weight_decay].append(fragment.master)
                state = {name: torch.zeros_like(fragment.master) for name in STATE_NAMES}
                self.owned.append(OwnedFragment(unit=unit, fragment=fragment, state=state))
        self._adamw = torch.optim.AdamW(
            [
                {"params": members, "weight_decay": config.weight_decay if decays else 0.0}
                for decays, members in groups.items()
                if members
            ],
            lr=config.base_lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self.num_steps = 0
        self._install_state()
        self._ahead: _Ahead | None = None
        self._expects_clip = False
        self._rollback: Rollback | None = None
        if config.post_validation:
            states = (tensor for owned in self.owned for tensor in owned.state.values())
            self._rollback = Rollback([*(unit.master for unit in self._units()), *states])

    def _units(self) -> Iterator[FlatUnit]:
        for stage in self._stages:
            yield from stage.units

    def _install_state(self) -> None:
        for owned in self.owned:
            master = owned.fragment.master
            step = torch.tensor(float(self.num_steps), device=master.device)
            self._adamw.state[master] = {"step": step, **owned.state}

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
        self._install_state()
        self._publish()

    @torch.no_grad()
    def gradient_norm(self, recorder: Recorder | None = None) -> float:
        """The norm of the whole model's reduced gradients.

        A rank counts the elements of its own shard. A parameter that every tensor-parallel rank holds whole is
        counted by the first of them, the second copy of a tied one by nobody; the tensor axis is no such copy for
        experts, whose replicas it is a part of.
        """
        # Here a rank waits for the slowest one.
        with _recorded(recorder, Activity.COLLECTIVE_WAIT):
            return self._wait(self._start_norm())

    def _start_norm(self) -> _Norm:
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for owned in self.owned:
            placement = owned.fragment.slot.placement
            is_replicated = placement.tensor_dim is None and placement.experts is None
            if placement.tied_to is None and not (is_replicated and self._tensor.rank > 0):
                counted = owned.fragment.grad[owned.unit.counted_range(owned.fragment)]
                squares += torch.linalg.vector_norm(counted, dtype=torch.float64).square()
        return _Norm(
            squares=squares, work=all_reduce(squares, self._world, op=dist.ReduceOp.SUM, async_op=True)
        )

    @staticmethod
    def _wait(norm: _Norm) -> float:
        if norm.work is not None:
            norm.work.wait()
        return float(norm.squares.sqrt())

    @torch.no_grad()
    def step(self, learning_rate: float, recorder: Recorder | None = None) -> float:
        """Clip, update the masters and publish them; returns the gradient norm before clipping.

        Raises FloatingPointError: where the norm is not finite; nothing was updated.
        """
        assert not self.is_ahead, "the step before has to be validated first"
        return self._finish(self.gradient_norm(recorder), learning_rate)

    @property
    def can_step_ahead(self) -> bool:
        """Whether the next step may be made before its norm is known; the same on every rank."""
        return self._rollback is not None and not self._expects_clip

    @property
    def is_ahead(self) -> bool:
        """Whether the last step is not validated yet: parameters, moments and step count may still change."""
        return self._ahead is not None

    @torch.no_grad()
    def step_ahead(self, learning_rate: float) -> None:
        """Update and publish as if nothing had to be clipped, without waiting for ranks of other stages.

        `validate` follows before the next step zeroes the gradients.
        """
        assert self._rollback is not None
        assert not self.is_ahead, "the step before has to be validated first"
        self._ahead = _Ahead(norm=self._start_norm(), learning_rate=learning_rate)
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
            norm = self._wait(ahead.norm)
        if math.isfinite(norm) and not self._is_clipped(norm):
            return Validation(norm=norm, is_redone=False)
        with _recorded(recorder, Activity.OPTIMIZER):
            self._rollback.restore()
            self.num_steps -= 1
            self._install_state()
            if not math.isfinite(norm):
                self._publish()
            self._finish(norm, ahead.learning_rate)
        return Validation(norm=norm, is_redone=True)

    def _is_clipped(self, norm: float) -> bool:
        limit = self._config.max_grad_norm
        return limit is not None and norm > limit

    def _finish(self, norm: float, learning_rate: float) -> float:
        """The step, once the norm is known."""
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm} after {self.num_steps} steps: nothing was updated, and the last "
                "checkpoint is of sound parameters; lower optimizer.base_lr or lengthen the warm-up, and go on from it"
            )
        self._expects_clip = self._is_clipped(norm)
        if self._expects_clip:
            assert self._config.max_grad_norm is not None
            for unit in self._units():
                unit.grad.mul_(self._config.max_grad_norm / (norm + 1e-6))
        self._update(learning_rate)
        return norm

    def _update(self, learning_rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.num_steps += 1
        self._publish()

    def _publish(self) -> None:
        for stage in self._stages:
            stage.publish()

    @property
    def _device(self) -> torch.device:
        return self.owned[0].fragment.master.device if self.owned else torch.device("cpu")

    def persistent_bytes(self, *, experts_only: bool = False) -> PersistentBytes:
        """Parameters, gradients and optimizer state, with its copies, that stay on this rank between steps."""
        units = [unit for unit in self._units() if unit.has_experts or not experts_only]
        held = sum((unit.persistent_bytes() for unit in units), PersistentBytes(parameters=0, gradients=0))
        state = sum(
            tensor.nbytes for owned in self.owned if owned.unit in units for tensor in owned.state.values()
        )
        copies = 0 if self._rollback is None else sum(unit.master.nbytes for unit in units) + state
        return held + PersistentBytes(parameters=0, gradients=0, optimizer=state + copies)


def _recorded(recorder: Recorder | None, activity: Activity) -> AbstractContextManager[None]:
    return nullcontext() if recorder is None else recorder.record(activity)
