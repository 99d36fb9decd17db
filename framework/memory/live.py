"""Bytes of every tensor that is alive, at each operation of what runs within, and what they are for.

What is counted are storages, each once, as long as anything keeps them: parameters, gradients, what autograd saved,
messages. What a kernel takes and gives back within one operation is not seen. On CUDA the allocator counts as well
(torch.cuda.max_memory_allocated).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from counterflow.parallel.memory_parts import PARTS, current_part


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes that were alive after any operation, by part (parallel/memory_parts.py).

    action: what ran then, as `LiveBytes.mark` was told; empty before it was.
    """

    num_bytes: int = 0
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    action: str = ""


@dataclass(slots=True)
class _Storage:
    ref: weakref.ref[torch.UntypedStorage]
    part: str


class LiveBytes(TorchDispatchMode):
    """Counts within; operations of the thread that entered it, and of backwards that run in it.

    held: tensors that are there before, by part; what comes is counted for what its taker says it is.
    """

    def __init__(self, held: Mapping[str, Iterable[torch.Tensor]]) -> None:
        super().__init__()
        self._storages: dict[int, _Storage] = {}
        self._action: object = ""
        self.peak = Peak()
        for part, tensors in held.items():
            for tensor in tensors:
                self._see(tensor, part)
        self._count()

    def mark(self, action: object) -> None:
        """What comes from here on is part of `action`."""
        self._action = action

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part = current_part()
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._see(value, part)
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._see(value, part)
        self._count()
        return out

    def _see(self, tensor: torch.Tensor, part: str) -> None:
        # A wrapper (a DTensor) has a storage in name only; the tensors in it are seen themselves.
        if tensor.device.type == "meta" or is_traceable_wrapper_subclass(tensor):
            return
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        # The address of a storage that has gone may be another's now.
        if known is None or known.ref() is None:
            self._storages[storage._cdata] = _Storage(weakref.ref(storage), part)

    def _count(self) -> None:
        parts: dict[str, int] = dict.fromkeys(PARTS, 0)
        for key, known in list(self._storages.items()):
            storage = known.ref()
            if storage is None:
                del self._storages[key]
            else:
                # Asked for each time: storage that is freed and filled again changes its size.
                parts[known.part] += storage.nbytes()
        now = sum(parts.values())
        if now > self.peak.num_bytes:
            self.peak = Peak(num_bytes=now, parts=parts, action=str(self._action))


def alive_tensors(device: torch.device) -> list[torch.Tensor]:
    """Every tensor on `device` that Python knows of."""
    # Not isinstance: it would make lazy proxies among the objects import what they stand for.
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and each.device.type == device.type
    ]
