"""Copies of what an optimizer step changes, so that it can be undone to the bit.

The published way back inverts the update (Qi et al., arXiv 2401.10241, section 4); in floating point the inverse
of AdamW does not give the same bits, so the values themselves are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Rollback:
    """Copies of `tensors`, allocated once: they count as memory that stays between steps."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._live = list(tensors)
        self._kept = [torch.empty_like(tensor) for tensor in self._live]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept)

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the present values."""
        for kept, live in zip(self._kept, self._live, strict=True):
            kept.copy_(live)

    @torch.no_grad()
    def restore(self) -> None:
        """Bring the values kept last back into the tensors."""
        for kept, live in zip(self._kept, self._live, strict=True):
            live.copy_(kept)
