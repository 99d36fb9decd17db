"""Config of the pipeline schedule (config group `schedule`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsConfig:
    """Time of one action in the simulator, in any one unit.

    forward, input_gradient, weight_gradient: F, I and W; a full backward is I + W.
    pair: an overlapped forward and backward; null: forward + input_gradient + weight_gradient, nothing hidden.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    pair: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "input_gradient", "weight_gradient", "pair"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"schedule.costs.{name}={value}: a cost is a positive time; set it above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Which schedule, and how many micro-batches a step has (over both directions for `dualpipe`).

    num_chunks: stages that a rank holds, for `interleaved_1f1b` to choose; null: the schedule's own number (2 for
        `interleaved_1f1b` and for the V-shaped schedules, 1 for the others).
    """

    name: str = "1f1b"
    num_microbatches: int = 8
    num_chunks: int | None = None
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
