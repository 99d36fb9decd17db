"""How many micro-batches each step has, and which samples of the stream they are (config node `training.batch_ramp`).

A run reads one endless stream of samples. A step takes the next ones, so where it starts follows from the sizes of
the steps before it: a batch may grow and no sample is repeated or left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRampConfig:
    """A batch that grows at the start of a run (Brown et al., arXiv 2005.14165, table 2.1 and appendix B).

    start_num_microbatches: of the first step; null: no ramp, every step has schedule.num_microbatches.
    increment: micro-batches that are added at a time, until there are schedule.num_microbatches.
    ramp_samples: over how many samples it grows, each size for as many of them.
    """

    start_num_microbatches: int | None = None
    increment: int = 1
    ramp_samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("start_num_microbatches", "increment", "ramp_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"training.batch_ramp.{name}={value}: set it to 1 or more")
        if (self.start_num_microbatches is None) != (self.ramp_samples is None):
            missing = "start_num_microbatches" if self.start_num_microbatches is None else "ramp_samples"
            raise ValueError(
                f"training.batch_ramp.{missing}=null: a ramp has a first number of micro-batches and a number of "
                "samples over which it grows; set start_num_microbatches and ramp_samples, or neither of them"
            )


class StepBatch(NamedTuple):
    """What a step reads: `num_samples` of the stream from `first_sample`, in so many micro-batches of every rank."""

    num_microbatches: int
    first_sample: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps of one size, up to the next phase."""

    first_step: int
    first_sample: int
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batch of every step, as a function of the step alone.

    num_microbatches: of a step after the ramp. samples_per_microbatch: over all data-parallel ranks.

    Raises ValueError: where the ramp does not lead from its start to num_microbatches.
    """

    num_microbatches: int
    samples_per_microbatch: int
    ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    phases: tuple[Phase, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self._phases()))

    def _phases(self) -> Iterator[Phase]:
        start, ramp_samples = self.ramp.start_num_microbatches, self.ramp.ramp_samples
        if start is None or ramp_samples is None:
            start, ramp_samples = self.num_microbatches, 0
        if start > self.num_microbatches or (self.num_microbatches - start) % self.ramp.increment:
            raise ValueError(
                f"training.batch_ramp.start_num_microbatches={start}: steps of increment={self.ramp.increment} do not "
                f"lead from it to schedule.num_microbatches={self.num_microbatches}; choose a start below it and an "
                "increment that divides the difference"
            )
        num_increments = (self.num_microbatches - start) // self.ramp.increment
        step = sample = 0
        for index in range(num_increments):
            count = start + index * self.ramp.increment
            # The first sample that belongs to the next size.
            end = -(-ramp_samples * (index + 1) // num_increments)
            if sample >= end:
                continue
            yield Phase(first_step=step, first_sample=sample, num_microbatches=count)
            size = count * self.samples_per_microbatch
            num_steps = -(-(end - sample) // size)
            step, sample = step + num_steps, sample + num_steps * size
        yield Phase(first_step=step, first_sample=sample, num_microbatches=self.num_microbatches)

    def at(self, step: int) -> StepBatch:
        """The batch of `step`, counted from 0."""
        phase = next(phase for phase in reversed(self.phases) if phase.first_step <= step)
        num_samples = phase.num_microbatches * self.samples_per_microbatch
        first_sample = phase.first_sample + (step - phase.first_step) * num_samples
        return StepBatch(phase.num_microbatches, first_sample, num_samples)

    def samples_before(self, step: int) -> int:
        """Samples that the steps before `step` read: where it starts in the stream."""
        return self.at(step).first_sample

    def batches_before(self, step: int) -> float:
        """The same, in batches of the size after the ramp: the measure by which learning rates go."""
        return self.samples_before(step) / (self.num_microbatches * self.samples_per_microbatch)
