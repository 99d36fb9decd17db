"""Flat units: parameters of a pipeline stage, laid flat and sharded as ZeRO 0..3, which its UNSHARD, RESHARD and
REDUCE_GRAD drive.

Note [Flat units]
The parameters of a stage are laid end to end in one flat buffer, a *unit*, and each replica owns an equal,
contiguous range of it. So every replica has the same number of elements whatever the shapes, a gather or a
reduction is one collective without copies in or out, and the parameters the module sees are views. A
parameter that is tied to another stage has a unit of its own: both copies are then cut alike, and their
gradients can be added shard by shard. Experts have one as well: they are replicated over fewer ranks than the
rest of their stage, the expert replicas, and their tokens come from every tensor-parallel rank, which are
replicas among others to them.

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

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis, all_reduce
from counterflow.parallel.compress.codec import Codec
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.compress.gradients import GradientReduction
from counterflow.parallel.compress.reduction import PendingReduction, ReductionReport
from counterflow.parallel.compress.weights import PendingGather, WeightGather
from counterflow.parallel.parameters import ParameterPlacement, expert_runs, initialize, place, placement_of
from counterflow.parallel.zero.copy_reduction import CopiesReduction, Stack

# A multiple of what any CPU kernel of AdamW computes at once.
_VECTOR_ELEMENTS = 64


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

    start, stop: its range within the flattened local parameter, of copies of experts with the padding behind. master,
    grad: fp32 [stop - start], views of the unit's buffers.
    """

    slot: Slot
    start: int
    stop: int
    master: Tensor
    grad: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentBytes:
    """Memory that stays between steps on this rank.

    host, disk: what of it is in memory of the host, beside a GPU, and in a file: bytes that the others do not count.
    """

    parameters: int
    gradients: int
    optimizer: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """On the rank's own device."""
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: PersistentBytes) -> PersistentBytes:
        return PersistentBytes(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            host=self.host + other.host,
            disk=self.disk + other.disk,
        )


