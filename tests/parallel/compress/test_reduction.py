"""Compressed sums over gloo ranks, against the sums of all ranks' gradients computed in one place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.compress.codec import codec_of
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.compress.gradients import GradientReduction
from counterflow.parallel.compress.pieces import PIECE_ELEMENTS
from counterflow.parallel.compress.reduction import fp32_bytes
from tests.rank_pool import RankPool

# Matrices, experts, vectors; 2 * 4 elements of padding for any of the worlds.
SHAPES = ((40, 24), (24,), (3, 30, 20), (24, 40), (2, 2))
NUM_ELEMENTS = sum(math.prod(shape) for shape in SHAPES) + 4
METHODS = ("onebit", "int8", "int4", "fp8", "topk", "powersgd")


def grid(methods: Sequence[str]) -> list[Any]:
    """method, is_everywhere, world_size: of each method two that show all pairs of values; the others are slow."""
    return [
        pytest.param(
            method,
            is_everywhere,
            world_size,
            marks=[] if (index + is_everywhere + world_size // 2) % 2 else pytest.mark.slow,
        )
        for index, method in enumerate(methods)
        for is_everywhere in (True, False)
        for world_size in (2, 4)
    ]


def gradient(rank: int, step: int) -> Tensor:
    """A part that stays the same from step to step, and noise."""
    stays = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(rank))
    noise = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(1000 + 100 * step + rank))
    values = stays + 0.3 * noise
    values[-4:] = 0
    return values


def total(world_size: int, step: int) -> Tensor:
    return torch.stack([gradient(rank, step) for rank in range(world_size)]).double().sum(0)


def reduction(config: CompressionConfig, axis: Axis, is_everywhere: bool) -> GradientReduction:
    return GradientReduction(
        config, axis, shapes=SHAPES, num_elements=NUM_ELEMENTS, is_everywhere=is_everywhere
    )


def sums(config: CompressionConfig, is_everywhere: bool, num_steps: int) -> dict[str, Any]:
    """On one rank: what each step gave, its report, bytes on the meter, and the errors kept at the end."""
    meter = ByteMeter()
    axis = Axis(group=dist.group.WORLD, name="data", meter=meter)
    reduce = reduction(config, axis, is_everywhere)
    results: list[Tensor] = []
    reports: list[tuple[int, int, float]] = []
    for step in range(num_steps):
        buffer = gradient(axis.rank, step)
        out = None if is_everywhere else torch.empty(NUM_ELEMENTS // axis.size)
        report = reduce.start(buffer, out).wait()
        results.append((buffer if out is None else out).clone())
        reports.append((report.sent_bytes, report.fp32_bytes, report.relative_error))
    return {
        "results": results,
        "reports": reports,
        "sent": meter.sent_bytes()["data"],
        "errors": {name: tensor for name, tensor in reduce.state().items() if "error" in name},
    }


def whole(replies: list[dict[str, Any]], is_everywhere: bool, step: int) -> Tensor:
    parts = [reply["results"][step] for reply in replies]
    if not is_everywhere:
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts[1:])
    return parts[0]


@pytest.mark.parametrize(("method", "is_everywhere", "world_size"), grid(METHODS))
def test_nothing_is_lost(ranks: RankPool, method: str, is_everywhere: bool, world_size: int) -> None:
    """What came out and what all ranks still keep is, together, what went in."""
    config = CompressionConfig(method=method, block_size=32, density=0.1)  # type: ignore[arg-type]
    num_steps = 3
    replies = ranks.run(sums, world_size, config, is_everywhere, num_steps)
    out = torch.stack([whole(replies, is_everywhere, step) for step in range(num_steps)]).double().sum(0)
    part = NUM_ELEMENTS // world_size
    for rank, reply in enumerate(replies):
        error = reply["errors"]["error"].double()
        if method == "powersgd":
            out += error
            continue
        others = [index for index in range(world_size) if index != rank]
        for index, row in zip(others, error, strict=True):
            out[index * part : (index + 1) * part] += row
        if is_everywhere:
            out[rank * part : (rank + 1) * part] += reply["errors"]["sum_error"][0].double()
    expected = torch.stack([total(world_size, step) for step in range(num_steps)]).sum(0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


LIMITS = {"int8": 127, "int4": 7, "fp8": 0}


@pytest.mark.parametrize(("method", "is_everywhere", "world_size"), grid(list(LIMITS)))
def test_one_sum_is_within_the_bound(
    ranks: RankPool, method: str, is_everywhere: bool, world_size: int
) -> None:
    limit = LIMITS[method]
    config = CompressionConfig(method=method, block_size=32)  # type: ignore[arg-type]
    replies = ranks.run(sums, world_size, config, is_everywhere, 1)
    got, expected = whole(replies, is_everywhere, 0).double(), total(world_size, 0)
    largest = max(float(gradient(rank, 0).abs().max()) for rank in range(world_size))
    # Half a step of each message on the way, and of the sum's; fp8 is off by a sixteenth.
    share = 1 / (2 * limit) if limit else 1 / 16
    first = (world_size - 1) * largest * share
    second = (float(expected.abs().max()) + first) * share if is_everywhere else 0.0
    difference = (got - expected).abs().max()
    assert 0 < difference <= first + second + 1e-5


LONG = 2 * (PIECE_ELEMENTS + 1000)


def long_gradient(rank: int) -> Tensor:
    return torch.randn(LONG, generator=torch.Generator().manual_seed(rank))


def sum_of_several_pieces() -> Tensor:
    axis = Axis(group=dist.group.WORLD, name="data")
    out = torch.empty(LONG // 2)
    reduce = GradientReduction(
        CompressionConfig(method="int8"), axis, shapes=[(LONG,)], num_elements=LONG, is_everywhere=False
    )
    reduce.start(long_gradient(axis.rank), out).wait()
    return out


def test_a_long_row_is_summed_as_if_it_were_encoded_at_once(ranks: RankPool) -> None:
    codec = codec_of(CompressionConfig(method="int8"))
    for rank, out in enumerate(ranks.run(sum_of_several_pieces, 2)):
        own, others = (long_gradient(each).view(2, -1)[rank] for each in (rank, 1 - rank))
        assert torch.equal(out, own + codec.decode(codec.encode(others[None]), LONG // 2)[0])


@pytest.mark.parametrize("is_everywhere", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_bytes_on_the_meter(ranks: RankPool, method: str, is_everywhere: bool) -> None:
    config = CompressionConfig(method=method, block_size=64, density=0.02, rank=2)  # type: ignore[arg-type]
    for reply in ranks.run(sums, 4, config, is_everywhere, 2):
        reports = reply["reports"]
        assert reply["sent"] == sum(sent for sent, _, _ in reports)
        assert all(4 * sent < 1.5 * plain for sent, plain, _ in reports if method != "powersgd")
        assert {plain for _, plain, _ in reports} == {
            fp32_bytes(NUM_ELEMENTS, 4, is_everywhere=is_everywhere)
        }
        assert all(0 < error < 1.0001 for _, _, error in reports)


def distances_of_mean(config: CompressionConfig, is_everywhere: bool) -> list[float]:
    """On rank 0: how far the mean of sums of one and the same gradient is from the sum, after 16 and 64 of them."""
    axis = Axis(group=dist.group.WORLD)
    reduce = reduction(config, axis, is_everywhere)
    mean, distances = torch.zeros(NUM_ELEMENTS // (1 if is_everywhere else axis.size)).double(), []
    expected = total(axis.size, 0)[: mean.numel()]
    for count in range(1, 65):
        buffer = gradient(axis.rank, 0)
        out = None if is_everywhere else torch.empty(mean.numel())
        reduce.start(buffer, out).wait()
        mean += ((buffer if out is None else out) - mean) / count
        if count in (16, 64):
            distances.append(float((mean - expected).norm() / expected.norm()))
    return distances


@pytest.mark.parametrize("is_everywhere", [True, False])
@pytest.mark.parametrize("method", ["onebit", "int4", "topk", "powersgd"])
def test_error_feedback_removes_the_bias(ranks: RankPool, method: str, is_everywhere: bool) -> None:
    distances: dict[bool, list[float]] = {}
    for error_feedback in (True, False):
        config = CompressionConfig(
            method=method,  # type: ignore[arg-type]
            block_size=32,
            density=0.1,
            error_feedback=error_feedback,
        )
        distances[error_feedback] = ranks.run(distances_of_mean, 2, config, is_everywhere)[0]
    # The mean comes nearer about as one over the number of sums; without feedback it stays where it is.
    assert distances[True][1] < 0.5 * distances[True][0]
    assert distances[False][1] > 0.95 * distances[False][0]
    assert distances[True][1] < 0.3 * distances[False][1]


def warmed_up() -> list[bool]:
    axis = Axis(group=dist.group.WORLD)
    reduce = reduction(CompressionConfig(method="int8", warmup_steps=2), axis, True)
    exact: list[bool] = []
    for step in range(3):
        buffer = gradient(axis.rank, step)
        report = reduce.start(buffer, None).wait()
        exact.append(torch.allclose(buffer.double(), total(2, step), rtol=1e-6, atol=1e-6))
        assert (report.ratio == 1) == (step < 2)
        assert any(bool(tensor.any()) for tensor in reduce.state().values()) == (step == 2)
    assert reduce.num_steps == 3
    reduce.reset()
    assert not any(bool(tensor.any()) for tensor in reduce.state().values())
    return exact


def test_the_first_steps_are_not_compressed(ranks: RankPool) -> None:
    assert ranks.run(warmed_up, 2) == [[True, True, False]] * 2


def resumed(method: str) -> bool:
    """Another object, filled with the state of the first, goes on to the bit."""
    axis = Axis(group=dist.group.WORLD)
    config = CompressionConfig(method=method, block_size=32)  # type: ignore[arg-type]
    first, second = reduction(config, axis, True), reduction(config, axis, True)
    for step in range(2):
        first.start(gradient(axis.rank, step), None).wait()
    for name, tensor in second.state().items():
        tensor.copy_(first.state()[name])
    buffers = [gradient(axis.rank, 2), gradient(axis.rank, 2)]
    first.start(buffers[0], None).wait()
    second.start(buffers[1], None).wait()
    return torch.equal(*buffers)


@pytest.mark.parametrize("method", ["onebit", "powersgd"])
def test_state_goes_on_in_another_object(ranks: RankPool, method: str) -> None:
    assert ranks.run(resumed, 2, method) == [True, True]


def poisoned(method: str, is_everywhere: bool) -> tuple[bool, bool, bool]:
    axis = Axis(group=dist.group.WORLD)
    reduce = reduction(CompressionConfig(method=method), axis, is_everywhere)  # type: ignore[arg-type]
    finite: list[bool] = []
    for step in range(3):
        buffer = gradient(axis.rank, step)
        if step == 1 and axis.rank == 1:
            buffer[:40:20] = math.nan
        out = None if is_everywhere else torch.empty(NUM_ELEMENTS // 2)
        reduce.start(buffer, out).wait()
        finite.append(bool((buffer if out is None else out).isfinite().all()))
        assert all(bool(tensor.isfinite().all()) for tensor in reduce.state().values())
    return finite[0], finite[1], finite[2]


@pytest.mark.parametrize("method", METHODS)
def test_nan_is_seen_and_does_not_stay(ranks: RankPool, method: str) -> None:
    assert ranks.run(poisoned, 2, method, True) == [(True, False, True)] * 2
    own_range = ranks.run(poisoned, 2, method, False)
    assert own_range[0] == (True, False, True)


def single(method: str) -> None:
    config = CompressionConfig(method=method)  # type: ignore[arg-type]
    buffer, out = gradient(0, 0), torch.empty(NUM_ELEMENTS)
    report = reduction(config, Axis(), False).start(buffer, out).wait()
    assert torch.equal(out, gradient(0, 0))
    assert (report.sent_bytes, report.ratio, report.relative_error) == (0, 1.0, 0.0)
    assert torch.equal(buffer, out)
    reduction(config, Axis(), True).start(buffer, None).wait()
    assert torch.equal(buffer, out)


@pytest.mark.parametrize("method", ["none", *METHODS])
def test_one_rank_is_the_identity(method: str) -> None:
    single(method)


def started_while_the_peer_is_away(method: str) -> bool:
    """Rank 1 begins only once rank 0 has begun: were it to wait for the network, both would wait for ever."""
    axis = Axis(group=dist.group.WORLD)
    store = dist.distributed_c10d._get_default_store()
    reduce = reduction(CompressionConfig(method=method), axis, True)  # type: ignore[arg-type]
    buffer = gradient(axis.rank, 0)
    if axis.rank == 1:
        store.wait([f"begun-{method}"])
    pending = reduce.start(buffer, None)
    if axis.rank == 0:
        store.set(f"begun-{method}", "yes")
    # The second step is begun where asked for, before the end is waited for.
    pending.advance()
    return pending.wait() is pending.wait()


@pytest.mark.parametrize("method", ["none", "onebit", "topk", "powersgd"])
def test_beginning_does_not_wait_for_the_network(ranks: RankPool, method: str) -> None:
    assert ranks.run(started_while_the_peer_is_away, 2, method) == [True, True]
