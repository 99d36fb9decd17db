"""What the ranks of a run execute, worked out once: schedules of every step, what is recomputed and what is offloaded.

Note [One plan for all steps]
A run has steps of several sizes: a batch that grows, documents, the evaluation. What layers recompute is built into
them, so there is one plan, which keeps every step within recompute.budget_bytes. The offload budget is one number of
bytes as well: offload.budget_share is of the peak of a step of schedule.num_microbatches, and a smaller step, which
holds less, moves less or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.devices import device_kind
from counterflow.framework.memory.offload import ActivationBudget, activation_budget, offloaded, too_small
from counterflow.framework.memory.recompute import (
    as_executed,
    peak_activation_bytes,
    recompute_plan,
    unit_bytes,
)
from counterflow.framework.planning.step_sizes import build_schedule, next_num_microbatches, step_sizes
from counterflow.models.recompute import Parts, plan_of
from counterflow.parallel.offload.plan import least_budget_bytes
from counterflow.parallel.pipeline.analysis.passes import forward_only
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.ir.offload_sizes import UnitBytes

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A config with the vocabulary that its run has and the device that its ranks compute on.

    It is a record: equal ones are the workload of equal runs. What follows from it is made when it is first asked for,
    and kept. device_type: None: as config.device says, which is looked up where it counts.
    """

    config: TrainConfig
    vocab_size: int
    device_type: DeviceType | None = None

    @classmethod
    def of(
        cls, config: TrainConfig, *, data_vocab_size: int | None = None, device_type: DeviceType | None = None
    ) -> Workload:
        """The workload of `config`: the vocabulary is the model's, else the data's.

        data_vocab_size: None: the data is not prepared yet, and what the tokenizer is asked for stands in for it.
        """
        vocab_size = config.model.vocab_size or data_vocab_size or config.expected_vocab_size
        return cls(config=config, vocab_size=vocab_size, device_type=device_type)

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the ranks compute on a CPU."""
        return (self.device_type or device_kind(self.config.device)) == "cpu"

    @cached_property
    def _next(self) -> dict[int, int]:
        return {}

    @cached_property
    def _named(self) -> dict[int, Schedule]:
        return {}

    @cached_property
    def _executed(self) -> dict[int, Schedule]:
        return {}

    @cached_property
    def _schedules(self) -> dict[int, Schedule]:
        return {}

    @property
    def full_size(self) -> int:
        """Micro-batches of a step of the full batch, and of an evaluation."""
        return self.config.schedule.num_microbatches

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of micro-batches that a step may have; see `step_sizes`.

        Raises ValueError: where the schedule does not take them.
        """
        return step_sizes(self.config, self.next_size)

    def next_size(self, at_least: int) -> int:
        """The least number of micro-batches, `at_least` or more, that the schedule takes.

        Raises ValueError: where it takes none of the next ones.
        """
        if at_least not in self._next:
            self._next[at_least] = next_num_microbatches(self.config, at_least)
        return self._next[at_least]

    def named(self, num_microbatches: int) -> Schedule:
        """The compute actions of the configured schedule in a step of this many micro-batches.

        Raises ValueError: where the schedule does not take them.
        """
        if num_microbatches not in self._named:
            counted = replace(self.config.schedule, num_microbatches=num_microbatches)
            self._named[num_microbatches] = build_schedule(counted, self.config.parallel)
        return self._named[num_microbatches]

    def executed(self, num_microbatches: int) -> Schedule:
        """What the ranks execute in a step of so many micro-batches, where everything stays in memory.

        Raises ValueError: where the schedule does not take them.
        """
        if num_microbatches not in self._executed:
            named = self.named(num_microbatches)
            self._executed[num_microbatches] = as_executed(self.config, named)
        return self._executed[num_microbatches]

    def schedule(self, num_microbatches: int) -> Schedule:
        """What the ranks execute in a step of so many micro-batches, proven.

        Raises ValueError: where the schedule does not take them, or the activations are more than their budget.
        """
        if num_microbatches not in self._schedules:
            made = self.offloaded(self.executed(num_microbatches))
            verify(made)
            self._schedules[num_microbatches] = made
        return self._schedules[num_microbatches]

    @cached_property
    def recompute_plan(self) -> dict[int, Parts]:
        """What each layer recomputes, in every step.

        Raises ValueError: where the budget of `auto` is less than recomputing everything needs.
        """
        if self.config.recompute.mode != "auto":
            return plan_of(self.config.recompute, self.config.model)
        others = [self.executed(size) for size in self.sizes if size != self.full_size]
        return recompute_plan(
            self.config,
            self.executed(self.full_size),
            vocab_size=self.vocab_size,
            on_cpu=self.on_cpu,
            others=others,
        )

    @cached_property
    def activation_budget(self) -> ActivationBudget | None:
        """What a rank may hold of activations, in every step; None: all that is made."""
        if not self.config.offload.is_active:
            return None
        return activation_budget(
            self.config,
            self.executed(self.full_size),
            self.recompute_plan,
            vocab_size=self.vocab_size,
            on_cpu=self.on_cpu,
        )

    def offloaded(self, schedule: Schedule) -> Schedule:
        """The lowered `schedule` with OFFLOAD and RELOAD; itself where everything stays.

        Raises ValueError: where a rank cannot keep within the budget.
        """
        return offloaded(self.config, schedule, self.activation_budget)

    def peak_activation_bytes(self, schedule: Schedule) -> tuple[int, ...]:
        """The most activation bytes of each pipeline rank in a step of `schedule`."""
        return peak_activation_bytes(
            self.config, schedule, self.recompute_plan, vocab_size=self.vocab_size, on_cpu=self.on_cpu
        )

    @property
    def unit_bytes(self) -> tuple[UnitBytes, ...]:
        """Of each stage, the activation bytes of one micro-batch."""
        return unit_bytes(
            self.config,
            self.executed(self.full_size),
            self.recompute_plan,
            vocab_size=self.vocab_size,
            on_cpu=self.on_cpu,
        )

    def check(self) -> None:
        """Make and prove all that the run may execute.

        Raises ValueError: where a step cannot be made, or cannot keep within a budget.
        """
        _ = self.recompute_plan
        budget, sizes = self.activation_budget, self.sizes
        if budget is not None:
            least = {size: least_budget_bytes(self.executed(size), budget.sizes) for size in sizes}
            if max(least.values()) > budget.budget_bytes:
                raise ValueError(self._too_small(budget, least))
        for size in sizes:
            self.schedule(size)
        if self.config.data.validation_batches:
            verify(forward_only(self.schedule(self.full_size)), forward_only=True)

    def _too_small(self, budget: ActivationBudget, least: dict[int, int]) -> str:
        """By the step that needs the most, so that what is advised is enough for all of them."""
        worst = max(least, key=lambda size: (least[size], size == self.full_size))
        step = "" if worst == self.full_size else f"in a step of {worst} micro-batches "
        return too_small(self.config, budget.budget_bytes, least[worst], step)
