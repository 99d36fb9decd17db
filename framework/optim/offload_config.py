"""Config of where the optimizer's states are kept (config node `optimizer.offload`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_LEAST_RESIDENT_BYTES = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOffloadConfig:
    """Where AdamW's states are between steps, and so where it updates (ZeRO-Offload, Ren et al., arXiv 2101.06840).

    tier: `none`, beside the parameters. `host`: masters and moments in memory of the host, to which gradients are
        copied and from which parameters come back; ranks on a CPU are there already. `disk`: moments in a file for
        each rank, from which the update reads them part by part (ZeRO-Infinity, Rajbhandari et al.,
        arXiv 2104.07857, section 5.2).
    folder: of `disk`; null: launcher.runs_dir.
    resident_bytes: of `disk`, the most that a rank has of its moments in memory at once.
    """

    tier: Literal["none", "host", "disk"] = "none"
    folder: str | None = None
    resident_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.resident_bytes < _LEAST_RESIDENT_BYTES:
            raise ValueError(
                f"optimizer.offload.resident_bytes={self.resident_bytes}: room for three parts that are read, updated "
                f"and written at once; set it to {_LEAST_RESIDENT_BYTES} or more"
            )
        if self.folder is not None and self.tier != "disk":
            raise ValueError(
                f"optimizer.offload.folder={self.folder} with optimizer.offload.tier={self.tier}: only the disk tier "
                "has a folder; set optimizer.offload.tier=disk, or leave the folder out"
            )
