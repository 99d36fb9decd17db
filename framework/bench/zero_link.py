"""`counterflow bench zero mode=link`: how much of ZeRO-3's gathers and reductions runs under computation.

One stage of blocks whose forward sleeps as long as a gather of one takes on the link, and whose backward twice as
long. So whatever a step takes beyond its sleeps is what the link costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.framework.bench.compute import timed
from counterflow.framework.trainer.collector import frozen_objects
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.ir.trace import Activity
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.pipeline.schedules.registry import generate
from counterflow.parallel.tensor.layers import ReplicatedLinear
from counterflow.parallel.zero.blocks import Block
from counterflow.parallel.zero.config import ZeroConfig
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.stage import ShardedStage

NUM_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRow:
    """One way to gather and reduce, on a slow link; medians over steps.

    link_s: what a rank's bytes take on the link. compute_s: the sleeps of a step. exposed_s: what a step takes beyond
    them. waits_s: the part of that which gathers and reductions were waited for, as the trace has it.
    """

    units: str
    reduce: str
    num_microbatches: int
    sent_bytes: int
    link_s: float
    compute_s: float
    step_s: float
    waits_s: float

    @property
    def exposed_s(self) -> float:
        return self.step_s - self.compute_s

    @property
    def hidden_share(self) -> float:
        return 1 - self.exposed_s / self.link_s


class _Sleep(torch.autograd.Function):
    """The identity, slow in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class _SleepingBlock(nn.Module):
    """x [1, width]; a real linear layer, so that gradients come as those of a model do."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(width, width, sequence_parallel=False)
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Sleep.apply(self.linear(x), self._seconds))  # pyright: ignore[reportUnknownMemberType]


@frozen_objects()
def measure_hidden(
    ways: Sequence[tuple[str, str]],
    *,
    mbit_per_s: float,
    block_s: float,
    num_microbatches: int,
    repeats: int,
) -> list[HiddenRow]:
    """Each of `ways` (zero.units, zero.reduce) on the ranks of the default group; every rank calls this.

    block_s: how long a gather of one block takes on a link of `mbit_per_s`, and its forward.
    """
    torch.set_num_threads(1)
    bytes_per_s = mbit_per_s * 1e6 / 8
    num_ranks = dist.get_world_size()
    width = round((block_s * bytes_per_s * num_ranks / (num_ranks - 1) / 4) ** 0.5)
    rows: list[HiddenRow] = []
    for units, reduce in ways:
        zero = ZeroConfig(stage=3, units=cast(Any, units), reduce=cast(Any, reduce))
        meter = ByteMeter()
        runtime = _runtime(zero, meter, width=width, block_s=block_s, num_microbatches=num_microbatches)
        x = [torch.zeros(1, width)] * num_microbatches
        waits: list[float] = []
        seconds: list[float] = []

        def step(runtime: Runtime = runtime, x: list[Tensor] = x, waits: list[float] = waits) -> None:
            result = runtime.step(x, x, _loss, share_losses=False)
            kinds = (Activity.GATHER_WAIT, Activity.REDUCE)
            waits.append(sum(each.duration_s for each in result.trace.intervals if each.activity in kinds))

        for _ in range(repeats + 1):
            meter.reset()
            seconds.append(timed(step))
        sent = sum(meter.sent_bytes().values())
        rows.append(
            HiddenRow(
                units=units,
                reduce=reduce,
                num_microbatches=num_microbatches,
                sent_bytes=sent,
                link_s=sent / bytes_per_s,
                compute_s=3 * block_s * NUM_BLOCKS * num_microbatches,
                step_s=statistics.median(seconds[1:]),
                waits_s=statistics.median(waits[1:]),
            )
        )
        runtime.close()
    return rows


def _runtime(
    zero: ZeroConfig, meter: ByteMeter, *, width: int, block_s: float, num_microbatches: int
) -> Runtime:
    module = nn.Sequential(*(_SleepingBlock(width, block_s) for _ in range(NUM_BLOCKS)))
    replica = ReplicaAxes.of(Axis(group=dist.group.WORLD, name="data", meter=meter))
    blocks = [Block(name=f"layers.{index}", modules=(each,)) for index, each in enumerate(module)]
    parameters = ShardedStage(module, ZeroContext(config=zero, replica=replica), blocks=blocks)
    schedule = lower(generate("1f1b", 1, num_microbatches), zero_stage=3, reshard_after=zero.reshard_after)
    return Runtime({0: Stage(0, module, parameters)}, schedule)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()
