"""Rules of mixtures of experts: how they are shared out to ranks, moved and copied."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from counterflow.framework.checks.rules.rule import Finding, Rule, largest_divisor
from counterflow.framework.planning.workload import Workload


def _shared_out(workload: Workload) -> Iterator[Finding]:
    parallel, num_experts = workload.config.parallel, workload.config.model.moe.num_experts
    size = parallel.expert_parallel_size
    if size > 1 and num_experts == 0:
        yield Finding(
            value=f"parallel.expert_parallel_size={size}",
            reason="the model has no experts to share out (model.moe.num_experts=0)",
            remedy="set parallel.expert_parallel_size=1, or choose a model that has",
        )
    elif num_experts % size:
        # It divides the ranks of a stage too, which the size at hand does.
        fitting = largest_divisor(gcd(num_experts, parallel.ranks_per_stage), size)
        yield Finding(
            value=f"model.moe.num_experts={num_experts}",
            reason=f"must be a multiple of parallel.expert_parallel_size={size}, over which experts are shared out",
            remedy=f"try parallel.expert_parallel_size={fitting}",
        )


def _copies_somewhere(workload: Workload) -> Iterator[Finding]:
    spare = workload.config.balance.num_redundant_experts
    if spare and workload.config.parallel.expert_parallel_size == 1:
        yield Finding(
            value=f"balance.num_redundant_experts={spare}",
            reason="they hold copies of other ranks' experts, and parallel.expert_parallel_size=1",
            remedy="set that to 2 or more, or balance.num_redundant_experts=0",
        )


def _moves_somewhere(workload: Workload) -> Iterator[Finding]:
    interval_steps = workload.config.balance.interval_steps
    if interval_steps and workload.config.parallel.expert_parallel_size == 1:
        yield Finding(
            value=f"balance.interval_steps={interval_steps}",
            reason="experts move between the ranks of the expert axis, and parallel.expert_parallel_size=1",
            remedy="set that to 2 or more, or balance.interval_steps=0",
        )


def _nodes(workload: Workload) -> Iterator[Finding]:
    size, num_nodes = workload.config.parallel.expert_parallel_size, workload.config.balance.num_nodes
    if size % num_nodes:
        yield Finding(
            value=f"balance.num_nodes={num_nodes}",
            reason=f"must divide parallel.expert_parallel_size={size}, whose ranks are shared out to nodes",
            remedy=f"try balance.num_nodes={largest_divisor(size, num_nodes)}",
        )


def _copies_of_others(workload: Workload) -> Iterator[Finding]:
    spare = workload.config.balance.num_redundant_experts
    size, num_experts = workload.config.parallel.expert_parallel_size, workload.config.model.moe.num_experts
    others = num_experts - num_experts // size
    if size > 1 and num_experts and spare > others:
        yield Finding(
            value=f"balance.num_redundant_experts={spare}",
            reason=f"each of parallel.expert_parallel_size={size} ranks has {others} of model.moe.num_experts="
            f"{num_experts} still to hold a copy of",
            remedy=f"set it to {others} or less",
        )


_TWO_RANKS = {"data_parallel_size": 2, "expert_parallel_size": 2}

RULES = (
    Rule(
        name="the expert axis divides the experts",
        find=_shared_out,
        example={"model": {"moe": {"num_experts": 5}}, "parallel": _TWO_RANKS},
    ),
    Rule(
        name="copies of experts are on other ranks",
        find=_copies_somewhere,
        example={
            "model": {"moe": {"num_experts": 4}},
            "balance": {"num_redundant_experts": 1},
        },
    ),
    Rule(
        name="experts move to other ranks",
        find=_moves_somewhere,
        example={"model": {"moe": {"num_experts": 4}}, "balance": {"interval_steps": 5}},
    ),
    Rule(
        name="nodes share the expert axis equally",
        find=_nodes,
        example={
            "model": {"moe": {"num_experts": 4}},
            "parallel": _TWO_RANKS,
            "balance": {"interval_steps": 5, "num_nodes": 4},
        },
    ),
    Rule(
        name="there are experts to copy",
        find=_copies_of_others,
        example={
            "model": {"moe": {"num_experts": 4}},
            "parallel": _TWO_RANKS,
            "balance": {"num_redundant_experts": 3},
        },
    ),
)
