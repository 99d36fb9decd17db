"""Saves that take long: ranks wait for them by checkpoint.timeout_s, and are told what they waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from counterflow.framework.checkpoint import safetensors_storage
from counterflow.framework.checkpoint.manifest import latest, step_folder
from counterflow.framework.checkpoint.shard import TensorShard
from counterflow.framework.checkpoint.storage import save
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.checkpointing import patient
from counterflow.parallel.collectives import set_timeout
from counterflow.parallel.groups import destroy_group, new_group
from tests.rank_pool import RankPool
from tests.tiny import tiny_config

_COLLECTIVE_S, _SAVE_S = 1.0, 2.0


def _slow_save(root: Path, timeout_s: float) -> str | None:
    """What this rank is told of a save in which rank 1 takes twice as long as a collective may."""
    rank, group = dist.get_rank(), new_group([0, 1], "slow save")
    set_timeout(group, _COLLECTIVE_S)
    config = tiny_config(comm={"timeout_s": _COLLECTIVE_S}, checkpoint={"timeout_s": timeout_s})
    assembly = cast(Assembly, SimpleNamespace(config=config, mesh=SimpleNamespace(world=group)))
    write: Callable[..., Any] = safetensors_storage._write_safetensors

    def slowly(*args: Any) -> Any:
        time.sleep(_SAVE_S if rank == 1 else 0)
        return write(*args)

    shard = TensorShard(name="w", global_shape=(2, 4), offsets=(rank, 0), tensor=torch.ones(1, 4))
    try:
        with (
            mock.patch.object(safetensors_storage, "_write_safetensors", slowly),
            patient(assembly, "while the checkpoint of step 2 was saved"),
        ):
            save(step_folder(root, 2), [shard], {}, group=group)
            dist.barrier(group=group)
    except RuntimeError as error:
        return "; ".join([str(error), *error.__notes__])
    finally:
        dist.barrier()
        destroy_group(group)
    return None


def test_a_save_may_take_longer_than_a_collective(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_slow_save, 2, tmp_path, 60.0) == [None, None]
    assert latest(tmp_path) == step_folder(tmp_path, 2)


def test_a_save_that_takes_too_long_is_named(ranks: RankPool, tmp_path: Path) -> None:
    first, _ = ranks.run(_slow_save, 2, tmp_path, _COLLECTIVE_S)
    assert first is not None
    assert "imed out" in first
    assert (
        "while the checkpoint of step 2 was saved; ranks waited for each other by checkpoint.timeout_s=1"
        in first
    )
    assert latest(tmp_path) is None
