"""Moments on disk: the same bits as in memory, within a bound, through a checkpoint, and a full disk said clearly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from counterflow.framework.checks.memory import RankMemory, measure
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.offload_config import OptimizerOffloadConfig
from counterflow.framework.optim.updaters.disk_states import DiskStates, batches_of
from counterflow.framework.optim.updaters.updater import TorchAdamW
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.checkpointing import resume, save_state
from counterflow.framework.trainer.step import train_step
from tests.framework.optim.updaters.test_updater import parts_of, run_updater
from tests.rank_pool import RankPool
from tests.tiny import prepare_tiny, run_context, tiny_config


@pytest.mark.parametrize("resident_bytes", [1 << 12, 3 * 9000, 1 << 20])
def test_the_bits_are_those_of_memory(tmp_path: Path, resident_bytes: int) -> None:
    config = OptimizerConfig()
    inner = TorchAdamW(config)
    expected = run_updater(inner, parts_of(inner, config))
    disk = DiskStates(inner, tmp_path / "new", resident_bytes)
    found = run_updater(disk, parts_of(disk, config))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert 0 < disk.resident_bytes <= resident_bytes
    assert disk.file_bytes >= sum(tensor.nbytes for tensor in expected) * 2 / 3
    # The file has no name: nothing is left behind, however the process ends.
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("most_bytes", [1, 1000, 9000])
def test_batches_cover_every_element_once_within_the_bound(most_bytes: int) -> None:
    config = OptimizerConfig()
    parts = parts_of(TorchAdamW(config), config)
    batches = batches_of(parts, most_bytes)
    pieces = [piece for batch in batches for piece in batch]
    for part in parts:
        ends = [0, *(piece.stop for piece in pieces if piece.part is part)]
        assert [piece.start for piece in pieces if piece.part is part] == ends[:-1]
        assert ends[-1] == part.master.numel()
        assert all(end % 64 == 0 for end in ends[:-1])
    assert all(sum(piece.state_bytes for piece in batch) <= max(most_bytes, 64 * 8) for batch in batches)


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    config = OptimizerConfig()
    disk = DiskStates(TorchAdamW(config), tmp_path, 1 << 20)
    # Without memory behind it: more than any disk has room for.
    huge = torch.empty(1, dtype=torch.float32).expand(1 << 50)
    with pytest.raises(
        OSError, match=r"optimizer.offload.folder=.*no room for .* bytes of moments .* are free"
    ):
        disk.new_state(huge)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"optimizer.offload.folder=.*file: no file can be made there"):
        DiskStates(TorchAdamW(OptimizerConfig()), tmp_path / "file", 1 << 20)


def offloaded(config: TrainConfig, folder: Path) -> TrainConfig:
    tier = OptimizerOffloadConfig(tier="disk", folder=str(folder), resident_bytes=1 << 14)
    return replace(config, optimizer=replace(config.optimizer, offload=tier))


def state_after(config: TrainConfig, folder: Path, stop_after: int | None = None) -> list[Tensor]:
    """Masters and moments after four steps; with `stop_after`, in two runs with a checkpoint between them."""
    data = prepare_tiny(folder / "data")
    run = run_context(data, folder / "run")
    cpu = torch.device("cpu")
    assembly = build(config, data, cpu)
    for step in range(4):
        if step == stop_after:
            save_state(assembly, run, step)
            config = replace(config, checkpoint=replace(config.checkpoint, resume=str(run.run_dir)))
            assembly = build(config, data, cpu)
            assert resume(assembly, run) == step
        train_step(assembly, step)
    held = assembly.optimizer.persistent_bytes()
    moments = [tensor for owned in assembly.optimizer.owned for tensor in owned.state.values()]
    if config.optimizer.offload.tier == "disk":
        assert held.disk == sum(tensor.nbytes for tensor in moments)
        assert held.optimizer <= 1 << 14
    else:
        assert held.disk == 0
    masters = [owned.fragment.master for owned in assembly.optimizer.owned]
    return [tensor.clone() for tensor in (*masters, *moments)]


def memory_of(config: TrainConfig, folder: Path) -> RankMemory:
    return measure(config, run_context(prepare_tiny(folder), folder), torch.device("cpu"))


def test_the_file_is_no_memory(ranks: RankPool, tmp_path: Path) -> None:
    config = tiny_config(zero=1)
    prepare_tiny(tmp_path)
    (plain,) = ranks.run(memory_of, 1, config, tmp_path)
    (disk,) = ranks.run(memory_of, 1, offloaded(config, tmp_path), tmp_path)
    assert disk.disk == plain.optimizer
    assert disk.parameters == plain.parameters
    assert 0 < disk.optimizer <= 1 << 14
    assert disk.persistent <= disk.observed <= disk.persistent + 8192


@pytest.mark.parametrize("zero", [1, 3])
def test_a_run_and_its_resumption_are_bitwise_the_one_in_memory(
    ranks: RankPool, tmp_path: Path, zero: int
) -> None:
    config = tiny_config(dp=2, zero=zero)
    prepare_tiny(tmp_path / "data")
    plain = ranks.run(state_after, 2, config, tmp_path)
    disk = ranks.run(state_after, 2, offloaded(config, tmp_path), tmp_path, 2)
    for mine, theirs in zip(disk, plain, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
