"""Fixtures shared by the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight gloo ranks, forked once for the session: `ranks.run(function, world_size, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()
