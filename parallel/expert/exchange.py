"""Expert parallelism: tokens travel to the ranks that hold their experts, and the experts' sums travel back.

Note [What travels]
A token that goes to several experts of one remote rank travels there once, as one row: its hidden state, the weights
of its choices and the slots of those experts that are held there. That rank weighs and adds up what its experts make
of the row and sends back one row, which is added to those of the other ranks (as in DeepSeek-V3, arXiv 2412.19437,
section 3.2). Tokens whose experts are here are not sent. A row is packed into bytes, so that a dispatch is one
message (parallel/expert/packing.py).

Before the rows their number has to travel, for the receiver to make room: `begin_exchange` starts that, and what is
computed before `PendingExchange.finish` hides it.

Note [Communication points]
Each dispatch and combine, forward and backward, starts its transfer, does the part of its work that needs no other
rank, and then waits in `CommunicationPoint.wait`. That is where a runtime may switch to another chunk's computation.
Every rank of the axis gets to the same points in the same order, also one that sends or receives nothing. Nothing
here depends on the thread it runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from counterflow.parallel.collectives import Axis, all_to_all_into
from counterflow.parallel.dry import is_dry
from counterflow.parallel.expert.copies import ExpertCopies, copies_on, has_copies, places_of, turns
from counterflow.parallel.expert.packing import PAYLOAD_DTYPES, RowPacking
from counterflow.parallel.memory_parts import memory_of


class CommunicationPoint(Protocol):
    """Where a transfer that has been started is waited for."""

    def wait(self, work: dist.Work | None) -> None:
        """Return when `work` is complete; None: it is (an axis of one rank)."""
        ...

    def wait_here(self, work: dist.Work | None) -> None:
        """As `wait`, for a transfer too small to switch for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel:
    """Who holds which experts, and how tokens get there.

    axis: the ranks that exchange tokens.
    experts_by_rank: global indices of the experts on each of them, in slot order; every expert at least once. Where one
        has copies, its tokens are shared out to them (Note [Which copy] of parallel/expert/copies.py).
    num_nodes: neighbours on the axis, equally many each, are a node; tokens go to copies on their own first.
    point: None: a transfer is waited for on the spot.
    payload_dtype: in which hidden states are dispatched; None: in their own. Those that stay are rounded alike, so
        that results do not depend on the placement. Sums and gradients travel in their own precision.
    """

    axis: Axis
    experts_by_rank: tuple[tuple[int, ...], ...]
    num_nodes: int = 1
    point: CommunicationPoint | None = None
    payload_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        held = {expert for experts in self.experts_by_rank for expert in experts}
        if len(self.experts_by_rank) != self.axis.size or held != set(range(len(held))):
            raise ValueError(
                f"experts_by_rank={self.experts_by_rank}: one entry for each of the {self.axis.size} ranks of the "
                f"{self.axis.name} axis, and every expert 0..n-1 in one of them or more; see even_placement"
            )
        if self.payload_dtype is not None and self.payload_dtype not in PAYLOAD_DTYPES:
            raise ValueError(
                f"payload_dtype={self.payload_dtype}: one of {', '.join(map(str, PAYLOAD_DTYPES))}, or None"
            )

    @property
    def num_experts(self) -> int:
        return len({expert for experts in self.experts_by_rank for expert in experts})

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global indices of the experts held here, in slot order."""
        return self.experts_by_rank[self.axis.rank]

    def wait(self, work: dist.Work | None) -> None:
        if self.point is not None:
            self.point.wait(work)
        elif work is not None:
            work.wait()

    def wait_here(self, work: dist.Work | None) -> None:
        if self.point is not None:
            self.point.wait_here(work)
        elif work is not None:
            work.wait()

    @property
    def copies(self) -> ExpertCopies | None:
        """Which slots hold the same experts; None where no expert has copies."""
        if not has_copies(self.experts_by_rank):
            return None
        return copies_on(self.experts_by_rank, self.axis.rank)

    def locate(self, device: torch.device) -> ExpertTable:
        """The placement as tensors on `device`: where tokens of this rank go."""
        places = places_of(self.experts_by_rank)
        in_turn = [
            turns(places[expert], num_ranks=self.axis.size, num_nodes=self.num_nodes, start=expert)[
                self.axis.rank
            ]
            for expert in range(len(places))
        ]
        width = max(map(len, in_turn))
        table = torch.tensor(
            [[*each, *each[:1] * (width - len(each))] for each in in_turn], device=device
        ).flatten(0, 1)
        return ExpertTable(
            rank=table[:, 0].contiguous(),
            slot=table[:, 1].contiguous(),
            order=torch.tensor(_own_last(self.axis), device=device),
            num_turns=torch.tensor([len(each) for each in in_turn], device=device) if width > 1 else None,
        )


class ExpertTable(NamedTuple):
    """rank, slot: int64 [E * n]: on which rank of the expert axis, and where there, the tokens of this rank find
    each expert, in turn. order: int64 [ranks], see `_own_last`. num_turns: int64 [E], how many of the n turns of an
    expert count; None: there is one.
    """

    rank: Tensor
    slot: Tensor
    order: Tensor
    num_turns: Tensor | None = None

    def find(self, choice: Tensor, kept: Tensor | None) -> Tensor:
        """The index in `rank` and `slot` of each choice [T, k]; those that are not kept take no turn."""
        if self.num_turns is None:
            return choice
        num_experts = len(self.num_turns)
        key = choice if kept is None else choice.masked_fill(~kept, num_experts)
        turn = positions_within(key.flatten(), num_experts + 1).view(choice.shape) % self.num_turns[choice]
        return choice * (len(self.rank) // num_experts) + turn


def positions_within(key: Tensor, num_keys: int) -> Tensor:
    """For each element of `key` int64 [N], below num_keys, how many equal ones are before it."""
    order = key.argsort(stable=True)
    counts = torch.zeros(num_keys, dtype=torch.int64, device=key.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    starts = counts.cumsum(0) - counts
    position = torch.empty_like(key)
    position[order] = torch.arange(len(key), device=key.device) - starts[key[order]]
    return position


def even_placement(
    num_experts: int, ep_size: int, num_redundant_experts: int = 0, num_nodes: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Equal blocks of experts in order; then, in the redundant slots of each rank, those of the ranks that follow it.

    They follow it in a ring through its node, and then through the others, so that every rank shares as many experts
    as any other.

    Raises ValueError: where `ep_size` does not divide `num_experts`, or a rank has more slots than there are experts.
    """
    if num_experts % ep_size:
        raise ValueError(
            f"parallel.expert_parallel_size={ep_size}: must divide model.moe.num_experts={num_experts}, for every "
            "rank to hold equally many experts; change one of them"
        )
    each, per_node = num_experts // ep_size, ep_size // num_nodes
    if each + num_redundant_experts > num_experts:
        raise ValueError(
            f"balance.num_redundant_experts={num_redundant_experts}: each of {ep_size} ranks holds {each} of "
            f"{num_experts} experts as it is; set it to {num_experts - each} or less"
        )
    placed: list[tuple[int, ...]] = []
    for rank in range(ep_size):
        node, index = divmod(rank, per_node)
        ring = [
            (node + hop) % num_nodes * per_node + (index + step) % per_node
            for hop in range(num_nodes)
            for step in range(per_node)
        ]
        experts = [expert for held in ring for expert in range(held * each, (held + 1) * each)]
        placed.append(tuple(experts[: each + num_redundant_experts]))
    return tuple(placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The way of one micro-batch's tokens, T here, to their experts and back.

    tokens: int64 [R], the token of each row that leaves: first those to other ranks, by rank, then those that stay.
    slots: int32 [R, k], for each choice of that token the expert's slot on the row's rank, -1 where it is elsewhere.
    sent, received: rows to and from each rank; 0 for this rank.
    num_kept: rows that stay. num_pairs: how often an expert here is applied to a row.
    link_bytes: counts what is sent to each rank.
    """

    experts: ExpertParallel
    tokens: Tensor
    slots: Tensor
    num_tokens: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    num_kept: int
    num_pairs: int
    link_bytes: list[int]

    @property
    def num_sent(self) -> int:
        return len(self.tokens) - self.num_kept

    @property
    def num_received(self) -> int:
        return sum(self.received)

    def start(self, out: Tensor, rows: Tensor, *, back: bool) -> dist.Work | None:
        """Start sending `rows` to where they go, or `back`; `out` is filled with what comes."""
        there, here = (self.received, self.sent) if back else (self.sent, self.received)
        row_bytes = out.shape[1] * out.element_size()
        for rank, num_rows in enumerate(there):
            self.link_bytes[rank] += num_rows * row_bytes
        if self.experts.axis.size == 1:
            return None
        return all_to_all_into(
            out, rows, self.experts.axis, output_splits=here, input_splits=there, async_op=True
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingExchange:
    """An exchange whose sizes are under way.

    counts: int64 [2, ranks, 2], rows and pairs to and from each rank, the latter once `work` is done. rows: the tokens
    and slots of `Exchange`, from how many they are. known_counts: `counts` as numbers, in a dry run.
    """

    experts: ExpertParallel
    num_tokens: int
    counts: Tensor
    rows: Callable[[int], tuple[Tensor, Tensor]]
    work: dist.Work | None
    link_bytes: list[int]
    known_counts: list[list[list[int]]] | None = None

    def finish(self) -> Exchange:
        """Return once it is known how many rows come from each rank: the one moment at which the host waits."""
        self.experts.wait_here(self.work)
        own = self.experts.axis.rank
        sent, received = self.known_counts or cast("list[list[list[int]]]", self.counts.tolist())
        tokens, slots = self.rows(sum(rows for rows, _ in sent))
        others = range(len(sent))
        return Exchange(
            experts=self.experts,
            tokens=tokens,
            slots=slots,
            num_tokens=self.num_tokens,
            sent=tuple(0 if rank == own else sent[rank][0] for rank in others),
            received=tuple(0 if rank == own else received[rank][0] for rank in others),
            num_kept=sent[own][0],
            num_pairs=sum(pairs for _, pairs in received),
            link_bytes=self.link_bytes,
        )


@torch.no_grad()
def begin_exchange(
    experts: ExpertParallel,
    table: ExpertTable,
    choice: Tensor,
    kept: Tensor | None = None,
    link_bytes: list[int] | None = None,
    rank_pairs: Tensor | None = None,
) -> PendingExchange:
    """Plan the way of each token and start telling the other ranks how many rows will come.

    choice: int64 [T, k], the experts of each token, all different. kept: bool [T, k], False where an expert has no
    room for the token; None: all have. link_bytes: bytes sent to each rank are added there. rank_pairs: int64 [ranks],
    as are the choices that go to each there.
    """
    axis = experts.axis
    if is_dry(choice):
        return _without_values(experts, choice, link_bytes)
    place = table.find(choice, kept)
    rank_of_choice = table.rank[place]
    if kept is not None:
        rank_of_choice = rank_of_choice.masked_fill(~kept, axis.size)
    num_tokens, device = len(choice), choice.device
    goes = torch.zeros(num_tokens, axis.size + 1, dtype=torch.bool, device=device)
    goes = goes.scatter_(1, rank_of_choice, True)[:, : axis.size]
    pairs = torch.zeros(axis.size + 1, dtype=torch.int64, device=device)
    pairs.scatter_add_(0, rank_of_choice.flatten(), torch.ones_like(rank_of_choice).flatten())
    counts = torch.empty(2, axis.size, 2, dtype=torch.int64, device=device)
    sent_counts, received_counts = counts
    torch.stack((goes.sum(0), pairs[: axis.size]), dim=1, out=sent_counts)
    work = all_to_all_into(received_counts, sent_counts, axis, async_op=True)
    if rank_pairs is not None:
        rank_pairs += pairs[: axis.size]

    @torch.no_grad()
    def rows(num_rows: int) -> tuple[Tensor, Tensor]:
        # Their number is known from the counts: asked for it, the device would have to be waited for once more.
        found = torch.nonzero_static(goes.t()[table.order], size=num_rows)
        position, tokens = found.unbind(1)
        here = rank_of_choice[tokens] == table.order[position, None]
        return tokens, table.slot[place[tokens]].masked_fill(~here, -1).to(torch.int32)

    return PendingExchange(
        experts=experts,
        num_tokens=num_tokens,
        counts=counts,
        rows=rows,
        work=work,
        link_bytes=[0] * axis.size if link_bytes is None else link_bytes,
    )


def _without_values(experts: ExpertParallel, choice: Tensor, link_bytes: list[int] | None) -> PendingExchange:
    """As `begin_exchange` where choices have a shape alone (a dry run): each rank gets an even share of them."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    axis, (num_tokens, num_choices) = experts.axis, choice.shape
    with unset_fake_temporarily():
        # Choice j of token t goes to rank (t k + j) mod n, in order of rank and then of token.
        rank_of_choice = torch.arange(num_tokens * num_choices).view(num_tokens, num_choices) % axis.size
        goes = torch.zeros(num_tokens, axis.size, dtype=torch.bool).scatter_(1, rank_of_choice, True)
        pairs = torch.bincount(rank_of_choice.flatten(), minlength=axis.size)
        counts = torch.stack((goes.sum(0), pairs), dim=1).expand(2, -1, -1)
        order = torch.tensor(_own_last(axis))
        position, tokens = goes.t()[order].nonzero(as_tuple=True)
        here = rank_of_choice[tokens] == order[position, None]
        slots = torch.where(here, 0, -1).to(torch.int32)
        known_counts: list[list[list[int]]] = counts.tolist()
    return PendingExchange(
        experts=experts,
        num_tokens=num_tokens,
        counts=counts,
        rows=lambda _: (tokens, slots),
        known_counts=known_counts,
        work=None,
        link_bytes=[0] * axis.size if link_bytes is None else link_bytes,
    )


def _own_last(axis: Axis) -> list[int]:
    """Ranks in the order of their rows; this one's last: what is received is then one contiguous range before them."""
    return [rank for rank in range(axis.size) if rank != axis.rank] + [axis.rank]


def dispatch(x: Tensor, weights: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token to the ranks of its experts.

    x: [T, H]. weights: [T, k]. Returns, for the R rows that are here afterwards (those received, by rank, then those
    that stayed), the hidden states [R, H], weights [R, k], and slots [R, k] int32, -1 for an expert held elsewhere.
    Forward: all-to-all of the rows that move. Backward: all-to-all of their gradients, which are added up by token.
    Group: the expert axis.
    """
    apply: Any = _Dispatch.apply
    return apply(x, weights, exchange)


def combine(rows: Tensor, exchange: Exchange) -> Tensor:
    """Send each row [R, H] back to its token's rank and add the rows of a token up: [T, H].

    A token that went nowhere has zeros. Forward: all-to-all of the rows that moved. Backward: all-to-all of their
    gradients. Group: the expert axis.
    """
    apply: Any = _Combine.apply
    return apply(rows, exchange)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        ctx.x_dtype, ctx.weights_dtype = x.dtype, weights.dtype
        packing = RowPacking(
            width=x.shape[1],
            dtype=exchange.experts.payload_dtype or x.dtype,
            num_choices=weights.shape[1],
            weights_dtype=weights.dtype,
            has_slots=True,
        )
        count, split = exchange.num_sent, exchange.num_received
        with memory_of("experts"):
            leaving = packing.empty(count, x.device)
            arriving = packing.empty(split + exchange.num_kept, x.device)
        packing.write(leaving, x, weights, exchange.slots[:count], exchange.tokens[:count])
        work = exchange.start(arriving[:split], leaving, back=False)
        packing.write(arriving[split:], x, weights, exchange.slots[count:], exchange.tokens[count:])
        exchange.experts.wait(work)
        rows, row_weights, slots = packing.read(arriving, x.dtype)
        ctx.mark_non_differentiable(slots)
        return rows, row_weights, slots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        exchange: Exchange = ctx.exchange
        grad_rows, grad_weights = grads[0], grads[1]
        width, num_choices = grad_rows.shape[1], grad_weights.shape[1]
        packing = RowPacking(
            width=width,
            dtype=grad_rows.dtype,
            num_choices=num_choices,
            weights_dtype=grad_weights.dtype,
            has_slots=False,
        )
        count, split = exchange.num_sent, exchange.num_received
        with memory_of("experts"):
            leaving = packing.empty(split, grad_rows.device)
            arriving = packing.empty(count, grad_rows.device)
        packing.write(leaving, grad_rows[:split], grad_weights[:split])
        work = exchange.start(arriving, leaving, back=True)
        grad_x = grad_rows.new_zeros(exchange.num_tokens, width)
        grad_choice = grad_weights.new_zeros(exchange.num_tokens, num_choices)
        grad_x.index_add_(0, exchange.tokens[count:], grad_rows[split:])
        grad_choice.index_add_(0, exchange.tokens[count:], grad_weights[split:])
        exchange.experts.wait(work)
        rows, row_weights, _ = packing.read(arriving, grad_rows.dtype)
        grad_x.index_add_(0, exchange.tokens[:count], rows)
        grad_choice.index_add_(0, exchange.tokens[:count], row_weights)
        return grad_x.to(ctx.x_dtype), grad_choice.to(ctx.weights_dtype), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        count, split = exchange.num_sent, exchange.num_received
        rows = rows.contiguous()
        arriving = rows.new_empty(count, rows.shape[1])
        work = exchange.start(arriving, rows[:split], back=True)
        out = rows.new_zeros(exchange.num_tokens, rows.shape[1])
        out.index_add_(0, exchange.tokens[count:], rows[split:])
        exchange.experts.wait(work)
        return out.index_add_(0, exchange.tokens[:count], arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        exchange: Exchange = ctx.exchange
        grad = grads[0].contiguous()
        count, split = exchange.num_sent, exchange.num_received
        grad_rows = grad.new_empty(split + exchange.num_kept, grad.shape[1])
        leaving = grad.index_select(0, exchange.tokens[:count])
        work = exchange.start(grad_rows[:split], leaving, back=False)
        torch.index_select(grad, 0, exchange.tokens[count:], out=grad_rows[split:])
        exchange.experts.wait(work)
        return grad_rows, None


def rows_by_slot(slots: Tensor, num_slots: int, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Bring (row, choice) pairs into the order of the experts they go to.

    slots: int32 [R, k], -1 where a choice is not for an expert here; num_pairs: how many are. Returns `order`
    int64 [num_pairs], indices into the flattened [R * k], sorted by slot and then by row, and `ends` int32
    [num_slots], where each expert's pairs end in it; an expert without any ends where the one before does.
    """
    key = slots.flatten().long()
    key = key.masked_fill(key < 0, num_slots)
    order = key.argsort(stable=True)[:num_pairs]
    sizes = torch.zeros(num_slots + 1, dtype=torch.int64, device=slots.device)
    sizes.scatter_add_(0, key, torch.ones_like(key))
    return order, sizes[:num_slots].cumsum(0).to(torch.int32)
