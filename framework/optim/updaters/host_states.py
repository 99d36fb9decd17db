"""Updates on the host: masters and moments are there, gradients are copied to it (see `FlatUnit`'s master_device)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from counterflow.framework.optim.updaters.updater import Part, Updater


def nothing_moves(tier: str, *, offload_parameters: bool, device: torch.device) -> str | None:
    """What to say where a host tier is asked for on ranks whose memory is the host's; None: something moves."""
    if tier != "host" or device.type != "cpu":
        return None
    names = ["optimizer.offload.tier=host", *(["zero.offload_parameters=true"] * offload_parameters)]
    return f"{' and '.join(names)}: ranks on a CPU have everything on the host already, so nothing moves"


class HostStates(Updater):
    """An updater that hands `inner` parts whose every tensor is on the host.

    On a rank whose device is the CPU they are there already. Beside a GPU gradients come through pinned memory, in one
    piece of it that stays.
    """

    def __init__(self, inner: Updater) -> None:
        self.name = f"{inner.name}, on the host"
        self._inner = inner
        self._gradients: Tensor | None = None

    @property
    def resident_bytes(self) -> int:
        """Memory of the host that gradients are copied to."""
        return 0 if self._gradients is None else self._gradients.nbytes

    def new_state(self, master: Tensor) -> dict[str, Tensor]:
        assert master.device.type == "cpu", "masters are on the host where the optimizer is offloaded"
        return self._inner.new_state(master)

    def close(self) -> None:
        self._inner.close()

    @torch.no_grad()
    def update(self, parts: Sequence[Part], *, step: int, learning_rate: float) -> None:
        away = [part for part in parts if part.grad.device.type != "cpu"]
        if not away:
            self._inner.update(parts, step=step, learning_rate=learning_rate)
            return
        total = sum(part.grad.numel() for part in away)
        if self._gradients is None:
            self._gradients = torch.empty(total, dtype=torch.float32, pin_memory=True)
        moved: list[Part] = []
        start = 0
        for part in away:
            place = self._gradients[start : start + part.grad.numel()]
            start += part.grad.numel()
            place.copy_(part.grad, non_blocking=True)
            moved.append(replace(part, grad=place))
        torch.cuda.current_stream(away[0].grad.device).synchronize()
        here = [part for part in parts if part.grad.device.type == "cpu"]
        self._inner.update([*here, *moved], step=step, learning_rate=learning_rate)
