"""Config of ZeRO sharding (config node `zero`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """What is sharded over the replicas of a stage (ZeRO, Rajbhandari et al., arXiv 1910.02054).

    stage: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters.
    engine: `native`, the sharding of parallel/zero/unit.py, or `deepspeed`, DeepSpeed's own (framework/deepspeed/).
    offload_parameters (stage 3): this rank's shards stay on the host and are moved for each gather; a GPU's business.
    reshard_after (stage 3): `use` frees the whole parameters after each action unless the rank's next
        compute action uses them again; `step` keeps them from their first use in a step to their last.
    """

    stage: Literal[0, 1, 2, 3] = 0
    engine: Literal["native", "deepspeed"] = "native"
    offload_parameters: bool = False
    reshard_after: Literal["use", "step"] = "use"
