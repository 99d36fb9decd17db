"""Learning-rate schedules, as pure functions of the step (config node `optimizer.lr_schedule`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateConfig:
    """Warm-up, then `cosine` decay, `wsd` (warm-up, stable, decay) or `constant`.

    warmup_steps: linear from 0. decay_steps: length of the final decay of `wsd`, which alone has one.
    min_ratio: the last learning rate over the base one.
    scale: `sqrt_data_parallel` multiplies the base rate by sqrt(data_parallel_size).
    """

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 10
    decay_steps: int = 20
    min_ratio: float = 0.1
    scale: Literal["none", "sqrt_data_parallel"] = "none"

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "decay_steps"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"optimizer.lr_schedule.{name}={getattr(self, name)}: a number of steps; set it to 0 or more"
                )
        if not 0 <= self.min_ratio <= 1:
            raise ValueError(
                f"optimizer.lr_schedule.min_ratio={self.min_ratio}: the last learning rate over the base one, "
                "from 0 to 1"
            )


def learning_rate(
    config: LearningRateConfig, step: float, total_steps: float, base_lr: float, data_parallel_size: int
) -> float:
    """The learning rate of `step`, counted from 0, of a run of `total_steps`; a smaller batch is a part of a step.

    Warm-up reaches the peak at step `warmup_steps - 1`, decay reaches `min_ratio` at the last step. `cosine`:
    Loshchilov and Hutter, arXiv 1608.03983. `wsd`: Hu et al., arXiv 2404.06395, with a linear decay. Where the
    run is too short for warm-up and decay, the lower of the two holds.
    """
    peak = base_lr
    if config.scale == "sqrt_data_parallel":
        peak *= math.sqrt(data_parallel_size)
    done = step + 1
    warmup = min(1.0, done / config.warmup_steps) if config.warmup_steps else 1.0
    return peak * min(warmup, _decay(config, done, total_steps))


def _decay(config: LearningRateConfig, done: float, total_steps: float) -> float:
    """The factor after warm-up, once `done` steps count: 1 at first, `min_ratio` at the end."""
    if config.name == "cosine":
        length = total_steps - config.warmup_steps
        progress = (done - config.warmup_steps) / length if length > 0 else 0.0
        progress = min(1.0, max(0.0, progress))
        return config.min_ratio + (1 - config.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.name == "wsd" and config.decay_steps:
        remaining = max(0, total_steps - done) / config.decay_steps
        return config.min_ratio + (1 - config.min_ratio) * min(1.0, remaining)
    return 1.0
