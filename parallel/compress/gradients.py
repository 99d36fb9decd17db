"""The reduction of a unit's gradients that a config asks for: uncompressed at first, then by its method."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from counterflow.parallel.collectives import Axis
from counterflow.parallel.compress.codec import codec_of
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.compress.powersgd import PowerSGDReduction, plan_factors
from counterflow.parallel.compress.reduction import (
    CodedReduction,
    PendingReduction,
    PlainReduction,
    Reduction,
)


class GradientReduction:
    """A `Reduction` over `axis` of the gradients of parameters laid end to end in one padded buffer.

    shapes: of the parameters, in order. num_elements: of the buffer. is_everywhere: whether every rank gets the whole
    sum (ZeRO 0), or its own range. num_steps: reductions so far; the first `warmup_steps` are plain.
    plain: what sums them as they are; None: a `PlainReduction` in `dtype`.
    """

    def __init__(
        self,
        config: CompressionConfig,
        axis: Axis,
        *,
        shapes: Sequence[tuple[int, ...]],
        num_elements: int,
        is_everywhere: bool,
        device: torch.device | None = None,
        plain: Reduction | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        assert sum(map(math.prod, shapes)) <= num_elements
        self.num_steps = 0
        self._warmup_steps = config.warmup_steps
        self._plain: Reduction = PlainReduction(axis, dtype) if plain is None else plain
        self._compressed: Reduction = self._plain
        if config.method == "powersgd":
            self._compressed = PowerSGDReduction(
                plan_factors(shapes, config.rank),
                axis,
                num_elements=num_elements,
                error_feedback=config.error_feedback,
                device=device,
            )
        elif config.method != "none":
            self._compressed = CodedReduction(
                codec_of(config),
                axis,
                num_elements=num_elements,
                is_everywhere=is_everywhere,
                error_feedback=config.error_feedback,
                device=device,
            )

    def start(self, buffer: Tensor, out: Tensor | None) -> PendingReduction:
        """See `Reduction.start`."""
        chosen = self._plain if self.num_steps < self._warmup_steps else self._compressed
        self.num_steps += 1
        return chosen.start(buffer, out)

    def state(self) -> dict[str, Tensor]:
        """What the method keeps between steps, by name, to be saved and filled in place; this rank's alone."""
        return self._compressed.state()

    def reset(self) -> None:
        """Forget what was kept: of another layout it means nothing. The steps count on."""
        self._compressed.reset()
