"""Bytes of every tensor that is alive, at each operation of what runs within: the peak of a step on a CPU.

What is counted are storages, each once, as long as anything keeps them: parameters, gradients, what autograd saved,
messages. What a kernel takes and gives back within one operation is not seen. On CUDA the allocator counts instead
(torch.cuda.max_memory_allocated).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts within; operations of the thread that entered it, and of backwards that run in it.

    alive: tensors that are there before. peak: the most bytes alive after any operation. marks: what `mark` was called
    with last when that was reached.
    """

    def __init__(self, alive: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._mark: object = None
        self.peak = 0
        self.peak_mark: object = None
        for tensor in alive:
            self._see(tensor)
        self._count()

    def mark(self, what: object) -> None:
        """What comes from here on is part of `what`."""
        self._mark = what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._see(value)
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._see(value)
        self._count()
        return out

    @property
    def now(self) -> int:
        """Bytes alive."""
        total = 0
        for key, ref in list(self._storages.items()):
            storage = ref()
            if storage is None:
                del self._storages[key]
            else:
                # Asked for each time: storage that is freed and filled again changes its size.
                total += storage.nbytes()
        return total

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = weakref.ref(storage)

    def _count(self) -> None:
        now = self.now
        if now > self.peak:
            self.peak, self.peak_mark = now, self._mark


def alive_tensors(device: torch.device) -> list[torch.Tensor]:
    """Every tensor on `device` that Python knows of."""
    import gc

    # Not isinstance: it would make lazy proxies among the objects import what they stand for.
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and each.device.type == device.type
    ]
