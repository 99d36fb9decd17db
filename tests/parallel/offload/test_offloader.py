"""What is caught, moved and freed, on one stage without a pipeline."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from counterflow.parallel.offload.offloader import Offloader
from counterflow.parallel.offload.tier import DiskTier, HostTier, Tier

CPU = torch.device("cpu")
ROWS, WIDTH = 64, 32
ONE = ROWS * WIDTH * 4  # bytes of an activation


class Twice(nn.Module):
    """Saves its input twice, once as a view, and what it makes of it: relu's result, which the product saves too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = torch.randn(ROWS, WIDTH)  # neither a parameter nor a buffer, as that of rotary positions

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.linear(x)) * self.table
        return (hidden * x.view(WIDTH, ROWS).reshape(ROWS, WIDTH)).square().sum()


def offloader(module: nn.Module, tier: Tier, budget_bytes: int = 1 << 30, min_bytes: int = 0) -> Offloader:
    return Offloader(
        tier,
        device=CPU,
        budget_bytes=budget_bytes,
        min_bytes=min_bytes,
        unit_bytes={0: 4 * ONE},
        stay=list(module.parameters()),
    )


def forward(module: nn.Module, moves: Offloader, microbatch: int, x: Tensor) -> Tensor:
    moves.reserve(0)
    with moves.catching(0, microbatch):
        return module(x)


def backward(moves: Offloader, microbatch: int, loss: Tensor) -> None:
    moves.fetch(0, microbatch)
    loss.backward()
    moves.release(0, microbatch)


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return HostTier(pinned=False) if request.param == "host" else DiskTier(tmp_path)


