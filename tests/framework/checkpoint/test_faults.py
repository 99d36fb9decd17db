"""Killed ranks, full disks and rotten files: a checkpoint is whole or not there."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from counterflow.framework.checkpoint.manifest import CheckpointError, latest, step_folder
from counterflow.framework.checkpoint.shard import TensorShard
from counterflow.framework.checkpoint.storage import load, save
from tests.rank_pool import RankPool

ROWS = 64


def _shards(value: float) -> list[TensorShard]:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = ROWS // size
    tensor = torch.full((rows, 1024), value)
    return [TensorShard(name="w", global_shape=(ROWS, 1024), offsets=(rank * rows, 0), tensor=tensor)]


def _save(root: Path, step: int) -> None:
    save(step_folder(root, step), _shards(float(step)), {}, group=dist.group.WORLD)


def _whole_box() -> TensorShard:
    return TensorShard(name="w", global_shape=(ROWS, 1024), offsets=(0, 0), tensor=torch.zeros(ROWS, 1024))


def _load_alone(folder: Path) -> torch.Tensor:
    shard = _whole_box()
    load(folder, [shard], group=None)
    return shard.tensor


def _rank_main(rank: int, size: int, root: Path, break_rank: Callable[[int], None], results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(root.parent / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    break_rank(rank)
    try:
        _save(root, 2)
        results.put((rank, None))
    except (RuntimeError, ValueError) as error:
        results.put((rank, str(error)))
    results.close()
    results.join_thread()
    os._exit(0)


def _run_own_ranks(root: Path, break_rank: Callable[[int], None]) -> tuple[dict[int, str | None], list[int]]:
    """A save of step 2 by two ranks of our own, with `break_rank` called first; messages and exit codes."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(rank, 2, root, break_rank, results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 40
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            pytest.fail("a rank hangs after its peer was killed")
    messages: dict[int, str | None] = {}
    while not results.empty():
        rank, message = results.get()
        messages[rank] = message
    return messages, [process.exitcode or 0 for process in processes]


def _die(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_rank_1_before_sync(rank: int) -> None:
    if rank == 1:
        os.fsync = _die  # type: ignore[assignment]


def _kill_rank_0_before_rename(rank: int) -> None:
    if rank == 0:
        Path.rename = _die  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("break_rank", "killed"), [(_kill_rank_1_before_sync, 1), (_kill_rank_0_before_rename, 0)]
)
def test_a_killed_rank_leaves_no_checkpoint(
    ranks: RankPool, tmp_path: Path, break_rank: Callable[[int], None], killed: int
) -> None:
    root = tmp_path / "checkpoints"
    ranks.run(_save, 2, root, 1)
    messages, exit_codes = _run_own_ranks(root, break_rank)
    assert exit_codes[killed] == -signal.SIGKILL
    assert messages.keys() == {1 - killed}
    assert messages[1 - killed] is not None  # the other rank knows that it failed
    assert latest(root) == step_folder(root, 1)
    assert not step_folder(root, 2).exists()
    if killed == 0:
        assert len(list(root.glob("*.tmp-*"))) == 1  # the leftover of a dead run ...
    ranks.run(_save, 2, root, 3)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000003"]  # ... goes
    assert torch.equal(_load_alone(step_folder(root, 3)), torch.full((ROWS, 1024), 3.0))


def _limit_rank_1(rank: int) -> None:
    if rank == 1:
        # Python ignores SIGXFSZ, so a write beyond the limit fails with EFBIG as a full disk does with ENOSPC.
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))


def test_a_full_disk_on_one_rank_is_a_clear_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    ranks.run(_save, 2, root, 1)
    messages, _ = _run_own_ranks(root, _limit_rank_1)
    assert messages.keys() == {0, 1}
    assert messages[0] == messages[1]
    message = messages[0]
    assert message is not None
    assert "checkpoint '" in message
    assert (
        "step-00000002' was not written: rank 1: no room to write there (File too large); free some"
        in message
    )
    assert f"'{step_folder(root, 1)}' is untouched" in message
    assert [path.name for path in root.iterdir()] == ["step-00000001"]
    assert torch.equal(_load_alone(step_folder(root, 1)), torch.full((ROWS, 1024), 1.0))


def test_no_space_left_while_the_manifest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:  # tensors, index, manifest
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(
        CheckpointError, match=r"no room to write .*No space left on device.*nothing is left of it$"
    ):
        save(step_folder(tmp_path, 1), [_whole_box()], {}, group=None)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_stays_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(step_folder(tmp_path, 1), [_whole_box()], {}, group=None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*(Not a directory|File exists)"):
        save(step_folder(tmp_path / "file", 1), [_whole_box()], {}, group=None)


def _two_checkpoints(root: Path) -> Path:
    for step in (1, 2):
        save(step_folder(root, step), [_whole_box()], {}, group=None)
    return step_folder(root, 2)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "match"),
    [
        ("rank-00000.safetensors", _truncate, "is truncated: it has .* bytes and should have"),
        ("rank-00000.safetensors", _flip_a_bit, "is corrupt: its crc32 is"),
        ("rank-00000.safetensors", Path.unlink, "is missing"),
        ("index.json", _truncate, "is truncated"),
        ("index.json", _flip_a_bit, "is corrupt"),
        ("metadata.json", _truncate, "is damaged"),
        ("metadata.json", _flip_a_bit, "is damaged|is not valid JSON"),
        ("metadata.json", Path.unlink, "is missing"),
    ],
)
def test_damage_names_the_file_and_an_older_checkpoint(
    tmp_path: Path, name: str, damage: Callable[[Path], None], match: str
) -> None:
    folder = _two_checkpoints(tmp_path)
    damage(folder / name)
    shard = _whole_box()
    shard.tensor.fill_(7)
    with pytest.raises(CheckpointError, match=match) as caught:
        load(folder, [shard], group=None)
    assert str(folder / name) in str(caught.value)
    assert f"go on from the older checkpoint '{step_folder(tmp_path, 1)}'" in str(caught.value)
    assert bool((shard.tensor == 7).all())  # nothing was touched


def test_damage_without_an_older_checkpoint(tmp_path: Path) -> None:
    save(step_folder(tmp_path, 1), [_whole_box()], {}, group=None)
    _flip_a_bit(step_folder(tmp_path, 1) / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="there is no older whole checkpoint"):
        load(step_folder(tmp_path, 1), [_whole_box()], group=None)
    # Sizes are right, so without checksums the rotten value is loaded: that is what the option says.
    load(step_folder(tmp_path, 1), [_whole_box()], group=None, verify_checksums=False)


def _load_corrupt(root: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(step_folder(root, 2), _shards(0.0), group=dist.group.WORLD)
    return str(caught.value)


def test_every_rank_sees_the_same_damage(ranks: RankPool, tmp_path: Path) -> None:
    for step in (1, 2):
        ranks.run(_save, 2, tmp_path, step)
    _flip_a_bit(step_folder(tmp_path, 2) / "rank-00001.safetensors")
    messages = ranks.run(_load_corrupt, 4, tmp_path)
    assert len(set(messages)) == 1
    assert "rank-00001.safetensors' is corrupt" in messages[0]
