"""Whole gradient buffers of units that are reduced block by block: a few, used again and again within a step."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffers:
    """fp32 buffers on `device`, by their number of elements; `clear` lets go of those that nobody has."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = {}

    def take(self, num_elements: int) -> Tensor:
        """[num_elements] zeros."""
        free = self._free.get(num_elements)
        if free:
            return free.pop().zero_()
        return torch.zeros(num_elements, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Take back what `take` gave."""
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def clear(self) -> None:
        self._free.clear()
