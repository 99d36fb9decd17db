"""Who performs the AdamW update, behind one small interface; `ModelOptimizer` keeps norm, clipping and publishing.

An updater sees `Part`s: ranges of this rank's masters with their gradients and moments. AdamW treats every element
by itself, so a part may be cut anywhere that a kernel's vectors allow (see `Part.cut`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from counterflow.framework.optim.config import OptimizerConfig

STATE_NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is updated together; every tensor is 1-d and of one length.

    master, grad: fp32. state: the moments, by the names of `STATE_NAMES`. key: which elements of the whole model they
    are, for an updater that draws random numbers: the same wherever a replica of them is updated.
    """

    master: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    weight_decay: float
    key: str = ""

    def cut(self, start: int, stop: int) -> Part:
        """The elements from `start` to `stop`.

        Kernels compute whole vectors otherwise than the elements behind the last of them: where `start` and `stop`
        are multiples of 64, or the end, each element gets to the bit what the whole part gives it.
        """
        return Part(
            master=self.master[start:stop],
            grad=self.grad[start:stop],
            state={name: tensor[start:stop] for name, tensor in self.state.items()},
            weight_decay=self.weight_decay,
            key=f"{self.key}/{start}",
        )


class Updater(ABC):
    """One way to do AdamW (Loshchilov and Hutter, arXiv 1711.05101), bias corrected.

    name: for the log and the run's record. is_on_disk: whether the moments are in a file.
    """

    name: str
    is_on_disk = False

    @property
    def resident_bytes(self) -> int:
        """Memory that stays between updates, beside the moments."""
        return 0

    @abstractmethod
    def new_state(self, master: Tensor) -> dict[str, Tensor]:
        """Zero moments for a master; where and in what dtype they are kept is the updater's."""

    @abstractmethod
    def update(self, parts: Sequence[Part], *, step: int, learning_rate: float) -> None:
        """Update masters and moments in place; `step` counts from 1. Gradients are left as they are."""

    def close(self) -> None:  # noqa: B027 (most updaters open nothing)
        """End the threads and close the files that this updater opened."""


class TorchAdamW(Updater):
    """torch's fused AdamW, moments in fp32 beside their masters."""

    name = "torch fused AdamW"

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def new_state(self, master: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(master) for name in STATE_NAMES}

    def update(self, parts: Sequence[Part], *, step: int, learning_rate: float) -> None:
        for weight_decay in dict.fromkeys(part.weight_decay for part in parts):
            group = [part for part in parts if part.weight_decay == weight_decay]
            adamw(
                [part.master for part in group],
                [part.grad for part in group],
                [part.state["exp_avg"] for part in group],
                [part.state["exp_avg_sq"] for part in group],
                [],
                [torch.tensor(float(step - 1), device=part.master.device) for part in group],
                fused=True,
                amsgrad=False,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                lr=learning_rate,
                weight_decay=weight_decay,
                eps=self._config.eps,
                maximize=False,
            )
