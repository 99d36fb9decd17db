"""Whether an optimizer step is made: loss scaling and the skip_step around one decision, the same on every rank.

Every rank calls `StepGuard.judge` with the same two numbers, the loss and the gradient norm of the global batch, so
all decide alike without a further message.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from counterflow.framework.optim.loss_scale import LossScale, LossScaleConfig, may_grow, scale_after
from counterflow.framework.optim.rollback import Rollback
from counterflow.framework.optim.skip_step import (
    SkipStepConfig,
    SkipStepState,
    accepted,
    exceeded,
    skipped,
    why_skipped,
)
from counterflow.parallel.compress.gradients import GradientReduction


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """What became of a step once its norm was known. skipped: why it was not made; None: it was."""

    grad_norm: float
    skipped: str | None = None


class StepGuard:
    """The state of skip_step and loss scaling. scaling: None without fp16.

    skipped_batches: skipped so far, in batches of the full size: by so much the learning rate is behind.
    """

    def __init__(self, config: SkipStepConfig | None = None, scaling: LossScaleConfig | None = None) -> None:
        self._config, self._scaling = config or SkipStepConfig(), scaling
        self._state = SkipStepState()
        self._scale = None if scaling is None else LossScale(scale=scaling.initial_scale)
        self.skipped_batches = 0.0

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is multiplied with for its backward."""
        return 1.0 if self._scale is None else self._scale.scale

    @property
    def scales_loss(self) -> bool:
        return self._scale is not None

    @property
    def reads_loss(self) -> bool:
        """Whether `judge` is to be given the loss of the global batch."""
        return self._config.are_on

    @property
    def can_skip(self) -> bool:
        """Whether a step may be skipped: what it changes besides parameters is then to be kept."""
        return self._config.are_on or self._scale is not None

    @property
    def may_change_scale(self) -> bool:
        """Whether a sound next step changes the scale of the one after it, which may then not begin earlier."""
        return self._scaling is not None and self._scale is not None and may_grow(self._scaling, self._scale)

    def judge(self, loss: float, norm: float, num_updates: int) -> str | None:
        """Why the step is to be skipped; None: make it. num_updates: made so far, for messages.

        A norm that is not finite although the loss is finite, or is not known, is the loss scale's doing as long as
        that can be lowered; all else is for the skip_step.

        Raises FloatingPointError: where the norm is not finite and nothing may skip it, or too many were skipped.
        """
        if self._scaling is not None and self._scale is not None:
            is_loss_sound = not self._config.skip_non_finite or math.isfinite(loss)
            has_overflowed = not math.isfinite(norm) and is_loss_sound
            if has_overflowed and self._scale.scale > self._scaling.min_scale:
                before = self._scale.scale
                self._scale = scale_after(self._scaling, self._scale, has_overflowed=True)
                return f"gradients overflowed at loss scale {before:g}, it is {self._scale.scale:g} now"
        reason = why_skipped(self._config, self._state, loss, norm)
        if reason is None and math.isfinite(norm):
            if self._config.are_on:
                self._state = accepted(self._config, self._state, loss, norm)
            if self._scaling is not None and self._scale is not None:
                self._scale = scale_after(self._scaling, self._scale, has_overflowed=False)
            return None
        if reason is None:
            scale = "" if self._scale is None else f" at loss scale {self.loss_scale:g}"
            raise FloatingPointError(
                f"the gradient norm is {norm}{scale} after {num_updates} steps: {_ADVICE}"
            )
        self._state = skipped(self._state)
        bound = exceeded(self._config, self._state)
        if bound is not None:
            raise FloatingPointError(
                f"{reason} after {num_updates} steps, and {bound} allows no further step to be skipped "
                f"({self._state.num_consecutive} in a row, {self._state.num_total} in all): {_ADVICE}"
            )
        return f"{reason} ({self._state.num_consecutive} in a row, {self._state.num_total} in all)"

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "brakes": dataclasses.asdict(self._state),
            "loss_scale": None if self._scale is None else dataclasses.asdict(self._scale),
            "skipped_batches": self.skipped_batches,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; a loss scale that the run did not have then begins anew."""
        skip_step = state["brakes"]
        window = self._config.window_steps
        self._state = SkipStepState(
            losses=tuple(skip_step["losses"])[-window:],
            norms=tuple(skip_step["norms"])[-window:],
            num_consecutive=skip_step["num_consecutive"],
            num_total=skip_step["num_total"],
        )
        if self._scale is not None and state["loss_scale"] is not None:
            self._scale = LossScale(**state["loss_scale"])
        self.skipped_batches = state["skipped_batches"]


_ADVICE = (
    "nothing was updated, and the last checkpoint is of sound parameters; lower optimizer.base_lr or lengthen the "
    "warm-up, and go on from it"
)


class StepUndo:
    """Copies of what a step changes before it is judged: router states, and what compressed reductions keep."""

    def __init__(self, tensors: Iterable[Tensor], reductions: Iterable[GradientReduction]) -> None:
        self._reductions = list(reductions)
        self._kept_steps = [0] * len(self._reductions)
        states = (tensor for reduction in self._reductions for tensor in reduction.state().values())
        self._rollback = Rollback([*tensors, *states])

    @property
    def num_bytes(self) -> int:
        """Memory that stays between steps."""
        return self._rollback.num_bytes

    def keep(self) -> None:
        """Keep the present values, before the reductions and the routers' counts of a step."""
        self._rollback.keep()
        self._kept_steps = [reduction.num_steps for reduction in self._reductions]

    def restore(self) -> None:
        """As if the step had not been."""
        self._rollback.restore()
        for reduction, num_steps in zip(self._reductions, self._kept_steps, strict=True):
            reduction.num_steps = num_steps
