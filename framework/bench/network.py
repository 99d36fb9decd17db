"""A rate-limited network on one machine: each rank in a network namespace of its own, joined by a bridge.

Linux only, and where this process may make namespaces (root, `ip` and `tc` of iproute2). Everything lives in
namespaces that end with the context, the bridge too: the machine's own network is not touched.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_INTERFACE = "wire"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNetwork:
    """The namespace of one rank."""

    namespace: str

    def enter(self) -> None:
        """Move the calling thread, and threads it starts, there; before the process group exists.

        Ranks find each other by a file (`init_method="file://..."`), for no address reaches across.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with (Path("/run/netns") / self.namespace).open() as handle:
            if libc.setns(handle.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.namespace}")
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE


def why_not() -> str | None:
    """Why no such network can be made here; None where it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 are not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"cf{os.getpid()}-probe"
    try:
        _run(f"ip netns add {probe}")
        _run(f"ip netns delete {probe}")
    except subprocess.CalledProcessError as error:
        return f"this kernel or container refuses them ({(error.stderr or str(error)).strip()})"
    return None


@contextmanager
def rate_limited(num_ranks: int, mbit_per_s: float) -> Iterator[tuple[RankNetwork, ...]]:
    """Namespaces for `num_ranks`, each of which sends at most `mbit_per_s`, beyond a burst of 0.8 ms or 16 kB.

    Raises OSError: where they cannot be made; `why_not` says why.
    """
    prefix = f"cf{os.getpid()}"
    hub, names = f"{prefix}-hub", [f"{prefix}-r{rank}" for rank in range(num_ranks)]
    made: list[str] = []
    try:
        for name in (hub, *names):
            _run(f"ip netns add {name}")
            made.append(name)
            _run(f"ip -n {name} link set dev lo up")
        _run(f"ip -n {hub} link add bridge type bridge", f"ip -n {hub} link set dev bridge up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            _run(
                f"ip -n {hub} link add {port} type veth peer name {_INTERFACE} netns {name}",
                f"ip -n {hub} link set dev {port} master bridge up",
                f"ip -n {name} address add 10.77.{rank // 250}.{rank % 250 + 1}/16 dev {_INTERFACE}",
                f"ip -n {name} link set dev {_INTERFACE} up",
                f"tc -n {name} qdisc add dev {_INTERFACE} root {_limit(mbit_per_s)}",
            )
        yield tuple(RankNetwork(namespace=name) for name in names)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(_words(error.cmd))}: {(error.stderr or '').strip()}") from error
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def set_rate(mbit_per_s: float | None) -> None:
    """From now on a rank that has entered its namespace sends at most `mbit_per_s`; None: as fast as it can.

    Raises OSError: where it is in none.
    """
    try:
        if mbit_per_s is None:
            _run(f"tc qdisc replace dev {_INTERFACE} root pfifo limit 1000")
        else:
            _run(f"tc qdisc replace dev {_INTERFACE} root {_limit(mbit_per_s)}")
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(_words(error.cmd))}: {(error.stderr or '').strip()}") from error


def _limit(mbit_per_s: float) -> str:
    # Nothing is dropped: TCP would send it again only after a pause that has nothing to do with the rate.
    return f"tbf rate {mbit_per_s:g}mbit burst {max(16, round(mbit_per_s / 10))}kb limit 16mb"


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True, text=True)


def _words(command: object) -> Sequence[str]:
    return [str(word) for word in command] if isinstance(command, list) else [str(command)]
