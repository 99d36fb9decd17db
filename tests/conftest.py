"""Fixtures shared by the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterflow.framework.data.prepare import PreparedData
from tests.rank_pool import RankPool
from tests.tiny import prepare_tiny

# Processes that tests start find this checkout, whatever is installed.
_ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT / ".src"), str(_ROOT)])


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight gloo ranks, forked once for each worker of the session: `ranks.run(function, world_size, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """The tokens that the tiny model of tests/tiny.py trains on."""
    return prepare_tiny(tmp_path_factory.mktemp("tiny-data"))
