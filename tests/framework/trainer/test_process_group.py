"""How long the groups of a run wait, and how they end where a rank fails."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from counterflow.framework.config.tree import CommConfig, TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import StoppedError
from counterflow.framework.trainer import loop
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.process_group import process_group
from counterflow.framework.trainer.run import RunContext
from counterflow.parallel import groups
from counterflow.parallel.groups import timeout_of
from counterflow.parallel.pipeline.runtime import p2p
from tests.rank_pool import RankPool
from tests.tiny import run_context, tiny_config

CPU = torch.device("cpu")


def test_the_start_may_take_longer_on_a_gpu() -> None:
    assert CommConfig(timeout_s=9).start_timeout_s("cpu") == 9
    assert CommConfig(timeout_s=9).start_timeout_s("cuda") == 600
    assert CommConfig(timeout_s=900).start_timeout_s("cuda") == 900
    assert CommConfig(timeout_s=900, startup_timeout_s=20).start_timeout_s("cuda") == 20


def timeouts_of_a_run(config: TrainConfig, run: RunContext) -> tuple[set[timedelta], set[timedelta]]:
    """Those of every group when training begins, and behind the first step."""
    world = dist.group.WORLD
    assert world is not None
    world.set_timeout(timedelta(seconds=config.comm.start_timeout_s("cpu")))

    def all_of_them() -> set[timedelta]:
        return {timeout_of(group) for group in groups._names() if isinstance(group, dist.ProcessGroup)}

    with (
        mock.patch.object(p2p, "channels_need_groups", return_value=True),
        build(config, run.data, CPU) as assembly,
    ):
        assert len([group for group in groups._names() if isinstance(group, dist.ProcessGroup)]) > 4
        at_start = all_of_them()
        records = loop._started(loop.train(assembly, 0), config)
        next(records)
        next(records)
        return at_start, all_of_them()


def test_every_group_of_a_run_waits_as_long(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    config = tiny_config(
        pp=2, dp=2, tp=2, zero=3, schedule="dualpipe", comm={"timeout_s": 50, "startup_timeout_s": 70}
    )
    for at_start, later in ranks.run(timeouts_of_a_run, 8, config, run_context(tiny_data, tmp_path)):
        assert at_start == {timedelta(seconds=70)}
        assert later == {timedelta(seconds=50)}


def ending(
    config: TrainConfig, run: RunContext, error: type[Exception] | None
) -> tuple[list[str], bool, float]:
    """What ended the groups where rank 1 fails, whether all are gone, and how long rank 0 waited for it."""
    how: list[str] = []
    abort, destroy = groups._abort_process_group, dist.destroy_process_group
    begin = time.perf_counter()

    def noted(name: str, call: object) -> object:
        def noting(*args: object) -> None:
            how.append(name)
            call(*args)  # type: ignore[operator]

        return noting

    with (
        mock.patch.object(groups, "_abort_process_group", noted("abort", abort)),
        mock.patch.object(dist, "destroy_process_group", noted("destroy", destroy)),
        mock.patch("counterflow.framework.trainer.process_group.start_process_group", return_value=CPU),
        suppress(RuntimeError) if error else nullcontext(),
        process_group(config, 0) as device,
        build(config, run.data, device),
    ):
        if error is not None and dist.get_rank() == 1:
            raise error("out of luck")
        if error is RuntimeError:
            dist.barrier()
        if error is not None:
            raise error("the other is gone")
    is_over = not dist.is_initialized()
    # The pool ends a job with a collective of its own.
    mock.patch.object(dist, "barrier").start()
    return how, is_over, time.perf_counter() - begin


@pytest.mark.parametrize(
    ("error", "first"), [(RuntimeError, "abort"), (StoppedError, "destroy"), (None, "destroy")]
)
def test_a_rank_that_fails_aborts_its_groups(
    tiny_data: PreparedData, tmp_path: Path, error: type[Exception] | None, first: str
) -> None:
    """And the one that waits for it is told at once; ranks that stop together leave in order."""
    pool = RankPool(2)  # of its own, which is not used again
    try:
        config = tiny_config(pp=2, dp=1)
        for how, is_over, waited_s in pool.run(ending, 2, config, run_context(tiny_data, tmp_path), error):
            assert how[0] == first
            assert ("abort" in how) == (first == "abort")
            assert is_over
            assert waited_s < 60
    finally:
        pool.close()
