"""Learning-rate schedules, as pure functions of the step (config node `optimizer.lr_schedule`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateConfig:
    """Warm-up, then `cosine` decay, `wsd` (warm-up, stable, decay) or `constant`.

    warmup_steps: linear from 0. decay_steps: length of the final decay of `wsd`.
    min_ratio: the last learning rate over the base one.
    scale: `sqrt_data_parallel` multiplies the base rate by sqrt(data_parallel_size).
    """

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 10
    decay_steps: int = 20
    min_ratio: float = 0.1
    scale: Literal["none", "sqrt_data_parallel"] = "none"
