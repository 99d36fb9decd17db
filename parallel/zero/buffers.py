"""Whole gradient buffers of units that are reduced block by block, used again where the next one fits."""

from __future__ import annotations

import torch
from torch import Tensor

from counterflow.parallel.memory_parts import memory_of

# A buffer that is larger than is asked for by more than this is let go of instead.
_MOST_WASTE = 1.25


class Buffers:
    """fp32 buffers on `device`. At most one is kept that nobody has, so that it costs no more than a block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: Tensor | None = None

    def take(self, num_elements: int) -> Tensor:
        """[num_elements] zeros."""
        free, self._free = self._free, None
        if free is not None and num_elements <= free.numel() <= _MOST_WASTE * num_elements:
            return free[:num_elements].zero_()
        del free
        with memory_of("gradients"):
            return torch.zeros(num_elements, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Take back what `take` gave."""
        whole = buffer if buffer._base is None else buffer._base
        self._free = whole if self._free is None else min(self._free, whole, key=Tensor.numel)

    def clear(self) -> None:
        self._free = None