class FlatUnit:
    """Some parameters of a stage, flat, sharded over `replica` as ZeRO `stage` says.

    reduction: how its gradients are summed, and what that keeps between steps. report: of the last one.
    loss_scale: of the present step; gradients are divided by it before they are reduced.
    weight_codec: how its parameters travel when they are gathered; None: as they are.
    expert: the axis over which copies of its experts are spread; None: it has no copies.
    reduce_dtype: in which gradients are summed over replicas, unless they are compressed.
    host_masters: masters are in memory of the host, to be updated there. host_shards: so are, at stage 3, the shards
    that gathers start from, which are the masters then; else the device has them in the dtype of the computation.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        zero_stage: int,
        replica: Axis,
        tensor: Axis,
        dtype: torch.dtype,
        device: torch.device,
        compression: CompressionConfig | None = None,
        weight_codec: Codec | None = None,
        expert: Axis | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        host_masters: bool = False,
        host_shards: bool = False,
    ) -> None:
        self._zero_stage, self._tensor = zero_stage, tensor
        self._gather = WeightGather(weight_codec, replica)
        # Kernels compute whole vectors otherwise than the elements behind the last of them. Copies of an expert are in
        # other places, so nothing of theirs may be behind: what is updated together ends with padding.
        self._granule = 1 if expert is None else _VECTOR_ELEMENTS
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
            position = _rounded_up(stop, self._granule)
            if placement.partial_over_tensor:
                self._num_partial = stop
        self.slots = tuple(slots)
        self._shard_size = _rounded_up(-(-position // replica.size), self._granule)
        self._padded_size = self._shard_size * replica.size
        self._shard_start = self._shard_size * replica.rank
        self._shards_parameters, self._shards_gradients = zero_stage == 3, zero_stage >= 2
        self._owned_start, self._owned_size = (
            (self._shard_start, self._shard_size) if zero_stage >= 1 else (0, self._padded_size)
        )

        whole = torch.zeros(self._padded_size, dtype=dtype, device=device)
        self._whole = whole
        self._shard: Tensor | None = None
        if host_masters:
            self.master = torch.zeros(self._owned_size, pin_memory=device.type == "cuda")
            if self._shards_parameters and not host_shards:
                # Rounding once more would change what is quantised.
                self._shard = whole.new_zeros(
                    self._owned_size, dtype=dtype if self._gather.is_exact else torch.float32
                )
        elif dtype == torch.float32 and not self._shards_parameters and self._gather.is_exact:
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
        # A parameter keeps its hook in C++, where Python's collector sees no cycle: a hook that held this unit would
        # keep both for the life of the process.
        unit: weakref.ref[FlatUnit] = weakref.ref(self)
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(lambda grown, unit=unit: _take_gradient(unit, grown))
        self._pending_gather: PendingGather | None = None
        self._copies = None if expert is None else CopiesReduction(replica, expert)
        self._place_copies()
        self.reduction = GradientReduction(
            compression or CompressionConfig(),
            replica,
            shapes=[slot.shape for slot in self.slots],
            num_elements=self._padded_size,
            is_everywhere=zero_stage == 0,
            device=device,
            plain=self._copies,
            dtype=reduce_dtype,
        )
        self.report: ReductionReport | None = None
        self.loss_scale = 1.0
        self._pending: PendingReduction | None = None
        self._is_whole = True
        self.reshard()

    @staticmethod
    def _view(flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.start : slot.stop].view(slot.shape)

    @property
    def has_experts(self) -> bool:
        """Whether its parameters are those of experts."""
        return any(slot.placement.experts is not None for slot in self.slots)

    def owned_range(self, replica_rank: int) -> tuple[int, int]:
        """The elements of the flat buffer that this index along the replica axis updates: start and stop."""
        if self._zero_stage == 0:
            return 0, self._padded_size
        return replica_rank * self._shard_size, (replica_rank + 1) * self._shard_size

    def read_placements(self) -> None:
        """Take the placements of the parameters anew; their shapes are the same."""
        before = self.slots
        self.slots = tuple(
            replace(slot, placement=placement_of(parameter))
            for slot, parameter in zip(self.slots, self.parameters.values(), strict=True)
        )
        if self.slots != before:
            # What compression left out was of the experts that were here.
            self.reduction.reset()
            self._place_copies()
        self._slot_of = {
            id(parameter): slot for slot, parameter in zip(self.slots, self.parameters.values(), strict=True)
        }

    def _place_copies(self) -> None:
        if self._copies is not None:
            self._copies.place(
                [
                    Stack(
                        start=slot.start,
                        expert_numel=(slot.stop - slot.start) // slot.shape[0],
                        copies=slot.placement.copies,
                    )
                    for slot in self.slots
                    if slot.placement.copies is not None
                ]
            )

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
        self.sync_parameters()

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        """fp32, in the shape of `parameter`."""
        if self._grad_whole is None:
            self._grad_whole = torch.zeros(self._padded_size, device=self._whole.device)
        return self._view(self._grad_whole, self._slot_of[id(parameter)])

    def begin_step(self) -> None:
        self._grad.zero_()
        if self._grad_whole is not None:
            self._grad_whole.zero_()

    def unshard(self) -> None:
        if self._is_whole or self._pending_gather is not None:
            return
        self._whole.untyped_storage().resize_(self._whole.numel() * self._whole.element_size())
        self._pending_gather = self._gather.start(self._whole.data, self._source())

    def _source(self) -> Tensor:
        """What a gather starts from, on the device: this rank's shard."""
        if self._shard is not None:
            return self._shard
        return self.master.to(self._whole.device, non_blocking=True)

    def wait_unshard(self) -> bool:
        """Return once the parameters are whole; whether there was a gather to wait for."""
        assert self._is_whole or self._pending_gather is not None, "parameters are used before UNSHARD"
        if self._pending_gather is None:
            return False
        self._pending_gather.wait()
        self._pending_gather, self._is_whole = None, True
        return True

    def reshard(self) -> None:
        if self._shards_parameters:
            self.wait_unshard()
            self._whole.untyped_storage().resize_(0)
            self._is_whole = False

    def reduce_grad(self) -> None:
        assert self._pending is None, "gradients are reduced once in a step"
        if self._grad_whole is None:
            self._grad_whole = torch.zeros(self._padded_size, device=self._whole.device)
        if self.loss_scale != 1.0:
            self._grad_whole.mul_(1 / self.loss_scale)
        # The own range of the whole buffer is input and output at stage 1: keep them apart.
        self._reduced = torch.empty_like(self._grad) if self._zero_stage == 1 else self._grad
        self._pending = self.reduction.start(
            self._grad_whole, None if self._zero_stage == 0 else self._reduced
        )

    def advance_reduction(self) -> None:
        """Bring the reduction to its next step, so that those of several units are under way together."""
        assert self._pending is not None, "the schedule reduced no gradients"
        self._pending.advance()

    def wait_reduction(self) -> None:
        """Return once `grad` of every fragment is the sum over replicas and, where partial, the tensor axis."""
        assert self._pending is not None, "the schedule reduced no gradients"
        self.report = self._pending.wait()
        self._pending = None
        if self._reduced is not self._grad:
            self._grad.copy_(self._reduced)
        del self._reduced
        if self._shards_gradients:
            self._grad_whole = None
        partial = self._grad[: max(0, self._num_partial - self._owned_start)]
        if partial.numel():
            all_reduce(partial, self._tensor)

    def sync_parameters(self) -> None:
        """Bring the masters, after an optimizer step, to the parameters the module sees."""
        if self._shards_parameters:
            if self._shard is not None:
                self._shard.copy_(self.master, non_blocking=True)
            return
        owned = self._whole.data.narrow(0, self._owned_start, self._owned_size)
        is_alias = owned.data_ptr() == self.master.data_ptr()
        if self._zero_stage >= 1:
            self._gather.start(self._whole.data, self.master.clone() if is_alias else self._source()).wait()
        elif not is_alias:
            owned.copy_(self.master)

    def fragments(self) -> list[Fragment]:
        """The parts of parameters that this rank updates, in buffer order."""
        found: list[Fragment] = []
        for slot in self.slots:
            start, stop = (
                max(slot.start, self._owned_start),
                min(_rounded_up(slot.stop, self._granule), self._owned_start + self._owned_size),
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

    def counted_ranges(self, fragment: Fragment) -> list[slice]:
        """The elements of `fragment` that this rank counts in a sum over all replicas: each element once.

        Of an expert with copies, those of its first.
        """
        slot = fragment.slot
        first = max(fragment.start, self._shard_start - slot.start)
        last = min(fragment.stop, self._shard_start + self._shard_size - slot.start)
        ranges = [(first, last)]
        if slot.placement.copies is not None:
            numel = (slot.stop - slot.start) // slot.shape[0]
            runs = expert_runs(range(slot.shape[0]), slot.placement.counted_experts)
            ranges = [(max(first, begin * numel), min(last, end * numel)) for begin, end in runs]
        return [slice(begin - fragment.start, max(begin, end) - fragment.start) for begin, end in ranges]

    @property
    def grad(self) -> Tensor:
        """fp32: this rank's range of the reduced gradients."""
        return self._grad

    def persistent_bytes(self) -> PersistentBytes:
        is_alias = self.master.untyped_storage().data_ptr() == self._whole.untyped_storage().data_ptr()
        whole = 0 if self._shards_parameters else self._whole.nbytes
        gradients = self._grad.nbytes if self._shards_gradients else self._padded_size * 4
        gradients += sum(tensor.nbytes for tensor in self.reduction.state().values())
        whole += 0 if self._shard is None else self._shard.nbytes
        master = 0 if is_alias else self.master.nbytes
        is_here = self.master.device == self._whole.device
        return PersistentBytes(
            parameters=whole + (master if is_here else 0),
            gradients=gradients,
            host=0 if is_here else master,
        )


@torch.no_grad()
def _take_gradient(unit_ref: weakref.ref[FlatUnit], parameter: nn.Parameter) -> None:
    unit = unit_ref()
    assert unit is not None, "a parameter outlived the unit that accumulates its gradient"
    # A weight whose gradient was deferred gets here without one.
    if parameter.grad is not None:
        unit.gradient_buffer(parameter).add_(parameter.grad)
        parameter.grad = None


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
