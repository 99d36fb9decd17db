"""Fixtures shared by the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from counterflow.framework.data.prepare import PreparedData
    from tests.rank_pool import RankPool
    from tests.references import References

# Processes that tests start find this checkout, whatever is installed.
_ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT / ".src"), str(_ROOT)])

# What the fixtures need is imported in them: the process that only hands out tests to workers imports no torch.


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight gloo ranks, forked once for each worker of the session: `ranks.run(function, world_size, *args)`."""
    from tests.rank_pool import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """The tokens that the tiny model of tests/tiny.py trains on."""
    from tests.tiny import prepare_tiny

    return prepare_tiny(tmp_path_factory.mktemp("tiny-data"))


@pytest.fixture(scope="session")
def references(
    ranks: RankPool, tiny_data: PreparedData, tmp_path_factory: pytest.TempPathFactory
) -> References:
    """What one process trains, once for each config: `references.parity(config, folder)`."""
    from tests.references import References, session_folder

    return References(folder=session_folder(tmp_path_factory), ranks=ranks, data=tiny_data)
