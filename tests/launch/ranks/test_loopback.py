"""The doors of a local run: who can reach it, and what it makes of what others write."""

from __future__ import annotations

import ipaddress
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from counterflow.launch.ranks.loopback import LoopbackRendezvous

_ROOT = Path(__file__).parents[3]
_LISTENING = "0A"


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as /proc/net/tcp and tcp6 print it: words of 32 bits in the machine's byte order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))


def listening_of(pids: list[int]) -> dict[tuple[str, int], int]:
    """(address, port) of every TCP socket that these processes listen on, and a process that has it."""
    owners: dict[str, int] = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd)):
                owners[match[1]] = pid
    found: dict[tuple[str, int], int] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in owners:
                host, port = fields[1].split(":")
                found[(str(_address(host)), int(port, 16))] = owners[fields[9]]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_a_local_run_listens_on_loopback_alone(tmp_path: Path) -> None:
    # That of another interface, as it is set for several nodes: a local run has nothing to do with it.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tests.launch.toy_ranks", "work", "2", str(tmp_path)],
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["working\n"] * 2
        (control_dir,) = tmp_path.glob(".ranks-*")
        ranks = [int((control_dir / f"pid-{rank}").read_text()) for rank in range(2)]
        listening = listening_of([launcher.pid, *ranks])
    finally:
        launcher.terminate()
        launcher.communicate(timeout=60)
    assert {host for host, _ in listening} == {"127.0.0.1"}
    assert set(ranks) <= set(listening.values())  # gloo's, so that what was looked for is there to be found


class _Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["TRAP"],)


def test_a_pickle_in_the_store_stays_a_row_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    trap = pickle.dumps(_Trap())
    rendezvous = LoopbackRendezvous("run")
    info = rendezvous.next_rendezvous()
    assert info.bootstrap_store_info is not None
    store = TCPStore(
        info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port, is_master=False
    )
    for key in ("torch.rendezvous.run", "run/torch.rendezvous.run", "torch.rendezvous./run"):
        store.set(key, trap)  # pyright: ignore[reportArgumentType]
    assert store.get("torch.rendezvous.run") == trap
    info = rendezvous.next_rendezvous()
    assert (info.rank, info.world_size, rendezvous.num_nodes_waiting()) == (0, 1, 0)
    rendezvous.shutdown()
    assert not (tmp_path / "sprung").exists()
