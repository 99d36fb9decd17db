"""Fixtures shared by the whole suite, and how it is shared out to the workers of pytest-xdist."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from framework.data.prepare import PreparedData
from tests.rank_pool import RankPool
from tests.tiny import prepare_tiny

def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is run by one worker, which so makes the fixtures of its module once.

    Each worker has a pool of ranks of its own: a job's ranks wait for each other, and those of the other pool compute
    meanwhile.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


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
