"""Entry functions for tests of the launcher, and a program that runs one: `toy_ranks.py ENTRY RANKS FOLDER`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def _init() -> tuple[int, int]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return dist.get_rank(), dist.get_world_size()


def _work(seconds: float = 60.0) -> None:
    """Collectives until `seconds` have passed: what a training loop does to its peers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        dist.all_reduce(torch.ones(8))
        time.sleep(0.005)


def _failing() -> None:
    os.write(1, f"failing at {time.time()}\n".encode())


def total() -> float:
    """The sum of 0..n-1 by an all-reduce, the same on every rank."""
    rank, _ = _init()
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    dist.barrier()
    dist.destroy_process_group()
    return value.item()


def started() -> int:
    """How many ranks' processes had been forked when this one began."""
    return len(list(Path(sys.argv[3]).glob(".ranks-*/pid-*")))


def work() -> None:
    _init()
    os.write(1, b"working\n")
    _work()


def last_raises() -> None:
    rank, size = _init()
    _work(0.5)
    if rank == size - 1:
        _failing()
        try:
            raise KeyError("the shard is not there")
        finally:
            dist.destroy_process_group()  # peers lose their connections before this error is recorded
            time.sleep(0.3)
    _work()


def all_raise() -> None:
    _init()
    _failing()
    raise ValueError("every rank found the same mistake")


def last_is_killed() -> None:
    rank, size = _init()
    _work(0.5)
    if rank == size - 1:
        _failing()
        os.kill(os.getpid(), signal.SIGKILL)
    _work()


def first_is_terminated() -> None:
    rank, _ = _init()
    _work(0.3)
    if rank == 0:
        _failing()
        os.kill(os.getpid(), signal.SIGTERM)
    _work()


def last_segfaults() -> None:
    rank, size = _init()
    _work(0.3)
    if rank == size - 1:
        _failing()
        ctypes.string_at(0)
    _work()


def last_leaves() -> None:
    rank, size = _init()
    _work(0.3)
    if rank == size - 1:
        _failing()
        os._exit(0)
    _work()


def last_exits_3() -> None:
    rank, size = _init()
    if rank == size - 1:
        _failing()
        sys.exit(3)
    _work()


def deaf() -> None:
    """Ranks that catch SIGTERM and go on, one of which fails."""
    rank, size = _init()
    signal.signal(signal.SIGTERM, lambda *_: None)
    # Not _work: its ranks stop by the clock, and one that began a collective more than the others would hang here.
    dist.barrier()
    if rank == size - 1:
        _failing()
        raise RuntimeError("deaf and broken")
    while True:
        time.sleep(0.1)


def deaf_work() -> None:
    _init()
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.write(1, b"working\n")
    while True:
        time.sleep(0.1)


def third_hangs() -> None:
    """Rank 2 stays in a computation of its own while the others wait for it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    dist.barrier()
    if dist.get_rank() == 2:
        _failing()
        _compute_for_ever()
    dist.all_reduce(torch.ones(8))


def third_is_stopped() -> None:
    """Rank 2 is stopped, as by Ctrl-Z or a scheduler, on its way into a collective."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    dist.barrier()
    if dist.get_rank() == 2:
        _failing()
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(8))


def _compute_for_ever() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    time.sleep(300)


def last_fills_the_disk() -> None:
    """What rank 3 writes to the run's folder finds a full disk, its traceback too."""
    rank, size = _init()
    dist.barrier()
    if rank == size - 1:
        _failing()
        for name in ("data", "rank-3-error.txt"):
            (Path(sys.argv[3]) / name).symlink_to("/dev/full")
        (Path(sys.argv[3]) / "data").write_text("x")
    _work()


def with_child() -> None:
    """Rank 0 starts a process of its own that would outlive it, then the last rank dies."""
    rank, size = _init()
    if rank == 0:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    dist.barrier()
    if rank == size - 1:
        _failing()
        os.kill(os.getpid(), signal.SIGKILL)
    _work()


def main() -> int:
    from counterflow.framework.errors import RunFailedError, RunInterruptedError
    from counterflow.launch.ranks.elastic import run_local

    entry, num_ranks, folder = sys.argv[1:]
    try:
        results = run_local(globals()[entry], (), num_ranks=int(num_ranks), run_dir=Path(folder), grace_s=3.0)
    except RunFailedError as error:
        print(f"FAILED {error}", file=sys.stderr)
        return 1
    except RunInterruptedError as error:
        print(f"STOPPED {error}", file=sys.stderr)
        return 128 + error.signal_number
    print(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
