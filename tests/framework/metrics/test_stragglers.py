from __future__ import annotations

from counterflow.framework.metrics.stragglers import slowest


def test_the_slowest_is_told_from_those_that_do_the_same_work() -> None:
    """Rank 3 has less to do than ranks 0 and 1, but takes longest for it."""
    found = slowest([4.0, 4.2, 1.0, 1.5, 1.0], [[0, 1], [2, 3, 4]])
    assert (found.rank, found.busy_s, found.over_peers) == (3, 1.5, 1.5)


def test_without_peers_it_is_the_one_with_most_to_do() -> None:
    assert slowest([1.0, 3.0, 2.0], [[0], [1], [2]]) == (1, 3.0, None)
    assert slowest([0.0, 0.0], [[0, 1]]).over_peers is None, "nothing was computed"
