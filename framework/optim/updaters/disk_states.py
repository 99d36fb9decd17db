"""AdamW whose moments are in a file: read, updated and written back part by part, within a bound of memory.

Note [Three buffers]
While one part is updated, a worker reads the next and writes the one before. Its jobs are done in order, so a buffer
is read into again only after what was in it is written. The update itself is the wrapped updater's, on parts cut
where it computes the same bits (`Part.cut`).

The file has no name, so it is gone with the process however that ends; checkpoints hold the moments as those of any
other run, read and filled through mappings of the same file.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from counterflow.framework.optim.updaters.updater import STATE_NAMES, Part, Updater
from counterflow.parallel.scratch_file import ScratchFile, in_pages

_NUM_BUFFERS = 3
# Where a part may be cut, in elements; see `Part.cut`.
_CUT = 64


class DiskStates(Updater):
    """An updater that keeps what `inner` updates in a file of `folder`.

    resident_bytes: the most of it that is in memory at once.

    Raises OSError: where no file can be made there.
    """

    is_on_disk = True

    def __init__(self, inner: Updater, folder: Path, resident_bytes: int) -> None:
        self.name = f"{inner.name}, moments on disk"
        self._inner, self._resident_bytes = inner, resident_bytes
        self._file = ScratchFile(
            folder,
            setting="optimizer.offload.folder",
            what="moments",
            remedy="set optimizer.offload.tier=none",
        )
        self._regions: dict[int, _Region] = {}
        self._buffers: list[Tensor] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="moments")

    def close(self) -> None:
        """End the worker and close the file; moments that are still mapped stay readable until they are dropped."""
        self._worker.shutdown()
        self._file.close()
        self._inner.close()

    @property
    def file_bytes(self) -> int:
        """Of the file."""
        return self._file.num_bytes

    @property
    def resident_bytes(self) -> int:
        """Memory that is kept for parts on their way."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def new_state(self, master: Tensor) -> dict[str, Tensor]:
        """Zero moments as mappings of the file; their pages are in memory only where somebody has read them.

        Raises OSError: where the disk is full.
        """
        dtypes = {name: like.dtype for name, like in self._inner.new_state(master[:0]).items()}
        return {name: self._allocate(master.numel(), dtypes[name]) for name in STATE_NAMES}

    def _allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        size = in_pages(num_elements * dtype.itemsize)
        start = self._file.extend(size)
        mapping = self._file.map(start, size)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=num_elements)
        # By address: slices of the tensor are found by their distance from it.
        self._regions[tensor.data_ptr()] = _Region(mapping, start)
        return tensor

    @torch.no_grad()
    def update(self, parts: Sequence[Part], *, step: int, learning_rate: float) -> None:
        """Raises OSError: where the file cannot be read or written."""
        for region in self._regions.values():
            # What a checkpoint has looked at need not stay in memory.
            region.mapping.madvise(mmap.MADV_DONTNEED)
        batches = batches_of(parts, self._resident_bytes // _NUM_BUFFERS)
        if not batches:
            return
        if not self._buffers:
            size = max(sum(piece.state_bytes for piece in batch) for batch in batches)
            count = min(_NUM_BUFFERS, len(batches))
            self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
        read = self._worker.submit(self._read, batches[0], self._buffers[0])
        written: list[Future[None]] = []
        for index, batch in enumerate(batches):
            here = read.result()
            following = index + 1
            if following < len(batches):
                buffer = self._buffers[following % len(self._buffers)]
                read = self._worker.submit(self._read, batches[following], buffer)
            moved = [_beside_master(part) for part in here]
            self._inner.update(moved, step=step, learning_rate=learning_rate)
            for part, copy in zip(here, moved, strict=True):
                for name, tensor in copy.state.items():
                    if tensor is not part.state[name]:
                        part.state[name].copy_(tensor)
            written.append(self._worker.submit(self._write, batch, here))
        for each in written:
            each.result()

    def _read(self, batch: Sequence[Piece], buffer: Tensor) -> list[Part]:
        """The parts that `batch` is, with their moments in `buffer`."""
        parts: list[Part] = []
        begin = 0
        for piece in batch:
            part = piece.part.cut(piece.start, piece.stop)
            state: dict[str, Tensor] = {}
            for name, mapped in part.state.items():
                place = buffer[begin : begin + mapped.nbytes]
                begin += mapped.nbytes
                _transfer(os.preadv, self._file.descriptor, place, self._place(piece, name))
                state[name] = place.view(mapped.dtype)
            parts.append(replace(part, state=state))
        return parts

    def _write(self, batch: Sequence[Piece], parts: Sequence[Part]) -> None:
        for piece, part in zip(batch, parts, strict=True):
            for name, tensor in part.state.items():
                _transfer(
                    os.pwritev, self._file.descriptor, tensor.view(torch.uint8), self._place(piece, name)
                )

    def _place(self, piece: Piece, name: str) -> int:
        """Where in the file the moments `name` of `piece` begin."""
        mapped = piece.part.state[name]
        return self._regions[mapped.data_ptr()].offset + piece.start * mapped.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The elements from `start` to `stop` of `part`."""

    part: Part
    start: int
    stop: int

    @property
    def state_bytes(self) -> int:
        return (self.stop - self.start) * _element_bytes(self.part)


@dataclass(frozen=True, slots=True)
class _Region:
    mapping: mmap.mmap
    offset: int


def batches_of(parts: Sequence[Part], most_bytes: int) -> list[list[Piece]]:
    """`parts` in order, cut and put together so that the moments of no batch take more than `most_bytes`.

    Where that is less than the moments of 64 elements, a batch has so many.
    """
    batches: list[list[Piece]] = []
    room = 0
    for part in parts:
        start, num_elements, element_bytes = 0, part.master.numel(), _element_bytes(part)
        while start < num_elements:
            fits = room // element_bytes
            if fits < min(num_elements - start, _CUT):
                batches.append([])
                room = max(most_bytes, _CUT * element_bytes)
                fits = room // element_bytes
            taken = num_elements - start
            if taken > fits:
                taken = fits // _CUT * _CUT
            batches[-1].append(Piece(part=part, start=start, stop=start + taken))
            room -= taken * element_bytes
            start += taken
    return batches


def _element_bytes(part: Part) -> int:
    return sum(tensor.itemsize for tensor in part.state.values())


def _beside_master(part: Part) -> Part:
    """`part` with its moments on the device of its master."""
    return replace(part, state={name: each.to(part.master.device) for name, each in part.state.items()})


def _transfer(call: Callable[..., int], descriptor: int, place: Tensor, offset: int) -> None:
    """Read into or write from `place`, uint8, all of it."""
    done, view = 0, memoryview(cast(Any, place.numpy()))
    while done < len(view):
        moved = call(descriptor, [view[done:]], offset + done)
        if moved == 0:
            raise OSError(errno.EIO, "the file of the optimizer's moments has become shorter")
        done += moved
