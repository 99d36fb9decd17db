"""What `counterflow balance` takes: the ranks to place the experts of a run on."""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.framework.keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancePlan:
    """`counterflow balance`: the ranks to place a run's experts on."""

    num_ranks: int = key(4, "ranks of the expert axis")
    num_redundant_experts: tuple[int, ...] = key(
        (0, 1, 2), "slots of each rank for replicas, one placement for each number"
    )
    num_nodes: int = key(1, "nodes over which the ranks spread")
    num_groups: int = key(1, "equal blocks of experts, each of which stays on one node")
    last_steps: int = key(0, "whose loads are summed; 0: those of every step")

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ValueError(f"num_ranks={self.num_ranks}: experts are shared out to 2 ranks or more")
        if not self.num_redundant_experts or min(self.num_redundant_experts) < 0:
            raise ValueError(
                f"num_redundant_experts={list(self.num_redundant_experts)}: one number or more, each 0 or more"
            )
        if self.last_steps < 0:
            raise ValueError(f"last_steps={self.last_steps}: a number of steps, or 0 for all")
