"""What rank 0 keeps of a run while it goes: a few numbers a step for the summary, and no record."""

from __future__ import annotations

import statistics
from array import array

from counterflow.framework.metrics.record import Bubbles, RunSummary, StepRecord


class RunningSummary:
    """Takes each record of a run and gives the summary of those so far.

    It keeps 16 bytes a step, for the medians of the rate and of the bubble, and the last values of everything else.
    """

    def __init__(self) -> None:
        self._tokens_per_s = array("d")
        self._bubbles = array("d")
        self._num_skipped = 0
        self._last_step = -1
        self._validation_loss: float | None = None
        self._final: tuple[float, float, float | None] | None = None
        self._is_of_skipped = False

    @property
    def num_records(self) -> int:
        """How many records were added."""
        return len(self._bubbles)

    @property
    def last_step(self) -> int:
        """The step of the last record, counted from 0; -1: there is none."""
        return self._last_step

    def add(self, record: StepRecord) -> None:
        """Count `record`, which follows the one before."""
        self._tokens_per_s.append(record.tokens_per_s)
        self._bubbles.append(record.bubble_measured)
        self._last_step, self._validation_loss = record.step, record.validation_loss
        is_skipped = record.skipped is not None
        self._num_skipped += is_skipped
        # The loss of a step that was skipped may be anything; it counts only while there is no other.
        if self._final is None or self._is_of_skipped or not is_skipped:
            self._final = (record.loss, record.bubble_simulated, record.bubble_formula)
            self._is_of_skipped = is_skipped

    def summary(
        self,
        *,
        run_dir: str,
        wandb_dir: str | None,
        seconds: float,
        kernels: dict[str, str],
        deterministic: bool = True,
        sink_failures: dict[str, str] | None = None,
    ) -> RunSummary:
        """The outcome of the run; rate and bubble are medians over its steps, the first left out if it can be."""
        assert self._final is not None, "no step has been recorded"
        loss, simulated, formula = self._final
        first = min(1, self.num_records - 1)
        return RunSummary(
            run_dir=run_dir,
            final_loss=loss,
            validation_loss=self._validation_loss,
            tokens_per_s=statistics.median(self._tokens_per_s[first:]),
            bubble=Bubbles(
                measured=statistics.median(self._bubbles[first:]), simulated=simulated, formula=formula
            ),
            wandb_dir=wandb_dir,
            steps=self._last_step + 1,
            seconds=seconds,
            num_skipped=self._num_skipped,
            kernels=kernels,
            deterministic=deterministic,
            sink_failures=sink_failures or {},
        )
