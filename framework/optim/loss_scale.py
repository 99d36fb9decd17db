"""Dynamic loss scaling for fp16, as a pure rule (config node `precision.loss_scale`).

Gradients of small losses fall below what fp16 can hold, so the loss is multiplied by a scale for its backward and
gradients are divided by it again, in fp32, before they leave the rank that accumulated them. A step whose gradients
overflow is skipped and the scale lowered; after many that do not, it is raised.
Method: Micikevicius et al., arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Of gradients that are all zero any scale is good; it stays one that fp32 can hold.
_LARGEST = 2.0**64


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleConfig:
    """initial_scale: of the first step. growth_factor: by which it is raised after `growth_interval` steps in a row
    without overflow. backoff_factor: by which it is lowered after one. min_scale: an overflow there ends the run.

    Powers of two change no bit of a gradient that does not under- or overflow.
    """

    initial_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            "initial_scale": (
                self.min_scale <= self.initial_scale <= _LARGEST,
                f"from min_scale ({self.min_scale:g}) to 2^64; 65536 is usual",
            ),
            "growth_factor": (1 <= self.growth_factor < math.inf, "1 or more; 2 is usual, 1 never raises it"),
            "backoff_factor": (0 < self.backoff_factor < 1, "between 0 and 1; 0.5 is usual"),
            "growth_interval": (self.growth_interval >= 1, "a number of steps, 1 or more; 2000 is usual"),
            "min_scale": (0 < self.min_scale < math.inf, "above 0; 1 is usual"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"precision.loss_scale.{name}={getattr(self, name)}: must be {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scale of the next step; num_good_steps: steps without overflow since it last changed."""

    scale: float
    num_good_steps: int = 0


def scale_after(config: LossScaleConfig, state: LossScale, *, has_overflowed: bool) -> LossScale:
    """The state after a step."""
    if has_overflowed:
        return LossScale(scale=max(state.scale * config.backoff_factor, config.min_scale))
    good = replace(state, num_good_steps=state.num_good_steps + 1)
    if not may_grow(config, state):
        return good
    return LossScale(scale=min(state.scale * config.growth_factor, _LARGEST))


def may_grow(config: LossScaleConfig, state: LossScale) -> bool:
    """Whether the scale is raised after the next step, if that does not overflow."""
    return state.num_good_steps + 1 >= config.growth_interval
