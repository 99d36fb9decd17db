"""Config of ZeRO sharding (config node `zero`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """What is sharded over the replicas of a stage (ZeRO, Rajbhandari et al., arXiv 1910.02054).

    stage: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters.
    reshard_after (stage 3): `use` frees the whole parameters after each action unless the rank's next
        compute action uses them again; `step` keeps them from their first use in a step to their last.
    """

    stage: Literal[0, 1, 2, 3] = 0
    reshard_after: Literal["use", "step"] = "use"
