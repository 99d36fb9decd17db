"""Where the host reads a tensor's values, for which it would wait for a GPU: counted on a CPU."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The size of what they give depends on values; the others give a number to the host.
_READING = {
    "aten::_local_scalar_dense",  # item, bool, int, float and index
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::equal",
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
_PROJECT = ("/models/", "/parallel/", "/framework/")


class HostReads(TorchDispatchMode):
    """Counts the reads within by where they are made: `router.py:12`."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Counter[str]()
        self._of_generator = torch.get_rng_state().shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        by_mask = name in _INDEXING and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1] or ()
        )
        # With a size that is given nothing has to be read.
        repeats = name == "aten::repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name == "aten::equal" and args[0].shape == self._of_generator:
            return func(
                *args
            )  # states of random generators: torch gives them on the host, those of a GPU too
        if name in _READING or by_mask or (repeats and isinstance(args[0], Tensor)):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frames = [
            frame for frame in traceback.extract_stack() if any(part in frame.filename for part in _PROJECT)
        ]
        frames = [frame for frame in frames if "/site-packages/" not in frame.filename]
        last = frames[-1] if frames else traceback.extract_stack()[0]
        self.places[f"{last.filename.rpartition('/')[2]}:{last.lineno}"] += 1

    @property
    def total(self) -> int:
        return self.places.total()


@contextmanager
def host_reads() -> Iterator[HostReads]:
    """Counts what is read within, in this thread."""
    reads = HostReads()

    def patched(name: str) -> Any:
        original = getattr(Tensor, name)

        def reading(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            reads.note()
            return original(self, *args, **kwargs)

        return mock.patch.object(Tensor, name, reading)

    with ExitStack() as stack:
        # They do not dispatch where the tensor is on the host already.
        for name in ("tolist", "cpu", "numpy"):
            stack.enter_context(patched(name))
        stack.enter_context(reads)
        yield reads
