"""`counterflow bench p2p`: whether chunked transfers between stages pay, on one link and in a pipeline."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from counterflow.framework.bench.compute import timed
from counterflow.framework.bench.sleeping import SleepCosts, Sleeper, our_step
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.runtime.p2p import Channel, Transport, specs_of
from counterflow.parallel.pipeline.schedules.registry import generate

Case = Literal["contiguous", "transposed", "1f1b step", "dualpipe_v step"]
CASES: tuple[Case, ...] = ("contiguous", "transposed", "1f1b step", "dualpipe_v step")
NUM_MICROBATCHES = 8
# A ratio within this of 1 is noise on a shared machine.
_NOISE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case and size: seconds of interleaved repeats, without chunks and with each chunk size.

    case: one tensor from rank 0 to 1, contiguous or a transposed view that must be copied to be sent; or a step
    of sleeping stages whose activations have that size. link: `loopback`, or the rate.
    """

    link: str
    case: Case
    tensor_bytes: int
    chunk_bytes: int
    whole_s: tuple[float, ...]
    chunked_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Time in chunks over time whole: the median of pairs taken in turn."""
        return statistics.median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """Of each pair, ascending."""
        return sorted(chunked / whole for whole, chunked in zip(self.whole_s, self.chunked_s, strict=True))

    @property
    def verdict(self) -> Literal["pays", "costs", "same"]:
        """Faster or slower where the median is beyond the noise and three quarters of the pairs agree."""
        ratios = self.ratios
        quarter = len(ratios) // 4
        if self.ratio < 1 - _NOISE and ratios[-1 - quarter] < 1:
            return "pays"
        if self.ratio > 1 + _NOISE and ratios[quarter] > 1:
            return "costs"
        return "same"


def measure_p2p(
    link: str,
    cases: Sequence[Case],
    tensor_bytes: Sequence[int],
    chunk_bytes: Sequence[int],
    *,
    action_s: float,
    repeats: int,
    report: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure on the ranks of the default process group, two or more; every rank calls this, all get the rows.

    action_s: what F, I and W sleep in the cases that are steps. A first, uncounted repeat makes connections.
    """
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in cases:
        for size in tensor_bytes:
            steps = {chunk: _step(case, size, chunk, action_s) for chunk in (None, *chunk_bytes)}
            seconds: dict[int | None, list[float]] = {chunk: [] for chunk in steps}
            for repeat in range(repeats + 1):
                # Turned about, so that none always follows the same other.
                order = list(steps) if repeat % 2 else list(reversed(steps))
                for chunk in order:
                    step_s = timed(steps[chunk])
                    if repeat > 0:
                        seconds[chunk].append(step_s)
            for chunk in chunk_bytes:
                row = Row(
                    link=link,
                    case=case,
                    tensor_bytes=size,
                    chunk_bytes=chunk,
                    whole_s=tuple(seconds[None]),
                    chunked_s=tuple(seconds[chunk]),
                )
                rows.append(row)
                if report is not None and dist.get_rank() == 0:
                    report(row)
    return rows


def _step(case: Case, size: int, chunk_bytes: int | None, action_s: float) -> Callable[[], None]:
    group = dist.group.WORLD
    assert group is not None
    if case in ("contiguous", "transposed"):
        return _transfer(case == "transposed", size, chunk_bytes, group)
    costs = SleepCosts(forward_s=action_s, input_gradient_s=action_s, weight_gradient_s=action_s)
    num_ranks = dist.get_world_size()
    schedule = generate(case.removesuffix(" step"), num_ranks, max(NUM_MICROBATCHES, 2 * num_ranks))
    return our_step(schedule, costs, (size // 4,), group, Sleeper(), p2p_chunk_bytes=chunk_bytes)


def _transfer(
    transposed: bool, size: int, chunk_bytes: int | None, group: dist.ProcessGroup
) -> Callable[[], None]:
    """One activation from rank 0 to rank 1 through the pipeline's transport."""
    transport = Transport(group, device=torch.device("cpu"), chunk_bytes=chunk_bytes)
    channel = Channel(1, Kind.SEND_B)  # of a gradient: its shape needs no header
    value = torch.zeros(512, size // 2048).t() if transposed else torch.zeros(size // 2048, 512)

    def step() -> None:
        if transport.rank == 0:
            transport.send(1, channel, 0, (value,), uniform=True)
        elif transport.rank == 1:
            transport.wait(transport.receive(0, channel, 0, specs_of((value,))))
        transport.finish_step()

    return step
