"""Whether a tensor is one of a dry run: a shape and a storage, without memory or values.

framework/checks/dry_run.py makes them.
"""

from __future__ import annotations

from torch import Tensor


def is_dry(tensor: Tensor) -> bool:
    """Whether it is torch's FakeTensor, whose module is slow to import."""
    return hasattr(tensor, "fake_mode")
