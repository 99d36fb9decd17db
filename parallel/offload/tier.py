"""Where activations are kept that have left: memory of the host, or a file.

A `Region` is room for one unit. Regions are used again, the smallest that is large enough first, so a run takes what
its first step took.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

_PAGE = mmap.ALLOCATIONGRANULARITY
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

    @abstractmethod
    def _make(self, num_bytes: int) -> Region: ...


class HostTier(Tier):
    """Memory of the host; pinned, so that a GPU copies while it computes."""

    def __init__(self, *, pinned: bool) -> None:
        super().__init__()
        self._pinned = pinned

    def _make(self, num_bytes: int) -> Region:
        return _HostRegion(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned))


class _HostRegion(Region):
    def __init__(self, memory: Tensor) -> None:
        super().__init__(memory.numel())
        self._memory = memory

    def memory(self) -> Tensor:
        return self._memory


class DiskTier(Tier):
    """A file in `folder` without a name, which is gone with the process however it ends.

    A region is mapped while it is written or read only, so that its pages do not count as memory of the process.
    Room on the disk is taken before anything is written: a full disk is an error and not a signal.

    Raises OSError: where `folder` cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Open as long as a region of it is.
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="counterflow-offload-", dir=folder)  # noqa: SIM115
        except OSError as error:
            raise OSError(
                error.errno,
                f"offload.folder={folder}: no file can be made there ({error.strerror}); set another",
            ) from None
        self.num_bytes = 0

    def _make(self, num_bytes: int) -> Region:
        size = -(-num_bytes // _PAGE) * _PAGE
        try:
            os.posix_fallocate(self._file.fileno(), self.num_bytes, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            there = os.statvfs(self._folder)
            raise OSError(
                error.errno,
                f"offload.folder={self._folder}: no room for {size} more bytes of activations beside "
                f"{self.num_bytes} ({there.f_bavail * there.f_frsize} are free); make room, set another folder, or "
                "raise the budget, so that less leaves",
            ) from None
        region = _DiskRegion(self._file, self.num_bytes, size)
        self.num_bytes += size
        return region


class _DiskRegion(Region):
    def __init__(self, file: IO[bytes], offset: int, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._file, self._offset = file, offset

    def memory(self) -> Tensor:
        # The mapping ends with the tensor.
        return torch.frombuffer(
            mmap.mmap(self._file.fileno(), self.num_bytes, offset=self._offset), dtype=torch.uint8
        )
