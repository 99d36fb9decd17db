"""ZeRO 0..3 for one pipeline stage, driven by the schedule's UNSHARD, RESHARD and REDUCE_GRAD.

Note [Flat units]
The parameters of a stage are laid end to end in one flat buffer, a *unit*, and each replica owns an equal,
contiguous range of it. So every replica has the same number of elements whatever the shapes, a gather or a
reduction is one collective without copies in or out, and the parameters the module sees are views. A
parameter that is tied to another stage has a unit of its own: both copies are then cut alike, and their
gradients can be added shard by shard.

Note [Who accumulates what]
Weight gradients of linear layers are added to an fp32 buffer by the stage's WeightGradStore, those of other
parameters by a hook on their accumulation; both may come in any order, over any number of micro-batches. The
buffer is reduced once, over every replica of the stage: data-parallel ranks and, for two-copy schedules, the
mirror. With stages 2 and 3 it lives from its first use in a step to the end of the reduction.

Note [Freed storage]
At stage 3 RESHARD frees the storage of the unit's buffer, and UNSHARD fills the same storage again, so that
tensors which autograd saved keep pointing at the right memory. Writes go through an alias with a version
counter of its own: the values that come back are the ones that left, which is what autograd's check is about.

torch's fully_shard is the reference this is tested against. It is not the base: its reductions hang on hooks
of a whole backward, which a split backward does not fire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.collectives import Axis, all_gather_into, all_reduce, reduce_scatter_into
from parallel.parameters import ParameterPlacement, initialize, place, placement_of
from parallel.zero_config import ZeroConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A parameter's place in its unit: elements `start` to `stop` of the flat buffer; `shape` is local."""

    name: str
    shape: tuple[int, ...]
    placement: ParameterPlacement
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """The part of a parameter that this rank's optimizer updates.

    start, stop: its range within the flattened local parameter. master, grad: fp32 [stop - start], views of
    the unit's buffers.
    """

    slot: Slot
    start: int
    stop: int
    master: Tensor
    grad: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentBytes:
    """Memory that stays between steps on this rank."""

    parameters: int
    gradients: int
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: PersistentBytes) -> PersistentBytes:
        return PersistentBytes(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )


