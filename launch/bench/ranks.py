"""Local ranks for the benches: joined by loopback or by a link that is slow on purpose."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from counterflow.framework.bench.network import RankNetwork, rate_limited


def run_ranks(
    measure: Callable[..., Any],
    args: Sequence[Any],
    *,
    num_ranks: int,
    folder: Path,
    mbit_per_s: float | None = None,
) -> Any:
    """What `measure(*args)` returned on rank 0; every rank runs it on one thread, in a gloo process group.

    mbit_per_s: what each rank sends at most, over an emulated link; None: loopback. See `network.why_not`.

    Raises RunFailedError: where a rank fails.
    """
    from counterflow.launch.ranks.elastic import run_local

    # A file, for ranks in namespaces of their own do not reach an address of the launcher.
    store = folder / "store-ranks"
    limited = nullcontext(()) if mbit_per_s is None else rate_limited(num_ranks, mbit_per_s)
    try:
        with limited as networks:
            return run_local(
                _rank,
                (measure, args, networks, str(store.absolute())),
                num_ranks=num_ranks,
                run_dir=folder,
                threads_per_rank=1,
            )[0]
    finally:
        store.unlink(missing_ok=True)


def _rank(
    measure: Callable[..., Any], args: Sequence[Any], networks: Sequence[RankNetwork], store: str
) -> Any:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    if networks:
        networks[rank].enter()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    try:
        return measure(*args)
    finally:
        dist.destroy_process_group()
