"""What rebalancing of experts takes (config node `balance`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """Experts move between the ranks of their axis as their loads ask for.

    interval_steps: steps whose loads are summed up before experts move; 0: they stay where they are.
    policy: `swap` exchanges a few experts between ranks of a node; `pack` places each layer anew, groups of experts
    to nodes and experts to ranks, with more moves and a better balance.
    goal: a layer whose largest rank load is at most this over the mean stays as it is; `swap` stops there.
    max_swaps: of a layer, node and interval under `swap`; null: as many as help.
    num_redundant_experts: of a rank, beyond its equal share of a layer's experts. They hold copies of experts, from
    the first step on, and tokens are shared out to all copies of theirs. Where experts move it is under `pack`,
    which chooses those that are worth a copy.
    num_nodes: over which the ranks of the expert axis spread, equally many each. Under `swap` no expert leaves its
    node; under `pack` no group of experts (model.moe.num_groups) is split between nodes, where they divide the groups.
    """

    interval_steps: int = 0
    policy: Literal["swap", "pack"] = "swap"
    goal: float = 1.05
    max_swaps: int | None = None
    num_nodes: int = 1
    num_redundant_experts: int = 0

    def __post_init__(self) -> None:
        if self.interval_steps < 0:
            raise ValueError(
                f"balance.interval_steps={self.interval_steps}: a number of steps; set it to 1 or more, or to 0 for "
                "experts that stay where they are"
            )
        if not self.goal >= 1:
            raise ValueError(
                f"balance.goal={self.goal}: the largest load over the mean, which is 1 at best; 1.05 is the default"
            )
        if self.max_swaps is not None and self.max_swaps < 1:
            raise ValueError(
                f"balance.max_swaps={self.max_swaps}: at least 1; null sets no limit, "
                "balance.interval_steps=0 moves nothing"
            )
        if self.num_redundant_experts < 0:
            raise ValueError(
                f"balance.num_redundant_experts={self.num_redundant_experts}: a number of slots of a rank; set it "
                "to 1 or more, or to 0 for one copy of each expert"
            )
        if self.num_redundant_experts and self.interval_steps and self.policy == "swap":
            raise ValueError(
                f"balance.num_redundant_experts={self.num_redundant_experts} with balance.policy=swap: "
                "exchanges of experts do not choose which of them have copies; set balance.policy=pack"
            )
        if self.num_nodes < 1:
            raise ValueError(f"balance.num_nodes={self.num_nodes}: there is at least 1")
