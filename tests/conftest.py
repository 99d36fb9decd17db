"""Fixtures shared by the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from framework.data.prepare import PreparedData
from tests.rank_pool import RankPool
from tests.tiny import prepare_tiny


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
