"""Flat units: parameters laid flat and sharded as ZeRO 0..3. A unit is a block of a stage or all of it (blocks.py).

Note [Flat units]
The parameters of a unit are laid end to end in one flat buffer, and each replica owns an equal, contiguous range of
it. So every replica has the same number of elements whatever the shapes, a gather or a
reduction is one collective without copies in or out, and the parameters the module sees are views. A
parameter that is tied to another stage has a unit of its own: both copies are then cut alike, and their
gradients can be added shard by shard. Experts have one as well: they are replicated over fewer ranks than the
rest of their stage, the expert replicas, and their tokens come from every tensor-parallel rank, which are
replicas among others to them.

Note [Who accumulates what]
Weight gradients of linear layers are added to an fp32 buffer by the stage's WeightGradStore, those of other
parameters by a hook on their accumulation; both may come in any order, over any number of micro-batches. The
buffer is reduced over every replica of the stage: data-parallel ranks and, for two-copy schedules, the
mirror. With `zero.reduce=step` that is done once; with stages 2 and 3 the buffer lives from its first use in a step to
the end of the reduction. With `zero.reduce=microbatch` it is done whenever a micro-batch's gradients are complete, and
the sum is added to this rank's shard. There what is added before the weight gradients are due (in an I, ahead of its
W) is kept in tensors of the parameters' own sizes, for it must not hold a whole buffer until then.

Note [Freed storage]
At stage 3 a reshard frees the storage of the unit's buffer, and an unshard fills the same storage again, so that
tensors which autograd saved keep pointing at the right memory. Writes go through an alias with a version
counter of its own: the values that come back are the ones that left, which is what autograd's check is about.

Note [Hybrid sharding]
Where replicas are in groups, each rank has, beside the masters of its own piece, its group's shard of the parameters
in the dtype of the computation. Gathers stay within the group; after an update the pieces of a shard are gathered
across the groups, once. A gradient is reduced within the group first and then across, on a buffer that much smaller.

torch's fully_shard is the reference this is tested against. It is not the base: its reductions hang on hooks
of a whole backward, which a split backward does not fire.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis, all_reduce
from counterflow.parallel.compress.codec import Codec
from counterflow.parallel.compress.gradients import GradientReduction
from counterflow.parallel.compress.reduction import PendingReduction, ReductionReport
from counterflow.parallel.compress.weights import PendingGather, WeightGather
from counterflow.parallel.memory_parts import memory_of
from counterflow.parallel.parameters import expert_runs, initialize, place, placement_of
from counterflow.parallel.zero.buffers import Buffers
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.copy_reduction import CopiesReduction, Stack
from counterflow.parallel.zero.hybrid import HybridReduction
from counterflow.parallel.zero.layout import Fragment, PersistentBytes, Slot, lay_out, ordered, rounded_up


class FlatUnit:
    """Some parameters of a stage, flat, sharded over replicas as ZeRO `context.config` says.

    replica: the ranks that hold the same parameters. weight_codec: how parameters travel when they are gathered;
    None: as they are. expert: the axis over which copies of its experts are spread; None: it has no copies.
    buffers: where whole gradients are taken from and given back to.
    is_early: whether gradients are those of an I whose W comes later (Note [Who accumulates what]).
    reduction: how its gradients are summed, and what that keeps between steps. report: of those of this step.
    gathered_bytes: what this rank has sent to gather parameters in this step.
    loss_scale: of the present step; gradients are divided by it before they are reduced.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        context: ZeroContext,
        *,
        replica: ReplicaAxes,
        weight_codec: Codec | None = None,
        expert: Axis | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        config, dtype, device = context.config, context.dtype, context.device
        self._zero_stage, self._tensor, self._replica = config.stage, context.tensor, replica
        self._is_hybrid = replica.is_hybrid and config.stage == 3
        self._gather = WeightGather(weight_codec, replica.shard if self._is_hybrid else replica.whole)
        self._pads_fragments = expert is not None
        in_order = ordered(named_parameters)
        layout = lay_out(in_order, replica.whole.size)
        self.slots, self._num_partial = layout.slots, layout.num_partial
        self._piece = layout.shard_size
        self._padded_size = self._piece * replica.whole.size
        self._counted_start = self.owned_start(replica.whole.rank)
        self._shards_parameters, self._shards_gradients = config.stage == 3, config.stage >= 2
        self._reduces_often = config.reduce == "microbatch" and self._shards_gradients
        self._owned_start, self._owned_size = (
            (self._counted_start, self._piece) if config.stage >= 1 else (0, self._padded_size)
        )

        whole = torch.zeros(self._padded_size, dtype=dtype, device=device)
        self._whole = whole
        self._shard: Tensor | None = None
        if context.host_masters:
            self.master = torch.zeros(self._owned_size, pin_memory=device.type == "cuda")
        elif dtype == torch.float32 and not self._shards_parameters and self._gather.is_exact:
            self.master = whole.narrow(0, self._owned_start, self._owned_size)
        else:
            self.master = torch.zeros(self._owned_size, device=device)
        if self._is_hybrid:
            self._shard = whole.new_zeros(self._piece * replica.across.size)
        elif context.host_masters and self._shards_parameters and not config.offload_parameters:
            # Rounding once more would change what is quantised.
            self._shard = whole.new_zeros(
                self._owned_size, dtype=dtype if self._gather.is_exact else torch.float32
            )
        self._buffers = buffers or Buffers(device)
        self._grad_whole: Tensor | None = None
        self._early: dict[str, Tensor] = {}
        self.is_early = False
        if self._shards_gradients:
            self._grad = torch.zeros(self._piece, device=device)
        else:
            self._grad_whole = torch.zeros(self._padded_size, device=device)
            self._grad = self._grad_whole.narrow(0, self._owned_start, self._owned_size)
        self.parameters = {
            id(old): place(nn.Parameter(self._view(whole, slot).data), slot.placement)
            for slot, (_, old) in zip(self.slots, in_order, strict=True)
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
        self._copies = None if expert is None else CopiesReduction(replica.whole, expert)
        self._place_copies()
        num_elements = self._piece * replica.across.size if self._is_hybrid else self._padded_size
        self.reduction = GradientReduction(
            context.compression,
            replica.across if self._is_hybrid else replica.whole,
            shapes=[(num_elements,)] if self._is_hybrid else layout.padded_shapes(),
            num_elements=num_elements,
            is_everywhere=config.stage == 0,
            device=device,
            plain=self._copies,
            dtype=context.reduce_dtype,
        )
        self._reduction = (
            HybridReduction(replica.shard, self.reduction, dtype=context.reduce_dtype)
            if self._is_hybrid
            else self.reduction
        )
        self.report: ReductionReport | None = None
        self.gathered_bytes = 0
        self.loss_scale = 1.0
        self._pending: PendingReduction | None = None
        self._incoming: Tensor | None = None
        self._outgoing: Tensor | None = None
        self._has_reduced = False
        self._syncing: PendingGather | None = None
        self._is_whole = True
        self.reshard()

    @staticmethod
    def _view(flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.start : slot.stop].view(slot.shape)

    @property
    def has_experts(self) -> bool:
        """Whether its parameters are those of experts."""
        return any(slot.placement.experts is not None for slot in self.slots)

    def owned_start(self, replica_rank: int) -> int:
        """Where the piece begins that this index along the replicas counts, and owns from stage 1 on."""
        if not self._is_hybrid:
            return replica_rank * self._piece
        across, shard = divmod(replica_rank, self._replica.shard.size)
        return (shard * self._replica.across.size + across) * self._piece

    def owned_range(self, replica_rank: int) -> tuple[int, int]:
        """The elements of the flat buffer that this index along the replicas updates: start and stop."""
        if self._zero_stage == 0:
            return 0, self._padded_size
        start = self.owned_start(replica_rank)
        return start, start + self._piece

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

    def initialize(self, seed: int) -> None:
        """Fill the parameters with their initial values, the same in every layout."""
        for slot in self.slots:
            start, stop = self._owned_part(slot.start, slot.stop)
            if start < stop:
                values = torch.empty(slot.shape, device=self.master.device)
                initialize(values, slot.name, slot.placement, seed)
                self.master[start - self._owned_start : stop - self._owned_start].copy_(
                    values.view(-1)[start - slot.start : stop - slot.start]
                )
        self.sync_parameters()

    def _owned_part(self, start: int, stop: int) -> tuple[int, int]:
        return max(start, self._owned_start), min(stop, self._owned_start + self._owned_size)

    # Parameters

    def unshard(self) -> None:
        """Start to gather the whole parameters, where they are not whole or on their way."""
        if self._is_whole or self._pending_gather is not None:
            return
        self._whole.untyped_storage().resize_(self._whole.numel() * self._whole.element_size())
        self._pending_gather = self._gather.start(self._whole.data, self._source())
        self.gathered_bytes += self._pending_gather.sent_bytes

    def _source(self) -> Tensor:
        """What a gather starts from, on the device: this rank's shard."""
        if self._shard is not None:
            return self._shard
        return self.master.to(self._whole.device, non_blocking=True)

    @property
    def is_awaited(self) -> bool:
        """Whether a gather is under way."""
        return self._pending_gather is not None

    def wait_unshard(self) -> bool:
        """Return once the parameters are whole; whether there was a gather to wait for."""
        assert self._is_whole or self._pending_gather is not None, "parameters are used before UNSHARD"
        if self._pending_gather is None:
            return False
        self._pending_gather.wait()
        self._pending_gather, self._is_whole = None, True
        return True

    def reshard(self) -> None:
        """Free the whole parameters, where they are sharded."""
        if self._shards_parameters and (self._is_whole or self._pending_gather is not None):
            self.wait_unshard()
            self._whole.untyped_storage().resize_(0)
            self._is_whole = False

    def sync_parameters(self) -> None:
        """Bring the masters, after an optimizer step, to the parameters the module sees."""
        self.start_sync()
        self.finish_sync()

    def start_sync(self) -> None:
        """As `sync_parameters`; the network is not waited for."""
        self._syncing = None
        if self._is_hybrid:
            assert self._shard is not None
            mine = self.master.to(self._shard.device, non_blocking=True)
            self._syncing = WeightGather(None, self._replica.across).start(self._shard, mine)
            self.gathered_bytes += self._syncing.sent_bytes
            return
        if self._shards_parameters:
            if self._shard is not None:
                self._shard.copy_(self.master, non_blocking=True)
            return
        owned = self._whole.data.narrow(0, self._owned_start, self._owned_size)
        is_alias = self._is_alias
        if self._zero_stage >= 1:
            source = self.master.clone() if is_alias else self._source()
            self._syncing = self._gather.start(self._whole.data, source)
            self.gathered_bytes += self._syncing.sent_bytes
        elif not is_alias:
            owned.copy_(self.master)

    def finish_sync(self) -> None:
        """Return once what `start_sync` started is here."""
        if self._syncing is not None:
            self._syncing.wait()
        self._syncing = None

    # Gradients

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        """What gradients of `parameter` are added to: fp32, in its shape."""
        slot = self._slot_of[id(parameter)]
        if not self.is_early:
            return self._view(self._whole_gradients(), slot)
        if slot.name not in self._early:
            with memory_of("gradients"):
                self._early[slot.name] = torch.zeros(slot.shape, device=parameter.device)
        return self._early[slot.name]

    def _whole_gradients(self) -> Tensor:
        if self._grad_whole is None:
            self._grad_whole = self._buffers.take(self._padded_size)
        return self._grad_whole

    def begin_step(self) -> None:
        self._grad.zero_()
        self._early.clear()
        self._has_reduced = False
        self.report, self.gathered_bytes = None, 0
        if self._grad_whole is not None:
            self._grad_whole.zero_()

    def reduce_grad(self) -> None:
        """Start to reduce what has been accumulated; the network is not waited for."""
        assert self._pending is None, "a reduction of this unit is under way"
        whole = self._whole_gradients()
        for slot in self.slots:
            if slot.name in self._early:
                self._view(whole, slot).add_(self._early.pop(slot.name))
        if self.loss_scale != 1.0:
            whole.mul_(1 / self.loss_scale)
        # The own range of the whole buffer is input and output at stage 1: keep them apart.
        is_apart = self._reduces_often or self._zero_stage == 1
        with memory_of("gradients"):
            self._incoming = torch.empty_like(self._grad) if is_apart else self._grad
        if self._has_reduced:
            # One step of the reduction, in however many parts.
            self.reduction.num_steps -= 1
        self._has_reduced = True
        self._pending = self._reduction.start(whole, None if self._zero_stage == 0 else self._incoming)
        if self._shards_gradients:
            # The next micro-batch's gradients may come while these are on their way.
            self._outgoing, self._grad_whole = whole, None

    def advance_reduction(self) -> None:
        """Bring the reduction to its next step, so that those of several units are under way together."""
        if self._pending is not None:
            self._pending.advance()

    def wait_reduction(self) -> None:
        """Return once what `reduce_grad` started is added to this rank's range."""
        if self._pending is None:
            return
        report = self._pending.wait()
        self.report = report if self.report is None else self.report + report
        self._pending = None
        assert self._incoming is not None
        if self._reduces_often:
            self._grad.add_(self._incoming)
        elif self._incoming is not self._grad:
            self._grad.copy_(self._incoming)
        self._incoming = None
        if self._outgoing is not None:
            self._buffers.give(self._outgoing)
            self._outgoing = None

    def finish_step(self) -> None:
        """Return once `grad` of every fragment is the sum over replicas and, where partial, the tensor axis."""
        self.wait_reduction()
        assert self.report is not None, "the schedule reduced no gradients"
        partial = self._grad[: max(0, self._num_partial - self._owned_start)]
        if partial.numel():
            all_reduce(partial, self._tensor)

    def discard_gradients(self) -> None:
        """Forget what has been accumulated and not been reduced, after a step that failed."""
        self._early.clear()
        self.is_early = False

    # What the optimizer updates

    def fragments(self) -> list[Fragment]:
        """The parts of parameters that this rank updates, in buffer order."""
        found: list[Fragment] = []
        for slot in self.slots:
            # Copies of an expert are in other places of their buffers: what is updated together ends with padding.
            stop = rounded_up(slot.stop) if self._pads_fragments else slot.stop
            start, stop = self._owned_part(slot.start, stop)
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
        first = max(fragment.start, self._counted_start - slot.start)
        last = min(fragment.stop, self._counted_start + self._piece - slot.start)
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

    @property
    def _is_alias(self) -> bool:
        """Whether the masters are a part of what the module sees."""
        return self.master.untyped_storage()._cdata == self._whole.untyped_storage()._cdata

    def held(self) -> dict[str, list[Tensor]]:
        """What it keeps between steps, or fills again in each, by the part of memory (parallel/memory_parts.py)."""
        whole = "gathered" if self._shards_parameters else "parameters"
        shard = [] if self._shard is None else [self._shard]
        grads = [self._grad] if self._grad_whole is None else [self._grad, self._grad_whole]
        return {
            whole: [self._whole],
            "parameters": [*([] if whole == "gathered" else [self._whole]), self.master, *shard],
            "gradients": [*grads, *self.reduction.state().values()],
        }

    def persistent_bytes(self) -> PersistentBytes:
        is_alias = self._is_alias
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
