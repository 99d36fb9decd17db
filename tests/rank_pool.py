"""A pool of gloo ranks shared by the whole test session.

The workers are forked once, after torch and the project are imported; each `run` gives the first `world_size` of them
a fresh default process group, so tests cannot see each other's groups and pay milliseconds instead of an import.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.open_resources import OpenResources

# What jobs import only when they run. Imported before the fork it costs once, not once for every worker.
_PROJECT = (
    "counterflow.framework.trainer.build",
    "counterflow.framework.trainer.loop",
    "counterflow.framework.checks.parity",
    "counterflow.framework.checks.memory",
    "counterflow.launch.preflight",
    "counterflow.launch.joining",
    "torch._dynamo",  # by the first step of an optimizer and by a dry run
)


class RankError(AssertionError):
    """A rank raised: the message holds its traceback."""


def _serve(rank: int, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            os._exit(0)
        function, args, world_size, store_path, timeout_s, leaves_open = job
        if not gc.get_freeze_count():  # a job that froze objects of its own has let go of ours as well
            gc.collect()
            gc.freeze()
        opened = OpenResources()
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store_path, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            torch.manual_seed(0)
            result = function(*args)
            dist.barrier()
            reply = (True, result)
        except BaseException:
            reply = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        left = opened.left_over() if reply[0] and not leaves_open else None
        if left is not None:
            reply = (False, f"{function.__qualname__} left open what it had opened: {left}")
        connection.send(reply)


class RankPool:
    """`run(function, world_size, *args)` calls a module-level function on that many ranks."""

    def __init__(self, max_ranks: int = 8) -> None:
        self._max_ranks = max_ranks
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="counterflow-ranks-")
        self._runs = 0

    def _start(self) -> None:
        for module in _PROJECT:
            import_module(module)
        # Half a million objects of imported modules, which no collection in a worker need walk over.
        gc.collect()
        gc.freeze()
        context = multiprocessing.get_context("fork")
        for rank in range(self._max_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        gc.unfreeze()

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float = 120.0,
        leaves_open: bool = False,
    ) -> list[Any]:
        """`function(*args)` on ranks 0..world_size-1; their results in rank order (must pickle).

        A job fails where it leaves threads or files open behind it. leaves_open: it may, since a library that it
        calls does.

        Raises RankError: with the traceback of the first rank that raised, died or did not answer in time.
        """
        if not self._workers:
            self._start()
        self._runs += 1
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        workers = self._workers[:world_size]
        for _, connection in workers:
            connection.send((function, args, world_size, store, timeout_s, leaves_open))
        replies: dict[int, tuple[bool, Any]] = {}
        while len(replies) < world_size:
            pending = {workers[rank][1]: rank for rank in range(world_size) if rank not in replies}
            ready = wait(list(pending), timeout=timeout_s)
            failure = None
            if not ready:
                failure = f"ranks {sorted(pending.values())} gave no answer within {timeout_s} s"
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                try:
                    replies[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    failure = f"rank {rank} died"
                    break
                if not replies[rank][0]:
                    failure = f"rank {rank} raised:\n{replies[rank][1]}"
                    break
            if failure:
                self.close()  # the other ranks may be waiting in a collective
                raise RankError(failure)
        return [replies[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []
