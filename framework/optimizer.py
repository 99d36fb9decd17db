"""AdamW over this rank's fragments, and one global clip norm counted right across every axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from framework.optimizer_config import OptimizerConfig
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

    def _units(self) -> Iterator[FlatUnit]:
        for stage in self._stages:
            yield from stage.units

    def _install_state(self) -> None:
        for owned in self.owned:
            master = owned.fragment.master
            step = torch.tensor(float(self.num_steps), device=master.device)
            self._adamw.state[master] = {"step": step, **owned.state}

    def restore(self, num_steps: int) -> None:
        """Go on after `num_steps` updates; the tensors of `owned` have been filled, masters and state."""
        self.num_steps = num_steps
        self._install_state()
        for stage in self._stages:
            stage.publish()

    @torch.no_grad()
    def gradient_norm(self, recorder: Recorder | None = None) -> float:
        """The norm of the whole model's reduced gradients.

        A rank counts the elements of its own shard. A parameter that every tensor-parallel rank holds whole is
        counted by the first of them, the second copy of a tied one by nobody.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for owned in self.owned:
            placement = owned.fragment.slot.placement
            is_replicated = placement.tensor_dim is None
            if placement.tied_to is None and not (is_replicated and self._tensor.rank > 0):
                counted = owned.fragment.grad[owned.unit.counted_range(owned.fragment)]
                squares += torch.linalg.vector_norm(counted, dtype=torch.float64).square()
        # Here a rank waits for the slowest one.
        with nullcontext() if recorder is None else recorder.record(Activity.COLLECTIVE_WAIT):
            all_reduce(squares, self._world, op=dist.ReduceOp.SUM)
        return float(squares.sqrt())

    @torch.no_grad()
    def step(self, learning_rate: float, recorder: Recorder | None = None) -> float:
        """Clip, update the masters and publish them; returns the gradient norm before clipping."""
        norm = self.gradient_norm(recorder)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm} after {self.num_steps} steps: nothing was updated, and the last "
                "checkpoint is of sound parameters; lower optimizer.base_lr or lengthen the warm-up, and go on from it"
            )
        limit = self._config.max_grad_norm
        if limit is not None and norm > limit:
            for unit in self._units():
                unit.grad.mul_(limit / (norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.num_steps += 1
        for stage in self._stages:
            stage.publish()
        return norm

    @property
    def _device(self) -> torch.device:
        return self.owned[0].fragment.master.device if self.owned else torch.device("cpu")

    def persistent_bytes(self) -> PersistentBytes:
        """Parameters, gradients and optimizer state that stay on this rank between steps."""
        held = sum(
            (stage.persistent_bytes() for stage in self._stages), PersistentBytes(parameters=0, gradients=0)
        )
        state = sum(tensor.nbytes for owned in self.owned for tensor in owned.state.values())
        return held + PersistentBytes(parameters=0, gradients=0, optimizer=state)
