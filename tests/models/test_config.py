"""A model shape that cannot be is refused with the value, the rule and a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from models.config import ModelConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, r"model.num_layers=0: must be at least 1"),
        ({"vocab_size": 0}, r"model.vocab_size=0: must be at least 1"),
        ({"head_dim": 0}, r"model.head_dim=0: must be at least 1"),
        ({"norm_eps": -1.0}, r"model.norm_eps=-1.0: must be positive"),
        (
            {"num_heads": 4, "num_kv_heads": 3},
            r"model.num_heads=4: must be a multiple of model.num_kv_heads=3",
        ),
        ({"hidden_size": 10}, r"model.hidden_size=10: must be a multiple of model.num_heads=4, or set"),
        ({"head_dim": 7}, r"model.head_dim=7: RoPE rotates pairs; use an even"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)


def test_head_dim_is_derived_or_given() -> None:
    assert ModelConfig(hidden_size=128, num_heads=4).dim_per_head == 32
    assert ModelConfig(hidden_size=130, num_heads=4, head_dim=16).dim_per_head == 16
