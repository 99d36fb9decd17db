"""Which optimizer steps are skipped because they would do harm, as a pure rule (config node `skip_step`).

Note [A skipped step]
Its batch is used up and nothing else: parameters, moments, Adam's step count, the position in the learning-rate
schedule, router biases and what compressed reductions keep are those before it. So a run that skips a step goes on,
to the bit, like one whose data never had that batch. The length of the schedule stays `training.num_steps`, of which
a run with skipped steps does not see the very end.

Note [What an outlier is]
The modified z-score of Iglewicz and Hoaglin ("How to Detect and Handle Outliers", 1993, section 3.5): the distance
from the median of the last accepted steps, in units of their median absolute deviation, which makes it a standard
deviation of a normal distribution by the factor 0.6745. Only values above the median count: a loss that falls is no
emergency. Skipped steps do not enter the window, so a level that has risen for good ends in the bounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_NORMAL_QUARTILE = 0.6745
# A window that hardly varies makes no outlier of a last digit: the deviation counts as this share of the median.
_LEAST_DEVIATION = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipStepConfig:
    """Which steps are skipped, and how many at most; by default none is, and a norm that is not finite ends the run.

    skip_non_finite: skip a step whose loss or gradient norm is not finite.
    max_loss_z, max_norm_z: skip a step whose loss or norm has a larger robust z-score; null: not looked at.
    window_steps: accepted steps that the score is of. min_steps: none is an outlier before there are so many.
    max_consecutive, max_total: steps skipped in a row, and in the whole run; one more ends the run.
    """

    skip_non_finite: bool = False
    max_loss_z: float | None = None
    max_norm_z: float | None = None
    window_steps: int = 100
    min_steps: int = 20
    max_consecutive: int = 5
    max_total: int = 50

    def __post_init__(self) -> None:
        for name in ("max_loss_z", "max_norm_z"):
            limit = getattr(self, name)
            if limit is not None and not 1 <= limit < math.inf:
                raise ValueError(
                    f"skip_step.{name}={limit}: a z-score of 1 or more, or null to look at none; 8 catches spikes only"
                )
        for name, least in (("window_steps", 2), ("min_steps", 2), ("max_consecutive", 1), ("max_total", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"skip_step.{name}={getattr(self, name)}: a number of steps; set it to {least} or more"
                )
        if self.min_steps > self.window_steps:
            raise ValueError(
                f"skip_step.min_steps={self.min_steps}: the window never holds more than skip_step.window_steps="
                f"{self.window_steps}; set it to that or less"
            )

    @property
    def are_on(self) -> bool:
        """Whether any step may be skipped."""
        return self.skip_non_finite or self.max_loss_z is not None or self.max_norm_z is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipStepState:
    """What the rule keeps between steps: losses and norms of accepted steps, oldest first, and counts of skipped."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    num_consecutive: int = 0
    num_total: int = 0


def why_skipped(config: SkipStepConfig, state: SkipStepState, loss: float, norm: float) -> str | None:
    """Why a step with this loss and gradient norm is not to be made; None: it is."""
    values = (
        ("loss", loss, config.max_loss_z, state.losses),
        ("gradient norm", norm, config.max_norm_z, state.norms),
    )
    for name, value, limit, window in values:
        if not math.isfinite(value):
            # A score of what is not finite is not finite: without skip_non_finite that is for the caller to end.
            if config.skip_non_finite:
                return f"the {name} is {value}"
            continue
        if limit is not None and len(window) >= config.min_steps:
            score = robust_z(value, window)
            if score > limit:
                return (
                    f"the {name} {value:.6g} is an outlier: z-score {score:.1f} above {limit:g}, median "
                    f"{statistics.median(window):.6g} of {len(window)} steps"
                )
    return None


def robust_z(value: float, window: Sequence[float]) -> float:
    """The modified z-score of `value` among `window` (Note [What an outlier is])."""
    median = statistics.median(window)
    deviation = statistics.median(abs(each - median) for each in window)
    deviation = max(deviation, _LEAST_DEVIATION * abs(median))
    if deviation == 0:
        return 0.0 if value == median else math.copysign(math.inf, value - median)
    return _NORMAL_QUARTILE * (value - median) / deviation


def accepted(config: SkipStepConfig, state: SkipStepState, loss: float, norm: float) -> SkipStepState:
    """The state after a step that was made."""
    return SkipStepState(
        losses=(*state.losses, *filter(math.isfinite, (loss,)))[-config.window_steps :],
        norms=(*state.norms, norm)[-config.window_steps :],
        num_total=state.num_total,
    )


def skipped(state: SkipStepState) -> SkipStepState:
    """The state after a step that was skipped."""
    return SkipStepState(
        losses=state.losses,
        norms=state.norms,
        num_consecutive=state.num_consecutive + 1,
        num_total=state.num_total + 1,
    )


def exceeded(config: SkipStepConfig, state: SkipStepState) -> str | None:
    """The bound that `state` is beyond, as config text; None: the run may go on."""
    if state.num_consecutive > config.max_consecutive:
        return f"skip_step.max_consecutive={config.max_consecutive}"
    if state.num_total > config.max_total:
        return f"skip_step.max_total={config.max_total}"
    return None
