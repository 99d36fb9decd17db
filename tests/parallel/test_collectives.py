"""Forward, backward and byte count of every collective, against definitions on tensors that all ranks know."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.parallel.collectives import (
    Axis,
    ByteMeter,
    all_gather_into,
    all_reduce,
    all_to_all_into,
    barrier,
    broadcast,
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    gather_from_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_into,
    reduce_scatter_to_sequence_parallel,
    set_timeout,
    split_to_tensor_parallel,
)
from counterflow.parallel.groups import destroy_group, new_group
from tests.rank_pool import RankPool


def world_axis(meter: ByteMeter | None = None) -> Axis:
    return Axis(group=dist.group.WORLD, name="tensor", meter=meter)


def known(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """What `rank` holds; every rank can make it. Small integers: sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-8, 8, shape, generator=generator).float()


def run_pair(
    function: Callable[[Tensor], Tensor], x: Tensor, grad_output: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    kept = x.detach().clone()
    y = function(x)
    grad = grad_output(y)
    grad_kept = grad.clone()
    y.backward(grad)
    assert torch.equal(x.detach(), kept)
    assert torch.equal(grad, grad_kept)
    assert x.grad is not None
    return y.detach(), x.grad


def check_pairs(size: int, dim: int) -> None:
    axis, rank = world_axis(), dist.get_rank()
    full_shape, part_shape = [4 * size, 4 * size, 4 * size], [4 * size, 4 * size, 4 * size]
    part_shape[dim] = 4
    full = [known(r, *full_shape) for r in range(size)]
    part = [known(r, *part_shape) for r in range(size)]
    full_grads = [known(r, *full_shape, seed=1) for r in range(size)]
    part_grads = [known(r, *part_shape, seed=1) for r in range(size)]

    y, grad = run_pair(
        lambda x: copy_to_tensor_parallel(x, axis), full[rank], lambda _: full_grads[rank].clone()
    )
    assert torch.equal(y, full[rank])
    assert torch.equal(grad, sum(full_grads))

    y, grad = run_pair(
        lambda x: reduce_from_tensor_parallel(x, axis), full[rank], lambda _: full_grads[rank].clone()
    )
    assert torch.equal(y, sum(full))
    assert torch.equal(grad, full_grads[rank])

    y, grad = run_pair(
        lambda x: gather_from_sequence_parallel(x, axis, dim),
        part[rank],
        lambda _: full_grads[rank].clone(),
    )
    assert torch.equal(y, torch.cat(part, dim))
    assert torch.equal(grad, sum(full_grads).split(4, dim)[rank])

    y, grad = run_pair(
        lambda x: reduce_scatter_to_sequence_parallel(x, axis, dim),
        full[rank],
        lambda _: part_grads[rank].clone(),
    )
    assert torch.equal(y, sum(full).split(4, dim)[rank])
    assert torch.equal(grad, torch.cat(part_grads, dim))

    y, grad = run_pair(
        lambda x: split_to_tensor_parallel(x, axis, dim), full[0], lambda _: part_grads[rank].clone()
    )
    assert torch.equal(y, full[0].split(4, dim)[rank])
    assert torch.equal(grad, torch.cat(part_grads, dim))

    y, grad = run_pair(
        lambda x: gather_from_tensor_parallel(x, axis, dim), part[rank], lambda _: full_grads[0].clone()
    )
    assert torch.equal(y, torch.cat(part, dim))
    assert torch.equal(grad, full_grads[0].split(4, dim)[rank])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_autograd_pairs(ranks: RankPool, size: int, dim: int) -> None:
    ranks.run(check_pairs, size, size, dim)


def check_all_to_all(size: int) -> None:
    axis, rank = world_axis(), dist.get_rank()
    rows = [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)]  # rows[i][j] go from i to j
    sent = [known(r, sum(rows[r]), 5) for r in range(size)]
    received_splits = [rows[i][rank] for i in range(size)]
    y = torch.empty(sum(received_splits), 5)
    all_to_all_into(y, sent[rank], axis, output_splits=received_splits, input_splits=rows[rank])
    assert torch.equal(y, torch.cat([sent[i].split(rows[i])[rank] for i in range(size)]))

    even = [known(r, 2 * size, 3) for r in range(size)]
    y = torch.empty(2 * size, 3)
    all_to_all_into(y, even[rank], axis)
    assert torch.equal(y, torch.cat([even[i].split(2)[rank] for i in range(size)]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_to_all(ranks: RankPool, size: int) -> None:
    ranks.run(check_all_to_all, size, size)


def check_raw_calls(size: int, async_op: bool) -> dict[str, int]:
    meter = ByteMeter()
    axis, rank = world_axis(meter), dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part, full = torch.full((2,), rank + 1.0), torch.empty(2 * size)
        works = [all_gather_into(full, part, axis, async_op=async_op)]
        source, out = torch.arange(2.0 * size), torch.empty(2)
        works.append(reduce_scatter_into(out, source, axis, async_op=async_op))
        total = torch.full((4,), rank + 1.0)
        works.append(all_reduce(total, axis, op=dist.ReduceOp.MAX, async_op=async_op))
        root = torch.full((3,), float(rank))
        works.append(broadcast(root, axis, source=size - 1, async_op=async_op))
        swapped = torch.empty(size)
        works.append(all_to_all_into(swapped, torch.full((size,), 1.0 * rank), axis, async_op=async_op))
        for work in works:
            assert (work is not None) == (async_op and size > 1)
            if work is not None:
                work.wait()
    assert torch.equal(full, torch.arange(1.0, size + 1).repeat_interleave(2))
    assert torch.equal(out, size * source[2 * rank : 2 * rank + 2])
    assert torch.equal(total, torch.full((4,), float(size)))
    assert torch.equal(root, torch.full((3,), size - 1.0))
    assert torch.equal(swapped, torch.arange(float(size)))
    return meter.sent_bytes()


@pytest.mark.parametrize("async_op", [False, True])
def test_raw_calls_do_not_warn_and_count_ring_bytes(ranks: RankPool, async_op: bool) -> None:
    assert ranks.run(check_raw_calls, 1, 1, async_op) == [{}]
    # fp32, 4 ranks: gather 3*8, reduce-scatter 3*8, all-reduce 2*3/4*16, broadcast 12, all-to-all 3/4*16
    sent = ranks.run(check_raw_calls, 4, 4, async_op)
    # The ring of a broadcast from rank 3 ends at rank 2, which passes nothing on.
    assert sent == [{"tensor": 24 + 24 + 24 + last + 12} for last in (12, 12, 0, 12)]


def check_uneven_bytes() -> int:
    meter = ByteMeter()
    kept = [7, 0] if dist.get_rank() == 0 else [3, 5]
    received = [7, 3] if dist.get_rank() == 0 else [0, 5]
    out, axis = torch.empty(sum(received), 2), world_axis(meter)
    all_to_all_into(out, torch.zeros(sum(kept), 2), axis, output_splits=received, input_splits=kept)
    return meter.sent_bytes()["tensor"]


def test_rows_that_stay_are_not_sent(ranks: RankPool) -> None:
    assert ranks.run(check_uneven_bytes, 2) == [0, 3 * 2 * 4]


def test_one_process_without_a_group_is_the_identity() -> None:
    meter = ByteMeter()
    axis = Axis(meter=meter)
    x = torch.randn(2, 3, requires_grad=True)
    for pair in (copy_to_tensor_parallel, reduce_from_tensor_parallel):
        assert torch.equal(pair(x, axis), x)
    for pair in (gather_from_sequence_parallel, reduce_scatter_to_sequence_parallel):
        assert torch.equal(pair(x, axis), x)
    assert (axis.size, axis.rank, meter.sent_bytes()) == (1, 0, {})


def test_meter_adds_by_axis_and_resets() -> None:
    meter = ByteMeter()
    tensor, data = Axis(name="tensor", meter=meter), Axis(name="data", meter=meter)
    tensor.count(3)
    tensor.count(4)
    data.count(5)
    assert meter.sent_bytes() == {"tensor": 7, "data": 5}
    meter.reset()
    assert meter.sent_bytes() == {}


def refuse_uneven_sequence() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 5, 2\).*2 ranks of the tensor axis.*multiple of 2"):
        reduce_scatter_to_sequence_parallel(torch.zeros(1, 5, 2), world_axis(), 1)


def test_sequence_that_the_axis_does_not_divide_is_refused(ranks: RankPool) -> None:
    ranks.run(refuse_uneven_sequence, 2)


def late_rank(size: int) -> list[str]:
    """What rank 0 is told where the others come to a collective too late; `size` ranks in a group of their own."""
    group = new_group(list(range(size)), "late")
    set_timeout(group, 0.3)
    axis = Axis(group=group, name="replica")
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: all_reduce(torch.ones(2), axis),
        "all-gather": lambda: wait(all_gather_into(torch.ones(2 * size), torch.ones(2), axis, async_op=True)),
        "barrier": lambda: barrier(axis),
    }
    told: list[str] = []
    if dist.get_rank() == 0:
        for name, call in calls.items():
            with pytest.raises(RuntimeError) as caught:
                call()
            (note,) = caught.value.__notes__
            assert note == f"in {name} over the replica axis, of ranks {', '.join(map(str, range(size)))}"
            told.append(note)
    dist.barrier()
    assert group is not None
    destroy_group(group)
    return told


def wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def test_a_collective_that_waits_too_long_says_which_it_is(ranks: RankPool) -> None:
    assert len(ranks.run(late_rank, 2, 2)[0]) == 3
