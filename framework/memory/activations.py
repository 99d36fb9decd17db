"""What autograd keeps for backwards, counted as it comes and goes: the activations of a step, measured."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class SavedBytes:
    """Bytes of the distinct storages that are kept: now, and at most so far. `parameters` are left out."""

    def __init__(self, module: nn.Module) -> None:
        self._ignored = {_key(parameter) for parameter in module.parameters()}
        self._users: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        return tensor.detach() if _key(tensor) in self._ignored else _Kept(self, tensor.detach())

    def add(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if not self._users.get(key):
            self.now += tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.now)
        self._users[key] = self._users.get(key, 0) + 1

    def drop(self, tensor: Tensor) -> None:
        key = _key(tensor)
        self._users[key] -= 1
        if not self._users[key]:
            self.now -= tensor.untyped_storage().nbytes()


class _Kept:
    """Lives as long as autograd keeps the tensor."""

    def __init__(self, meter: SavedBytes, tensor: Tensor) -> None:
        self.meter, self.tensor = meter, tensor
        meter.add(tensor)

    def __del__(self) -> None:
        self.meter.drop(self.tensor)


def _key(tensor: Tensor) -> int:
    # Of the storage, not its memory: ZeRO frees that of a parameter and gets another.
    return tensor.untyped_storage()._cdata


@contextmanager
def saved_bytes(module: nn.Module) -> Generator[SavedBytes]:
    """Counts what this thread saves within; `module`: whose parameters are left out."""
    meter = SavedBytes(module)

    def unpack(kept: Any) -> Tensor:
        return kept.tensor if isinstance(kept, _Kept) else kept

    with torch.autograd.graph.saved_tensors_hooks(meter.pack, unpack):
        yield meter
