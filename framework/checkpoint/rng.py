"""State of this process's random generators as JSON, and back."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The generators of Python, NumPy (the global one), torch on the CPU and on the current CUDA device."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": _text(np.array(words, dtype=np.uint32)), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": _text(np.asarray(keys, dtype=np.uint32)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch_cpu": _text(torch.get_rng_state().numpy()),
    }
    # Asked of a CUDA that this process has not used, it would start one.
    if torch.cuda.is_initialized():
        state["torch_cuda"] = _text(torch.cuda.get_rng_state().numpy())
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` returned; a CUDA state is left aside where this process does not use CUDA."""
    python, numpy = state["python"], state["numpy"]
    words = tuple(int(word) for word in _array(python["words"], np.uint32))
    random.setstate((python["version"], words, python["gauss"]))
    np.random.set_state(
        (
            numpy["name"],
            _array(numpy["keys"], np.uint32),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached"],
        )
    )
    torch.set_rng_state(torch.from_numpy(_array(state["torch_cpu"], np.uint8)))
    if "torch_cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.from_numpy(_array(state["torch_cuda"], np.uint8)))


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _array(text: str, dtype: type[np.generic]) -> np.ndarray:
    little = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(base64.b64decode(text), dtype=little).astype(dtype)
