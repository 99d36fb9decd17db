"""A rendezvous of local ranks that nobody outside of this machine reaches.

torch's own (c10d) serves its store on every address, and unpickles what it finds under a key of that store. Here the
ranks are those of one launcher, so there is nothing to agree on: one store listens on the loopback address, and what
is read from it is never unpickled. Gloo and NCCL, which open a port in each rank, are told to use that interface too.
"""

from __future__ import annotations

import socket

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "counterflow-loopback"
ADDRESS = "127.0.0.1"


def register() -> None:
    """Make `BACKEND` known to torch's launcher as `rdzv_backend`."""
    rendezvous_handler_registry.register(BACKEND, _create)


def loopback_store() -> TCPStore:
    """A store that listens on a free port of the loopback address alone."""
    # The store would listen on every address; a socket that is bound already is taken as it is.
    with socket.create_server((ADDRESS, 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


class LoopbackRendezvous(RendezvousHandler):
    """The one launcher of a local run, and the store that its ranks use."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = loopback_store()

    @property
    def use_agent_store(self) -> bool:
        return True  # ranks connect to it; else rank 0 would serve one of its own on every address

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(ADDRESS, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing else takes part."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
