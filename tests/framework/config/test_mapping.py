"""Keys that had another name, text of values, and the nearest right name."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from counterflow.framework.config.mapping import config_hash, dotted_names, from_mapping, to_mapping
from counterflow.framework.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Balance:
    num_redundant_experts: int = 0
    shares: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    name: str = "a"
    balance: _Balance = field(default_factory=_Balance)


def test_there_and_back_with_lists_for_tuples() -> None:
    config = _Tree(name="b", balance=_Balance(shares=(0.5, 2.0)))
    values = to_mapping(config)
    assert values == {"name": "b", "balance": {"num_redundant_experts": 0, "shares": [0.5, 2.0]}}
    assert from_mapping(_Tree, values) == config
    assert dotted_names(_Tree) == (
        *("name", "balance"),
        *("balance.num_redundant_experts", "balance.shares"),
    )
    assert config_hash(config) == config_hash(from_mapping(_Tree, values)) != config_hash(_Tree())


def test_a_key_is_read_under_its_old_name_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = from_mapping(_Tree, {"balance": {"spare_slots": 3}})
    assert found.balance.num_redundant_experts == 3
    assert "balance.spare_slots is called balance.num_redundant_experts now" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nmae": "b"}, r"nmae: the config has no such key; did you mean name\?"),
        ({"shares": [1.0]}, r"shares: the config has no such key; did you mean balance\.shares\?"),
        ({"balance": 3}, r"balance=3: a group of values; set balance\.num_redundant_experts"),
        ({"name": 8}, "name=8: must be text; the default is name='a'"),
        ({"balance": {"num_redundant_experts": True}}, "=true: must be a whole number"),
        ({"balance": {"shares": [float("inf")]}}, r"balance\.shares=\[inf\]: must be finite"),
    ],
)
def test_what_is_wrong_is_named_with_the_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(_Tree, values)


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)name=8.*balance\.shares=5"):
        from_mapping(_Tree, {"name": 8, "balance": {"shares": 5}})
