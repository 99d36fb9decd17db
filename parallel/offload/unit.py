"""What one forward keeps for its backward: caught as autograd saves it, moved out, brought back.

Note [Storages]
What moves are storages, not tensors: two tensors saved from one storage move once and come back as views of one. What
autograd holds is a `_Saved`, which knows the view and has the piece; a piece dies with the last `_Saved` of it, so in a
backward memory is freed node by node, as it is without offloading.
A storage that something else holds too stays in memory though it was copied: tables that layers share, the tokens of a
batch. That shows once the unit has let go of it, and such storages are not moved again (`Shared`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

# Where each storage begins in a region.
_ALIGNMENT = 64


class Shared:
    """Storages that stay: of parameters and buffers, and those that were seen to be held elsewhere."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # The storage and not its memory: ZeRO frees that of a parameter and gets another.
        self._always = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._seen: dict[int, StorageWeakRef] = {}

    def has(self, storage: UntypedStorage) -> bool:
        key = storage._cdata
        if key in self._always:
            return True
        seen = self._seen.get(key)
        if seen is None:
            return False
        if seen.expired():  # another one at its address
            del self._seen[key]
            return False
        return True

    def note(self, key: int, reference: StorageWeakRef) -> None:
        self._seen[key] = reference


class Piece:
    """A storage of a unit. storage: None while it is away. moves: whether it is large enough."""

    __slots__ = ("__weakref__", "moves", "num_bytes", "storage")

    def __init__(self, storage: UntypedStorage, moves: bool) -> None:
        self.storage: UntypedStorage | None = storage
        self.num_bytes = storage.nbytes()
        self.moves = moves


@dataclass(frozen=True, slots=True)
class _Saved:
    piece: Piece
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedUnit:
    """What one forward keeps. added: called with the bytes of each storage, as it is saved.

    num_bytes: of all that is counted, each storage once. moving_bytes: of what can leave.
    """

    def __init__(self, *, shared: Shared, min_bytes: int, added: Callable[[int], None]) -> None:
        self._shared, self._min_bytes, self._added = shared, min_bytes, added
        self._by_storage: dict[int, weakref.ref[Piece]] = {}
        self._leaving: list[tuple[int, Piece]] = []
        self.num_bytes = 0
        self.moving_bytes = 0

    def pack(self, tensor: Tensor) -> Any:
        """For torch.autograd.graph.saved_tensors_hooks."""
        # A subclass has more to it than a storage; such a view is not of the numbers in it.
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return tensor.detach()
        storage = tensor.untyped_storage()
        if self._shared.has(storage):
            return tensor.detach()
        key = storage._cdata
        known = self._by_storage.get(key)
        piece = None if known is None else known()
        if piece is None:
            piece = Piece(storage, storage.nbytes() >= max(1, self._min_bytes))
            self._by_storage[key] = weakref.ref(piece)
            self.num_bytes += piece.num_bytes
            self.moving_bytes += piece.num_bytes if piece.moves else 0
            self._added(piece.num_bytes)
        return _Saved(
            piece, tensor.dtype, tensor.device, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        """The inverse of `pack`; the unit is there."""
        if not isinstance(saved, _Saved):
            return saved
        storage = saved.piece.storage
        assert storage is not None, "an activation is used while it is away"
        # `set_` gives no history, and takes no gradient.
        return torch.empty(0, dtype=saved.dtype, device=saved.device).set_(
            storage, saved.offset, saved.size, saved.stride
        )

    @property
    def region_bytes(self) -> int:
        """What it takes in a region."""
        return sum(_aligned(piece.num_bytes) for piece in self._pieces())

    def copy_out(self, memory: Tensor) -> int:
        """Copy what leaves to `memory`, uint8 [region_bytes or more]; how many bytes those are."""
        position = num_bytes = 0
        self._leaving = []
        for piece in self._pieces():
            assert piece.storage is not None
            memory[position : position + piece.num_bytes].copy_(_bytes_of(piece.storage), non_blocking=True)
            self._leaving.append((position, piece))
            position += _aligned(piece.num_bytes)
            num_bytes += piece.num_bytes
        return num_bytes

    def let_go(self) -> int:
        """After `copy_out`: free what has left; how many bytes that freed. What others hold stays for good."""
        freed = 0
        for _, piece in self._leaving:
            storage = piece.storage
            assert storage is not None
            key, reference = storage._cdata, StorageWeakRef(storage)
            piece.storage = None
            del storage
            if reference.expired():
                freed += piece.num_bytes
            else:
                self._shared.note(key, reference)
        return freed

    def copy_in(self, memory: Tensor, device: torch.device) -> int:
        """Bring back what has left from `memory`; how many bytes that is."""
        num_bytes = 0
        for position, piece in self._leaving:
            storage = torch.empty(piece.num_bytes, dtype=torch.uint8, device=device).untyped_storage()
            _bytes_of(storage).copy_(memory[position : position + piece.num_bytes], non_blocking=True)
            piece.storage = storage
            num_bytes += piece.num_bytes
        # Their pieces die with the tensors of the backward.
        self._leaving = []
        return num_bytes

    def memories(self) -> list[Tensor]:
        """The storages that are there, as bytes."""
        alive = [reference() for reference in self._by_storage.values()]
        return [
            _bytes_of(piece.storage) for piece in alive if piece is not None and piece.storage is not None
        ]

    def _pieces(self) -> list[Piece]:
        alive = [reference() for reference in self._by_storage.values()]
        return [piece for piece in alive if piece is not None and piece.moves]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )
