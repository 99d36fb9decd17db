"""`counterflow bench compression`: what compressed reductions send, lose and take, on the gradients of a real model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.framework.bench.compute import timed
from counterflow.models.config import ModelConfig
from counterflow.models.transformer import TransformerStage, materialize
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.compress.gradients import GradientReduction
from counterflow.parallel.ops.loss import vocab_parallel_cross_entropy

NONE = "none"
_VOCAB_SIZE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method on one link.

    mbit_per_s: of the link; None: not limited. sent_bytes, fp32_bytes: of one reduction from one rank, counted on the
    wire, and uncompressed. message_error: norm of what the messages leave out over theirs. sum_error: of the sum, over
    its norm; both of a first reduction, before errors are fed back. step_s: of each counted step, over all ranks.
    """

    method: str
    mbit_per_s: float | None
    num_elements: int
    sent_bytes: int
    fp32_bytes: int
    message_error: float
    sum_error: float
    step_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than fp32."""
        return self.fp32_bytes / self.sent_bytes

    @property
    def best_s(self) -> float:
        """The quickest step: what a busy machine adds is not the method's."""
        return min(self.step_s)


def predicted_s(unlimited: Row, mbit_per_s: float) -> float:
    """What a step of the method takes on a link of that rate: as without a limit, and its bytes at the rate."""
    return unlimited.best_s + 8 * unlimited.sent_bytes / (mbit_per_s * 1e6)


def measure_compression(
    model: ModelConfig,
    methods: Mapping[str, CompressionConfig],
    *,
    rates: Sequence[float | None] = (None,),
    set_rate: Callable[[float | None], None] = lambda rate: None,
    is_everywhere: bool,
    compute_s: float,
    repeats: int,
    report: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure on the ranks of the default process group; every rank calls this, all get the rows.

    A step sleeps compute_s and sums the gradient; those of all methods come in turn on every link, after a first,
    uncounted one. rates: of the links, in Mbit/s, None without a limit; set_rate: makes this rank's link such a one.
    is_everywhere: every rank gets the whole sum (ZeRO 0), or its own range.
    """
    torch.set_num_threads(1)
    meter = ByteMeter()
    axis = Axis(group=dist.group.WORLD, name="data", meter=meter)
    shapes, gradient = model_gradient(model, axis.size, seed=axis.rank)
    expected = gradient.double()
    dist.all_reduce(expected)
    if not is_everywhere:
        expected = expected.chunk(axis.size)[axis.rank]

    buffer = torch.empty_like(gradient)
    out = None if is_everywhere else torch.empty(gradient.numel() // axis.size)
    found: dict[str, tuple[int, int, float, float]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for name, config in methods.items():
        reduction = GradientReduction(
            config, axis, shapes=shapes, num_elements=gradient.numel(), is_everywhere=is_everywhere
        )
        meter.reset()
        buffer.copy_(gradient)
        first = reduction.start(buffer, out).wait()
        sent_bytes = meter.sent_bytes()["data"]
        error = _norms(((buffer if out is None else out) - expected, expected), axis)
        found[name] = (sent_bytes, first.fp32_bytes, first.relative_error, error[0] / error[1])

        def step(reduction: GradientReduction = reduction) -> None:
            time.sleep(compute_s)
            buffer.copy_(gradient)
            reduction.start(buffer, out).wait()

        steps[name] = step

    seconds: dict[tuple[float | None, str], list[float]] = {each: [] for each in product(rates, methods)}
    for repeat in range(repeats + 1):
        order = 1 if repeat % 2 else -1
        for rate in list(rates)[::order]:
            set_rate(rate)
            for name in list(methods)[::order]:
                step_s = timed(steps[name])
                if repeat > 0:
                    seconds[rate, name].append(step_s)
    rows: list[Row] = []
    for rate, name in seconds:
        sent_bytes, fp32_bytes, message_error, sum_error = found[name]
        row = Row(
            method=name,
            mbit_per_s=rate,
            num_elements=gradient.numel(),
            sent_bytes=sent_bytes,
            fp32_bytes=fp32_bytes,
            message_error=message_error,
            sum_error=sum_error,
            step_s=tuple(seconds[rate, name]),
        )
        rows.append(row)
        if report is not None and axis.rank == 0:
            report(row)
    return rows


def model_gradient(
    model: ModelConfig, num_ranks: int, *, seed: int
) -> tuple[Sequence[tuple[int, ...]], Tensor]:
    """The shapes of a model's parameters and, end to end and padded for `num_ranks`, its gradient on one batch."""
    module = TransformerStage(
        model,
        range(model.num_layers),
        first=True,
        last=True,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=_VOCAB_SIZE,
    )
    materialize(module, device="cpu", seed=0)
    tokens = torch.randint(_VOCAB_SIZE, (4, 65), generator=torch.Generator().manual_seed(seed))
    loss = vocab_parallel_cross_entropy(
        module(tokens[:, :-1]), tokens[:, 1:], Axis(), vocab_size=_VOCAB_SIZE
    ).mean()
    loss.backward()
    parameters = list(module.parameters())
    shapes = [tuple(parameter.shape) for parameter in parameters]
    size = sum(map(math.prod, shapes))
    flat = torch.zeros(-(-size // num_ranks) * num_ranks)
    position = 0
    for parameter in parameters:
        assert parameter.grad is not None
        flat[position : position + parameter.numel()] = parameter.grad.flatten()
        position += parameter.numel()
    return shapes, flat


def _norms(tensors: Sequence[Tensor], axis: Axis) -> list[float]:
    """Of each, over all ranks."""
    squares = torch.stack([tensor.double().square().sum() for tensor in tensors])
    dist.all_reduce(squares, group=axis.group)
    return squares.sqrt().tolist()
