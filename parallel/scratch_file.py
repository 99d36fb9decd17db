"""A file without a name, for what does not fit memory: gone with the process however that ends."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import IO


class ScratchFile:
    """A file in `folder` that grows. Room on the disk is taken before anything is written: when a page is written, a
    full disk would be a signal that ends the process.

    setting: the config key that names the folder. what: is kept here; remedy: what to do where there is no room for
    it. Both are for messages.

    Raises OSError: where no file can be made there.
    """

    def __init__(self, folder: Path, *, setting: str, what: str, remedy: str) -> None:
        self._folder, self._setting, self._what, self._remedy = folder.expanduser(), setting, what, remedy
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Open as long as this object is.
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115
                prefix="counterflow-", dir=self._folder
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"{setting}={self._folder}: no file can be made there ({error.strerror}); set another",
            ) from None
        self.num_bytes = 0

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; mappings of it stay until they are dropped."""
        self._file.close()

    def extend(self, num_bytes: int) -> int:
        """Take room for `num_bytes`, a multiple of a page; where it begins.

        Raises OSError: where the disk is full.
        """
        start = self.num_bytes
        try:
            os.posix_fallocate(self.descriptor, start, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            there = os.statvfs(self._folder)
            raise OSError(
                error.errno,
                f"{self._setting}={self._folder}: no room for {num_bytes} more bytes of {self._what} beside "
                f"{start} ({there.f_bavail * there.f_frsize} are free); make room, set another folder, or "
                f"{self._remedy}",
            ) from None
        self.num_bytes += num_bytes
        return start

    def map(self, start: int, num_bytes: int) -> mmap.mmap:
        """The bytes from `start` on, to be read and written."""
        return mmap.mmap(self.descriptor, num_bytes, offset=start)


def in_pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages, one at least."""
    page = mmap.ALLOCATIONGRANULARITY
    return -(-max(num_bytes, 1) // page) * page
