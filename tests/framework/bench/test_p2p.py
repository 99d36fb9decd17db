"""The bench of chunked transfers: what its rows say, and that an emulated link limits the rate."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from counterflow.framework.bench.config import P2PBenchConfig
from counterflow.framework.bench.network import rate_limited, why_not
from counterflow.framework.bench.p2p import CASES, Row, measure_p2p
from counterflow.launch.ranks.elastic import run_local
from tests.rank_pool import RankPool


def row(whole: tuple[float, ...], chunked: tuple[float, ...]) -> Row:
    return Row(
        link="loopback", case="contiguous", tensor_bytes=1, chunk_bytes=1, whole_s=whole, chunked_s=chunked
    )


def test_the_ratio_is_of_pairs_and_noise_is_no_verdict() -> None:
    drifting = row((1.0, 2.0, 4.0, 8.0), (0.9, 1.8, 3.6, 7.2))
    assert drifting.ratio == pytest.approx(0.9)
    assert drifting.verdict == "pays"
    assert row((1.0,) * 4, (1.1, 1.2, 1.1, 0.9)).verdict == "costs"
    assert row((1.0,) * 4, (1.01, 1.02, 0.99, 1.0)).verdict == "same"
    assert row((1.0,) * 4, (0.5, 0.9, 1.2, 1.3)).verdict == "same", "the pairs do not agree"


def measured() -> list[Row]:
    return measure_p2p("loopback", CASES, [1 << 18], [1 << 16], action_s=1e-4, repeats=1)


def test_every_case_is_measured_on_all_ranks(ranks: RankPool) -> None:
    for rows in ranks.run(measured, 2):
        assert [row.case for row in rows] == list(CASES)
        assert all(row.ratio > 0 for row in rows)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tensor_mib", ()), ("chunk_kib", (1,)), ("mbit_per_s", (0.1,)), ("num_ranks", 1), ("repeats", 0)],
)
def test_senseless_values_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        P2PBenchConfig(**{key: value})  # type: ignore[arg-type]


def transfer_s(networks: tuple[object, ...], store: str, rank_of: str = "RANK") -> float:
    import os

    rank = int(os.environ[rank_of])
    networks[rank].enter()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        value = torch.zeros(1 << 19)
        begin = time.perf_counter()
        dist.broadcast(value, src=0)
        dist.barrier()
        return time.perf_counter() - begin
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_rate_limited_link_takes_the_time_its_rate_says(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    before = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    with rate_limited(2, 100.0) as networks:
        names = [network.namespace for network in networks]
        seconds = run_local(
            transfer_s, (networks, str(tmp_path / "store")), num_ranks=2, run_dir=tmp_path, threads_per_rank=1
        )
        listed = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
        assert all(name in listed for name in names)
    # 2 MiB less the burst at 12.5 MB/s; a slow machine only adds to it.
    assert min(seconds) > 0.9 * (2**21 - 2**16) / 12.5e6
    after = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
    assert not any(name in after for name in names)
    now = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    assert len(now.splitlines()) == len(before.splitlines())