def test_gradients_are_those_without(tier: Tier) -> None:
    torch.manual_seed(0)
    module = Twice()
    batches = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    sum(module(x) for x in batches).backward()  # type: ignore[union-attr]
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    moves = offloader(module, tier)
    with moves.step():
        losses = [forward(module, moves, index, x + 0) for index, x in enumerate(batches)]
        for index in range(3):
            moves.offload(0, index)
        moves.reload(0, 2)
        for index in (2, 1, 0):  # the others come when they are asked for
            backward(moves, index, losses[index])
    report = moves.report
    assert report.num_uses == 3
    assert report.num_unplanned == 2
    for parameter, other in zip(module.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert other is not None
        torch.testing.assert_close(parameter.grad, other)  # the sum of losses is another order


def test_what_is_saved_twice_moves_once_and_is_freed(tier: Tier) -> None:
    module = Twice()
    moves = offloader(module, tier)
    with moves.step():
        loss = forward(module, moves, 0, torch.randn(ROWS, WIDTH))
        # The input, for the linear layer and as a view for the product; relu's result; the table; the last product. The
        # table is counted until it is seen that others hold it.
        kept = moves.report.peak_bytes
        assert kept == 4 * ONE
        unit = moves._entries[0, 0].unit
        storages = [StorageWeakRef(memory.untyped_storage()) for memory in unit.memories()]
        assert len(storages) == 4
        moves.offload(0, 0)
        _wait(moves)
        assert moves.report.out_bytes == kept
        assert unit.memories() == []
        assert sum(not storage.expired() for storage in storages) == 1  # the table
        backward(moves, 0, loss)
        # Seen once, the table stays.
        loss = forward(module, moves, 1, torch.randn(ROWS, WIDTH))
        moves.offload(0, 1)
        backward(moves, 1, loss)
    assert moves.report.out_bytes == kept + 3 * ONE


def test_parameters_and_small_tensors_stay(tier: Tier) -> None:
    module = nn.Linear(WIDTH, WIDTH)
    moves = offloader(module, tier, min_bytes=ONE + 1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with moves.step():
        loss = forward(module, moves, 0, x + 0)[0].sum()
        assert moves.report.peak_bytes == ONE  # saved are the input, and the weight
        moves.offload(0, 0)
        backward(moves, 0, loss)
    assert moves.report.out_bytes == 0
    assert moves.report.num_hits == 1


@pytest.mark.parametrize("num_kept", [1, 2, 3])
def test_the_budget_is_held_without_a_plan(tier: Tier, num_kept: int) -> None:
    """No OFFLOAD and no RELOAD: a forward sends others away, and a backward brings its own back."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    moves = offloader(module, tier, budget_bytes=num_kept * 2 * ONE)
    with moves.step():
        losses = [
            forward(module, moves, index, torch.randn(ROWS, WIDTH)).square().sum() for index in range(6)
        ]
        for index, loss in enumerate(losses):
            backward(moves, index, loss)
    assert 0 < moves.report.peak_bytes <= num_kept * 2 * ONE
    assert moves.report.num_unplanned > 0


def test_memory_does_not_grow_over_steps(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    disk = DiskTier(tmp_path)
    moves = offloader(module, disk)
    x = torch.randn(16 * ROWS, WIDTH)
    on_disk = 16 * 2 * ONE * 4  # the input and relu's result, of four micro-batches

    def step() -> None:
        with moves.step():
            losses = [forward(module, moves, index, x + 0).sum() for index in range(4)]
            for index in range(4):
                moves.offload(0, index)
            for index, loss in enumerate(losses):
                moves.reload(0, index)
                backward(moves, index, loss)

    step()
    assert disk.num_bytes == on_disk
    resident = _resident_bytes()
    for _ in range(60):
        step()
    assert disk.num_bytes == on_disk
    # Each step moves 1 MiB: what leaked would be 60.
    assert _resident_bytes() - resident < 16 << 20


def test_a_failed_step_leaves_nothing(tier: Tier) -> None:
    module = Twice()
    moves = offloader(module, tier)

    def fail() -> None:
        with moves.step():
            loss = forward(module, moves, 0, torch.randn(ROWS, WIDTH))
            moves.offload(0, 0)
            moves.reload(0, 0)
            raise KeyError(loss)

    with pytest.raises(KeyError):
        fail()
    with moves.step():
        backward(moves, 0, forward(module, moves, 0, torch.randn(ROWS, WIDTH)))


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Twice()
    moves = offloader(module, DiskTier(tmp_path))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    def run() -> None:
        with moves.step():
            loss = forward(module, moves, 0, torch.randn(ROWS, WIDTH))
            moves.offload(0, 0)
            backward(moves, 0, loss)

    with pytest.raises(
        OSError, match=r"offload\.folder=.*: no room for \d+ more bytes .* set another folder"
    ):
        run()


def test_a_disk_that_is_full_for_real(tmp_path: Path) -> None:
    """A limit on the size of a file stands for a disk's; it is the kernel that refuses."""
    disk = DiskTier(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        disk.take(1 << 19)
        with pytest.raises(OSError, match="no room for"):
            disk.take(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_folder_that_takes_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"offload\.folder=.*no file can be made there"):
        DiskTier(tmp_path / "file")


def test_a_file_has_no_name_and_regions_are_used_again(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path)
    region = disk.take(100_000)
    region.memory()[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert region.memory()[:3].tolist() == [1, 2, 3]
    assert list(tmp_path.iterdir()) == []
    size = disk.num_bytes
    disk.give_back(region)
    assert disk.take(90_000) is region
    assert disk.num_bytes == size
    # One that is much smaller gets its own.
    disk.give_back(region)
    assert disk.take(10_000) is not region


def test_a_copy_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(pinned=False)
    module = Twice()
    moves = offloader(module, tier)
    monkeypatch.setattr(
        "counterflow.parallel.offload.unit.SavedUnit.copy_out",
        lambda *_: (_ for _ in ()).throw(OSError("broken disk")),
    )

    def run() -> None:
        with moves.step():
            loss = forward(module, moves, 0, torch.randn(ROWS, WIDTH))
            moves.offload(0, 0)
            backward(moves, 0, loss)

    with pytest.raises(OSError, match="broken disk"):
        run()


def _wait(moves: Offloader) -> None:
    """Until everything that was sent out is out."""
    with moves._changed:
        moves._changed.wait_for(lambda: moves._num_leaving == 0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
