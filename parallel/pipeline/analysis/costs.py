"""What the actions and the links of a pipeline cost: the input of the simulator, the search and the planner."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from counterflow.parallel.pipeline.analysis.cost_profile import CostProfile, Link, load_profile
from counterflow.parallel.pipeline.config import CostsConfig, PerStage
from counterflow.parallel.pipeline.ir.action import Action, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Time of each action, in one unit; seconds where links are given.

    forward, input_gradient, weight_gradient: F, I and W, one number for every stage or one per stage.
    backward: a full B; None: I + W.
    recompute: what I or B runs again first, where activations are recomputed. W finds it kept.
    pair: an overlapped forward and backward, the same on every stage; None: by the model of Note [Paired slot].
    pair_overlap: see Note [Paired slot].
    latency_s, bandwidth_bytes_per_s: of a link from one rank to another, which sends one message at a time: from the
        end of a message's transmission to its arrival, and None: no limit.
    message_bytes: of an activation, and of its gradient, from one stage to the next; one number for every boundary
        or one per boundary (the first is between stages 0 and 1).
    ranks_per_node, between_nodes: consecutive pipeline ranks share a node; links that leave it are the second.
    links: (source, target, link) of ranks whose link is neither; it comes before both.

    Note [Paired slot]
    The halves of a pair share one processor. With the fraction `pair_overlap` of the shorter half hidden under the
    longer, a pair takes F + B - pair_overlap * min(F, B): 0 hides nothing, 1 is the longer half alone (each half
    leaves the processor idle for as long as the other needs it), below 0 the halves slow each other down.
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    backward: PerStage | None = None
    recompute: PerStage = 0.0
    pair: float | None = None
    pair_overlap: float = 0.0
    latency_s: float = 0.0
    message_bytes: PerStage = 0.0
    bandwidth_bytes_per_s: float | None = None
    ranks_per_node: int | None = None
    between_nodes: Link = field(default_factory=Link)
    links: tuple[tuple[int, int, Link], ...] = ()

    def of(self, action: Action) -> float:
        """The time of one compute action."""
        if action.parts:
            return self.of_pair(*map(self.of, action.parts))
        return self.of_kind(action.kind, action.stage)

    def of_kind(self, kind: Kind, stage: int) -> float:
        """The time of F, I, W or B of `stage`."""
        if kind is Kind.F:
            return at(self.forward, stage)
        if kind is Kind.I:
            return at(self.recompute, stage) + at(self.input_gradient, stage)
        if kind is Kind.W:
            return at(self.weight_gradient, stage)
        assert kind is Kind.B, f"{kind} takes no time"
        if self.backward is not None:
            return at(self.recompute, stage) + at(self.backward, stage)
        return self.of_kind(Kind.I, stage) + self.of_kind(Kind.W, stage)

    def mean_of_kind(self, kind: Kind) -> float:
        """The mean over the stages of F, I, W or B."""
        given = (self.forward, self.input_gradient, self.weight_gradient, self.backward, self.recompute)
        num_stages = max([1, *(len(cost) for cost in given if isinstance(cost, tuple))])
        return statistics.fmean(self.of_kind(kind, stage) for stage in range(num_stages))

    def of_pair(self, forward: float, backward: float) -> float:
        """The time of a pair whose halves take so long alone."""
        if self.pair is not None:
            return self.pair
        return forward + backward - self.pair_overlap * min(forward, backward)

    def link(self, source: int, target: int) -> Link:
        """The link from one pipeline rank to another."""
        for one, other, link in self.links:
            if (one, other) == (source, target):
                return link
        per_node = self.ranks_per_node
        if per_node is not None and source // per_node != target // per_node:
            return self.between_nodes
        return Link(latency_s=self.latency_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)

    def bytes_at(self, boundary: int) -> float:
        """Bytes of one message between the stages `boundary` and `boundary + 1`."""
        return at(self.message_bytes, boundary)

    def check_stages(self, num_stages: int) -> None:
        """Raises ValueError: a cost per stage (or boundary) that is not of `num_stages` stages."""
        for name in (
            "forward",
            "input_gradient",
            "weight_gradient",
            "backward",
            "recompute",
            "message_bytes",
        ):
            cost: PerStage | None = getattr(self, name)
            count, what = (
                (num_stages - 1, "boundaries") if name == "message_bytes" else (num_stages, "stages")
            )
            if isinstance(cost, tuple) and len(cost) != count:
                raise ValueError(
                    f"schedule.costs.{name}={list(cost)}: {len(cost)} values, and the schedule has {count} {what}; "
                    "give one number for all of them, or one for each"
                )


def at(cost: PerStage, stage: int) -> float:
    """The cost of one stage."""
    return cost[stage] if isinstance(cost, tuple) else cost


def costs_from(config: CostsConfig, num_stages: int) -> Costs:
    """The costs that the config gives, or the profile that it names, for `num_stages` stages.

    Raises ValueError: a file that is no profile, or costs of another number of stages.
    """
    if config.profile is not None:
        costs = profile_costs(_fitting_profile(config.profile, num_stages))
    else:
        costs = Costs(
            forward=config.forward,
            input_gradient=config.input_gradient,
            weight_gradient=config.weight_gradient,
            backward=config.backward,
            recompute=config.recompute,
            message_bytes=config.message_bytes or 0.0,
        )
    given: dict[str, Any] = {
        name: value
        for name in ("pair", "latency_s", "bandwidth_bytes_per_s", "ranks_per_node")
        if (value := getattr(config, name)) is not None
    }
    between_nodes = Link(
        latency_s=config.between_nodes_latency_s,
        bandwidth_bytes_per_s=config.between_nodes_bandwidth_bytes_per_s,
    )
    costs = replace(costs, pair_overlap=config.pair_overlap, between_nodes=between_nodes, **given)
    costs.check_stages(num_stages)
    return costs


def profile_costs(profile: CostProfile) -> Costs:
    """The costs that were measured."""
    return Costs(
        forward=tuple(stage.forward_s for stage in profile.stages),
        input_gradient=tuple(stage.input_gradient_s for stage in profile.stages),
        weight_gradient=tuple(stage.weight_gradient_s for stage in profile.stages),
        backward=tuple(stage.backward_s for stage in profile.stages),
        recompute=tuple(stage.recompute_s for stage in profile.stages),
        message_bytes=tuple(map(float, profile.activation_bytes)),
        latency_s=profile.link.latency_s,
        bandwidth_bytes_per_s=profile.link.bandwidth_bytes_per_s,
        links=profile.links,
    )


def _fitting_profile(path: str, num_stages: int) -> CostProfile:
    profile = load_profile(path)
    if profile.num_stages == 2 * num_stages:
        return profile.merged()
    if profile.num_stages != num_stages:
        raise ValueError(
            f"schedule.costs.profile={path}: has the costs of {profile.num_stages} stages, and the schedule has "
            f"{num_stages}; measure them with `counterflow profile` and the same schedule and "
            "parallel.pipeline_parallel_size, or choose those of the profile"
        )
    return profile
