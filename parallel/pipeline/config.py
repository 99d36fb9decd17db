"""Config of the pipeline schedule (config group `schedule`)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

PerStage = float | tuple[float, ...]

# What a profile measures, and what may be set beside it because it is of another network or a model.
_MEASURED = ("forward", "input_gradient", "weight_gradient", "backward", "recompute", "message_bytes")
_POSITIVE = ("forward", "input_gradient", "weight_gradient", "backward", "pair")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsConfig:
    """Time of one action in the simulator: seconds where a profile or links are given, else in any one unit.

    profile: a file that `counterflow profile` wrote, which has the costs of the stages, the size of a message and
        the link; then none of the first five, nor message_bytes, may be set. Links and pairs that are set stand in
        place of the profile's.
    forward, input_gradient, weight_gradient: F, I and W; one number for every stage, or a list with one per stage.
    backward: a full backward; null: input_gradient + weight_gradient.
    recompute: run again ahead of an input gradient or a full backward.
    pair: an overlapped forward and backward; null: forward + backward - pair_overlap x the shorter of both.
    pair_overlap: how much of the shorter half of a pair hides under the longer: 0 nothing, 1 all of it.
    latency_s, bandwidth_bytes_per_s: of a link between two ranks, null: no time; between_nodes_*: of a link that
        leaves a node of `ranks_per_node` consecutive pipeline ranks.
    message_bytes: of an activation from one stage to the next, one number or one per boundary; null: the profile's,
        or the model's where bytes are counted.
    """

    profile: str | None = None
    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    backward: PerStage | None = None
    recompute: PerStage = 0.0
    pair: float | None = None
    pair_overlap: float = 0.0
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    message_bytes: PerStage | None = None
    ranks_per_node: int | None = None
    between_nodes_latency_s: float = 0.0
    between_nodes_bandwidth_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            for value in _values(getattr(self, name)):
                if not value > 0:
                    raise ValueError(
                        f"schedule.costs.{name}={value}: a cost is a positive time; set it above 0"
                    )
        for name in ("recompute", "latency_s", "message_bytes", "between_nodes_latency_s"):
            for value in _values(getattr(self, name)):
                if not value >= 0:
                    raise ValueError(f"schedule.costs.{name}={value}: set it to 0 or above")
        for name in ("bandwidth_bytes_per_s", "between_nodes_bandwidth_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"schedule.costs.{name}={value}: set it above 0, or to null for a link without limit"
                )
        has_bandwidth = self.bandwidth_bytes_per_s or self.between_nodes_bandwidth_bytes_per_s
        if has_bandwidth and self.message_bytes is None and self.profile is None:
            raise ValueError(
                "schedule.costs.message_bytes=null: a link with a bandwidth needs the size of a message; set it, or "
                "give a schedule.costs.profile"
            )
        if not self.pair_overlap <= 1:
            raise ValueError(
                f"schedule.costs.pair_overlap={self.pair_overlap}: the share of the shorter half that is hidden; set "
                "it to 1 at most"
            )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(
                f"schedule.costs.ranks_per_node={self.ranks_per_node}: a node has a rank; set it to 1 or more, or to "
                "null for a single node"
            )
        if self.profile is not None:
            defaults = {item.name: item.default for item in fields(self)}
            given = [name for name in _MEASURED if getattr(self, name) != defaults[name]]
            if given:
                raise ValueError(
                    f"schedule.costs.profile={self.profile}: has the costs of the stages, so schedule.costs."
                    f"{given[0]}={getattr(self, given[0])} would say another thing; leave out one of them"
                )


def _values(cost: PerStage | None) -> tuple[float, ...]:
    return cost if isinstance(cost, tuple) else () if cost is None else (cost,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Which schedule, and how many micro-batches a step has (over both directions for `dualpipe`).

    num_chunks: stages that a rank holds, for `interleaved_1f1b` to choose; null: the schedule's own number (2 for
        `interleaved_1f1b` and for the V-shaped schedules, 1 for the others). `auto` takes 1, or 2 in a V; null:
        what the costs are of.
    path: the file of `csv`, one row per rank.
    memory_limit_activations: for `auto`, most micro-batches whose activations a rank may hold; null: what 1f1b holds.
    search_seed: for `auto`; the same seed finds the same schedule.
    early_sends: let an activation leave before the backward it is paired with, and a gradient before the weight
        gradients of its backward; costs the memory that W of one more micro-batch needs.
    overlap: where tokens travel to experts on other ranks, run the halves of a pair together, each computing while
        the other's tokens are on their way; pairs then leave the rank whole, whatever early_sends. Pairs are what
        dualpipe and dualpipe_v have, and what interleaved_1f1b gets, for one more micro-batch's activations.
    """

    name: str = "1f1b"
    num_microbatches: int = 8
    num_chunks: int | None = None
    path: str | None = None
    memory_limit_activations: int | None = None
    search_seed: int = 0
    early_sends: bool = True
    overlap: bool = True
    costs: CostsConfig = field(default_factory=CostsConfig)

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(
                f"schedule.num_microbatches={self.num_microbatches}: a step has at least one micro-batch; "
                "set it to 1 or more"
            )
        if self.num_chunks is not None and self.num_chunks < 1:
            raise ValueError(
                f"schedule.num_chunks={self.num_chunks}: a rank holds at least one stage; set it to 1 or more, or to "
                "null for the schedule's own number"
            )
        for key, owner in (("path", "csv"), ("memory_limit_activations", "auto")):
            value = getattr(self, key)
            if value is not None and self.name != owner:
                raise ValueError(
                    f"schedule.{key}={value}: is for schedule={owner}, and schedule.name={self.name}; choose "
                    f"schedule={owner}, or set schedule.{key}=null"
                )
        if self.memory_limit_activations is not None and self.memory_limit_activations < 1:
            raise ValueError(
                f"schedule.memory_limit_activations={self.memory_limit_activations}: a rank holds the activations of "
                "one micro-batch at least; set it to 1 or more, or to null for what 1f1b holds"
            )
