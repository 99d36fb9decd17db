"""Where activations are kept that have left: memory of the host, or a file.

A `Region` is room for one unit. Regions are used again, the smallest that is large enough first, so a run takes what
its first step took.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from counterflow.parallel.memory_parts import memory_of
from counterflow.parallel.scratch_file import ScratchFile, in_pages

# A region is not taken for what is smaller than this part of it: another unit may need it whole.
_FILLED = 0.75


class Region(ABC):
    """Room for `num_bytes` bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    @abstractmethod
    def memory(self) -> Tensor:
        """Its bytes, uint8 [num_bytes], to be written and read; to be let go of when that is done."""


class Tier(ABC):
    """Hands out regions and takes them back."""

    def __init__(self) -> None:
        self._free: list[Region] = []

    def take(self, num_bytes: int) -> Region:
        """Raises OSError: where there is no room."""
        fitting = [
            region for region in self._free if _FILLED * region.num_bytes <= num_bytes <= region.num_bytes
        ]
        if fitting:
            region = min(fitting, key=lambda each: each.num_bytes)
            self._free.remove(region)
            return region
        return self._make(num_bytes)

    def give_back(self, region: Region) -> None:
        self._free.append(region)

    def close(self) -> None:
        """Let go of every free region, and close what keeps them."""
        self._free.clear()

    @abstractmethod
    def _make(self, num_bytes: int) -> Region: ...


class HostTier(Tier):
    """Memory of the host; pinned, so that a GPU copies while it computes."""

    def __init__(self, *, pinned: bool) -> None:
        super().__init__()
        self._pinned = pinned

    def _make(self, num_bytes: int) -> Region:
        with memory_of("offloaded"):
            return _HostRegion(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned))


class _HostRegion(Region):
    def __init__(self, memory: Tensor) -> None:
        super().__init__(memory.numel())
        self._memory = memory

    def memory(self) -> Tensor:
        return self._memory


class DiskTier(Tier):
    """A file in `folder`, gone with the process however it ends.

    A region is mapped while it is written or read only, so that its pages do not count as memory of the process.

    Raises OSError: where `folder` cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = ScratchFile(
            folder,
            setting="offload.folder",
            what="activations",
            remedy="raise the budget, so that less leaves",
        )

    def close(self) -> None:
        super().close()
        self._file.close()

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._file.num_bytes

    def _make(self, num_bytes: int) -> Region:
        size = in_pages(num_bytes)
        return _DiskRegion(self._file, self._file.extend(size), size)


class _DiskRegion(Region):
    def __init__(self, file: ScratchFile, offset: int, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._file, self._offset = file, offset

    def memory(self) -> Tensor:
        # The mapping ends with the tensor.
        with memory_of("offloaded"):
            return torch.frombuffer(self._file.map(self._offset, self.num_bytes), dtype=torch.uint8)