class FlatUnit:
    """Some parameters of a stage, flat, sharded over `replica` as ZeRO `stage` says."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        zero_stage: int,
        replica: Axis,
        tensor: Axis,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._zero_stage, self._replica, self._tensor = zero_stage, replica, tensor
        # Gradients that are partial over the tensor axis come first: one contiguous range to reduce there.
        ordered = sorted(named_parameters, key=lambda item: not placement_of(item[1]).partial_over_tensor)
        slots: list[Slot] = []
        position = self._num_partial = 0
        for name, parameter in ordered:
            placement = placement_of(parameter)
            stop = position + parameter.numel()
            slots.append(
                Slot(name=name, shape=tuple(parameter.shape), placement=placement, start=position, stop=stop)
            )
            position = stop
            if placement.partial_over_tensor:
                self._num_partial = stop
        self.slots = tuple(slots)
        self._shard_size = -(-position // replica.size)
        self._padded_size = self._shard_size * replica.size
        self._shard_start = self._shard_size * replica.rank
        self._shards_parameters, self._shards_gradients = zero_stage == 3, zero_stage >= 2
        self._owned_start, self._owned_size = (
            (self._shard_start, self._shard_size) if zero_stage >= 1 else (0, self._padded_size)
        )

        whole = torch.zeros(self._padded_size, dtype=dtype, device=device)
        self._whole = whole
        if dtype == torch.float32 and not self._shards_parameters:
            self.master = whole.narrow(0, self._owned_start, self._owned_size)
        else:
            self.master = torch.zeros(self._owned_size, device=device)
        self._grad_whole: Tensor | None = None
        if self._shards_gradients:
            self._grad = torch.zeros(self._shard_size, device=device)
        else:
            self._grad_whole = torch.zeros(self._padded_size, device=device)
            self._grad = self._grad_whole.narrow(0, self._owned_start, self._owned_size)
        self.parameters = {
            id(old): place(nn.Parameter(self._view(whole, slot).data), slot.placement)
            for slot, (_, old) in zip(self.slots, ordered, strict=True)
        }
        self._slot_of = {
            id(new): slot for slot, new in zip(self.slots, self.parameters.values(), strict=True)
        }
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(self._take_gradient)
        self._gather: tuple[dist.Work | None, Tensor] | None = None
        self._reduction: list[dist.Work] | None = None
        self._is_whole = True
        self.reshard()

    @staticmethod
    def _view(flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.start : slot.stop].view(slot.shape)

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._slot_of

    def initialize(self, seed: int) -> None:
        """Fill the parameters with their initial values, the same in every layout."""
        for slot in self.slots:
            start, stop = (
                max(slot.start, self._owned_start),
                min(slot.stop, self._owned_start + self._owned_size),
            )
            if start < stop:
                values = torch.empty(slot.shape, device=self.master.device)
                initialize(values, slot.name, slot.placement, seed)
                self.master[start - self._owned_start : stop - self._owned_start].copy_(
                    values.view(-1)[start - slot.start : stop - slot.start]
                )
        self.publish()

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        """fp32, in the shape of `parameter`."""
        if self._grad_whole is None:
            self._grad_whole = torch.zeros(self._padded_size, device=self.master.device)
        return self._view(self._grad_whole, self._slot_of[id(parameter)])

    @torch.no_grad()
    def _take_gradient(self, parameter: nn.Parameter) -> None:
        # A weight whose gradient was deferred gets here without one.
        if parameter.grad is not None:
            self.gradient_buffer(parameter).add_(parameter.grad)
            parameter.grad = None

    def begin_step(self) -> None:
        self._grad.zero_()
        if self._grad_whole is not None:
            self._grad_whole.zero_()

    def unshard(self) -> None:
        if self._is_whole or self._gather is not None:
            return
        self._whole.untyped_storage().resize_(self._whole.numel() * self._whole.element_size())
        source = self.master.to(self._whole.dtype)
        work = all_gather_into(self._whole.data, source, self._replica, async_op=True)
        self._gather = (work, source)

    def wait_unshard(self) -> bool:
        """Return once the parameters are whole; whether there was a gather to wait for."""
        assert self._is_whole or self._gather is not None, "parameters are used before UNSHARD"
        if self._gather is None:
            return False
        work, _ = self._gather
        if work is not None:
            work.wait()
        self._gather, self._is_whole = None, True
        return True

    def reshard(self) -> None:
        if self._shards_parameters:
            self.wait_unshard()
            self._whole.untyped_storage().resize_(0)
            self._is_whole = False

    def reduce_grad(self) -> None:
        assert self._reduction is None, "gradients are reduced once in a step"
        if self._grad_whole is None:
            self._grad_whole = torch.zeros(self._padded_size, device=self.master.device)
        if self._zero_stage == 0:
            work = all_reduce(self._grad_whole, self._replica, async_op=True)
        else:
            out = self._grad
            if not self._shards_gradients:
                # The own range of the whole buffer is input and output: keep them apart.
                out = torch.empty_like(self._grad)
            work = reduce_scatter_into(out, self._grad_whole, self._replica, async_op=True)
            self._reduced = out
        self._reduction = [] if work is None else [work]

    def wait_reduction(self) -> None:
        """Return once `grad` of every fragment is the sum over replicas and, where partial, the tensor axis."""
        assert self._reduction is not None, "the schedule reduced no gradients"
        for work in self._reduction:
            work.wait()
        self._reduction = None
        if self._zero_stage == 1:
            self._grad.copy_(self._reduced)
        if self._zero_stage >= 1:
            del self._reduced
        if self._shards_gradients:
            self._grad_whole = None
        partial = self._grad[: max(0, self._num_partial - self._owned_start)]
        if partial.numel():
            all_reduce(partial, self._tensor)

    def publish(self) -> None:
        """Bring the masters, after an optimizer step, to the parameters the module sees."""
        if self._shards_parameters:
            return
        owned = self._whole.data.narrow(0, self._owned_start, self._owned_size)
        if owned.data_ptr() != self.master.data_ptr():
            owned.copy_(self.master)
        if self._zero_stage >= 1:
            all_gather_into(self._whole.data, owned.clone(), self._replica)

    def fragments(self) -> list[Fragment]:
        """The parts of parameters that this rank updates, in buffer order."""
        found: list[Fragment] = []
        for slot in self.slots:
            start, stop = (
                max(slot.start, self._owned_start),
                min(slot.stop, self._owned_start + self._owned_size),
            )
            if start < stop:
                here = slice(start - self._owned_start, stop - self._owned_start)
                found.append(
                    Fragment(
                        slot=slot,
                        start=start - slot.start,
                        stop=stop - slot.start,
                        master=self.master[here],
                        grad=self._grad[here],
                    )
                )
        return found

    def counted_range(self, fragment: Fragment) -> slice:
        """The elements of `fragment` that this rank counts in a sum over all replicas: each element once."""
        offset = fragment.slot.start
        first = max(fragment.start, self._shard_start - offset)
        last = min(fragment.stop, self._shard_start + self._shard_size - offset)
        return slice(first - fragment.start, max(first, last) - fragment.start)

    @property
    def grad(self) -> Tensor:
        """fp32: this rank's range of the reduced gradients."""
        return self._grad

    def persistent_bytes(self) -> PersistentBytes:
        is_alias = self.master.untyped_storage().data_ptr() == self._whole.untyped_storage().data_ptr()
        whole = 0 if self._shards_parameters else self._whole.nbytes
        gradients = self._grad.nbytes if self._shards_gradients else self._padded_size * 4
        return PersistentBytes(
            parameters=whole + (0 if is_alias else self.master.nbytes), gradients=gradients
        )


