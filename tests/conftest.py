"""Fixtures shared by the whole suite, and how it is shared out to the workers of pytest-xdist."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from framework.data.prepare import PreparedData
from tests.rank_pool import RankPool
from tests.tiny import prepare_tiny

# Whether tests of ranks are one group, so that there is one pool of ranks, or go by their files, a pool a worker.
_ONE_POOL = os.environ.get("ONE_POOL") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        uses_ranks = "ranks" in getattr(item, "fixturenames", ())
        group = "ranks" if uses_ranks and _ONE_POOL else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight gloo ranks, forked once for the session: `ranks.run(function, world_size, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """The tokens that the tiny model of tests/tiny.py trains on."""
    return prepare_tiny(tmp_path_factory.mktemp("tiny-data"))
