"""Python's garbage collector, kept out of measured steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Within the block the collector does not walk over the objects that are alive at its start.

    A walk takes milliseconds in the middle of a step, on each rank in another one. The end of the block unfreezes all
    objects, because a cycle that is frozen when it becomes garbage would stay for the life of the process.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
