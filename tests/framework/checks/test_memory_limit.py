"""A limit of memory: what is refused and advised, and what `zero.reshard_after=auto` becomes; peaks by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from counterflow.framework.checks.dry_run import DryRank, dry_run
from counterflow.framework.checks.memory_limit import fitting, with_reshard_after, within_memory
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError
from counterflow.framework.memory.live import Peak
from tests.tiny import tiny_config


def sharded(pp: int = 2, schedule: str = "1f1b", **groups: Any) -> TrainConfig:
    zero = {"stage": 3, "reshard_after": "auto", **groups.pop("zero", {})}
    return tiny_config(pp=pp, dp=2, schedule=schedule, zero=zero, memory_limit_bytes=1 << 40, **groups)


def peaks_by(**bytes_of: Sequence[int]) -> Callable[[TrainConfig], list[Peak]]:
    """By what every pipeline rank does with its parameters."""

    def of(config: TrainConfig) -> list[Peak]:
        return [
            Peak(num_bytes=bytes_of[config.zero.reshard_after_of(rank)][rank])
            for rank in range(config.parallel.pipeline_parallel_size)
        ]

    return of


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [(100, ("step", "step")), (60, ("backward", "step")), (40, ("use", "step")), (25, ("use", "backward"))],
)
def test_each_rank_keeps_parameters_for_as_long_as_it_has_room(limit: int, chosen: tuple[str, ...]) -> None:
    peaks = peaks_by(step=(70, 30), backward=(50, 25), use=(35, 10))
    assert with_reshard_after(sharded(), limit, peaks).zero.reshard_after == chosen


def test_copies_of_a_stage_come_and_go_together() -> None:
    peaks = peaks_by(step=(70, 30), backward=(50, 25), use=(35, 10))
    config = with_reshard_after(sharded(schedule="dualpipe"), 60, peaks)
    assert config.zero.reshard_after == ("backward", "backward")


def test_the_first_change_that_is_enough_is_advised() -> None:
    config = sharded(pp=1, zero={"reshard_after": "step"})

    def of(each: TrainConfig) -> list[Peak]:
        saved = 10 * (each.loss.chunk_tokens is not None) + 20 * (each.recompute.mode == "full")
        return [Peak(num_bytes=100 - saved)]

    assert fitting(config, 100, of) is not None
    for limit, settings in ((90, ["loss.chunk_tokens"]), (80, ["recompute.mode=full"])):
        change = fitting(config, limit, of)
        assert change is not None
        assert [
            text.rpartition("=")[0] if "chunk" in text else text for text in change.text.split()
        ] == settings
    together = fitting(config, 70, of)
    assert together is not None
    assert {"zero.reshard_after=use", "recompute.mode=full"} < set(together.text.split())
    assert together.config.loss.chunk_tokens is not None
    assert fitting(config, 69, of) is None


def test_a_layout_that_does_not_fit_is_refused_with_what_does() -> None:
    """Real peaks: one byte less than the layout needs, which recomputing its layers saves."""
    config = tiny_config(pp=1, dp=1, schedule="1f1b")
    needed = max(rank.peak.num_bytes for rank in dry_run(config))
    said: list[str] = []
    assert within_memory(with_limit(config, needed), say=said.append) == with_limit(config, needed)
    assert "is predicted to be" in said[0]
    with pytest.raises(ConfigError, match=rf"hold {needed} bytes at .*; it would fit with "):
        within_memory(with_limit(config, needed - 1), say=said.append)


def test_where_nothing_fits_more_ranks_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = DryRank(pipeline=0, peak=Peak(num_bytes=2000, parts={"gradients": 2000}, action="0B0"))
    monkeypatch.setattr("counterflow.framework.checks.memory_limit.dry_run", lambda _: [rank])
    with pytest.raises(
        ConfigError, match=r"hold 2000 bytes at 0B0 \(gradients .*nothing that was tried .* take more ranks"
    ):
        within_memory(with_limit(tiny_config(), 1000), say=pytest.fail)


def test_nothing_is_run_where_nobody_asks() -> None:
    config = tiny_config(schedule="1f1b")
    assert within_memory(config, say=pytest.fail) is config


def with_limit(config: TrainConfig, limit: int) -> TrainConfig:
    return replace(config, memory_limit_bytes=limit)
