"""Config of ZeRO sharding (config node `zero`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ReshardAfter = Literal["use", "backward", "step", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """What is sharded over the replicas of a stage (ZeRO, Rajbhandari et al., arXiv 1910.02054).

    stage: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters.
    engine: `native`, the sharding of parallel/zero/, or `deepspeed`, DeepSpeed's own (framework/deepspeed/).
    units (stages 2 and 3): what is gathered and reduced at once, a `block` (a layer, the embedding, the head, an MTP
        module) or a whole pipeline `stage`.
    prefetch_units (stage 3, units=block): how many blocks are gathered ahead of the one that is computed.
    reshard_after (stage 3): `use` frees whole parameters as soon as the next uses that are under way are of others;
        `backward` keeps them from a forward to the last backward that waits for one; `step` keeps them from
        their first use in a step to their last. A list has one for each pipeline rank. `auto` keeps them for as long
        as each pipeline rank has room below memory_limit_bytes.
    reduce (stages 2 and 3): `step` accumulates whole gradients and reduces them once a step, with the fewest bytes on
        the wire; `microbatch` reduces a block's as soon as a micro-batch's are complete and keeps its shard only.
    shard_size (stage 3): parameters are sharded within groups of so many replicas, a node say, and replicated
        across them; None: over all replicas. Optimizer state is sharded over all in any case.
    offload_parameters (stage 3): this rank's shards stay on the host and are moved for each gather; a GPU's business.
    """

    stage: Literal[0, 1, 2, 3] = 0
    engine: Literal["native", "deepspeed"] = "native"
    units: Literal["block", "stage"] = "block"
    prefetch_units: int = 1
    reshard_after: ReshardAfter | tuple[ReshardAfter, ...] = "use"
    reduce: Literal["step", "microbatch"] = "step"
    shard_size: int | None = None
    offload_parameters: bool = False

    def __post_init__(self) -> None:
        if self.prefetch_units < 0:
            raise ValueError(
                f"zero.prefetch_units={self.prefetch_units}: a number of blocks; set it to 0 or more, 1 gathers the "
                "next block while one is computed"
            )
        if self.shard_size is not None and self.shard_size < 1:
            raise ValueError(
                f"zero.shard_size={self.shard_size}: a number of replicas; set it to 1 or more, or null to shard over "
                "all of them"
            )

    def reshard_after_of(self, pipeline: int) -> ReshardAfter:
        """When pipeline rank `pipeline` frees whole parameters; `auto` is `use` until it has been decided."""
        each = self.reshard_after if isinstance(self.reshard_after, str) else self.reshard_after[pipeline]
        return "use" if each == "auto" else each

    @property
    def has_block_units(self) -> bool:
        """Whether units are blocks: below stage 2 nothing comes and goes by units."""
        return self.units == "block" and self.stage >= 2