class ShardedStage:
    """The parameters of one stage (the runtime's `StageParameters`), replaced in `module` by views of units.

    module: its parameters may be on the meta device. replica: the ranks that hold a copy of this stage.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ZeroConfig,
        *,
        replica: Axis,
        tensor: Axis,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        seed: int = 0,
        is_tied: bool = False,
    ) -> None:
        named = list(module.named_parameters())
        tied = [item for item in named if is_tied and _is_end_of_tie(*item)]
        rest = [item for item in named if not any(item[0] == name for name, _ in tied)]
        self.units = tuple(
            FlatUnit(
                members,
                zero_stage=config.stage,
                replica=replica,
                tensor=tensor,
                dtype=dtype,
                device=device or torch.device("cpu"),
            )
            for members in (tied, rest)
            if members
        )
        self.tied_unit = self.units[0] if tied else None
        replaced = {old: new for unit in self.units for old, new in unit.parameters.items()}
        for submodule in module.modules():
            for name, parameter in list(submodule.named_parameters(recurse=False)):
                setattr(submodule, name, replaced[id(parameter)])
        for unit in self.units:
            unit.initialize(seed)

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        for unit in self.units:
            if unit.holds(parameter):
                return unit.gradient_buffer(parameter)
        raise AssertionError("a parameter of another stage")

    def begin_step(self) -> None:
        for unit in self.units:
            unit.begin_step()

    def unshard(self) -> None:
        for unit in self.units:
            unit.unshard()

    def wait_unshard(self) -> bool:
        waited = [unit.wait_unshard() for unit in self.units]
        return any(waited)

    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    def reduce_grad(self) -> None:
        for unit in self.units:
            unit.reduce_grad()

    def finish_step(self) -> None:
        for unit in self.units:
            unit.wait_reduction()

    def publish(self) -> None:
        """Bring updated masters to the parameters the module sees."""
        for unit in self.units:
            unit.publish()

    def persistent_bytes(self) -> PersistentBytes:
        """Parameters and gradients that stay between steps on this rank."""
        return sum(
            (unit.persistent_bytes() for unit in self.units), PersistentBytes(parameters=0, gradients=0)
        )


def _is_end_of_tie(name: str, parameter: nn.Parameter) -> bool:
    return name == "embedding.weight" or placement_of(parameter).tied_to is not None


@torch.no_grad()
def add_tied_gradients(stages: Iterable[ShardedStage], ends: Axis) -> None:
    """Sum the gradients of a tied parameter over its two copies, the first stage's and the last's.

    ends: the two pipeline ranks that hold them (size 1 where one rank holds both, or there is no tie).
    """
    tied = [stage.tied_unit for stage in stages if stage.tied_unit is not None]
    if not tied:
        return
    total = tied[0].grad if len(tied) == 1 else tied[0].grad + tied[1].grad
    if len(tied) == 1:
        all_reduce(total, ends)
    else:
        for unit in tied:
            unit.grad.copy_(total)
