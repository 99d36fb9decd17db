from __future__ import annotations

import json
import random

import numpy as np
import torch

from counterflow.framework.checkpoint.rng import rng_state, set_rng_state


def _draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
    ]


def test_state_survives_json() -> None:
    _draw()  # leaves half of a Gaussian pair in Python's and NumPy's generators
    text = json.dumps(rng_state())
    first = _draw()
    assert _draw() != first
    set_rng_state(json.loads(text))
    assert _draw() == first
