"""What a step and a run report: plain values, written as JSON lines and handed to every sink."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, over all ranks.

    step: its index, from 0. loss: mean over the valid tokens of the global batch. step_s: wall time.
    model_tflops_per_rank: model FLOPs, recomputation not counted, over step_s and the world size.
    mfu: over the device's peak; None where no peak is known.
    busy_s, idle_s: one value for each pipeline rank, the mean of its replicas (the ranks that differ in other axes).
    time_s: the account of the step: for each category of parallel.pipeline.trace.CATEGORIES one value for each
    pipeline rank, the mean of its replicas. Over the categories they add up to step_s; `other` includes what a
    rank's own step is shorter than that of the slowest rank.
    bubble_measured: idle / (busy + idle) over all pipeline ranks; bubble_simulated: the simulator's makespan
    bubble; bubble_formula: the published closed form, None where the schedule has none.
    bubble_measured_span, bubble_simulated_span: 1 - mean busy / longest span of a rank, from the start of its first
    action to the end of its last: the zero-bubble papers' definition (Qi et al., arXiv 2401.10241, section 5).
    work_inflation: (I + W) / B, the mean times of input and weight gradient over that of a whole backward,
    summed over the stages on which this step ran all three; None where none did.
    bytes_by_axis: bytes sent over each mesh axis by all ranks. peak_memory_bytes: the largest of any rank.
    peak_live_activations: micro-batches alive at once; peak_held_weight_grad_bytes: kept for deferred weight
    gradients; one value for each pipeline rank, the largest of its replicas.
    validation_loss: None where this step did not evaluate.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    num_tokens: int
    tokens_per_s: float
    samples_per_s: float
    model_tflops_per_rank: float
    mfu: float | None
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    time_s: dict[str, tuple[float, ...]]
    bubble_measured: float
    bubble_measured_span: float
    bubble_simulated: float
    bubble_simulated_span: float
    bubble_formula: float | None
    work_inflation: float | None
    bytes_by_axis: dict[str, int]
    peak_memory_bytes: int
    peak_live_activations: tuple[int, ...]
    peak_held_weight_grad_bytes: tuple[int, ...]
    validation_loss: float | None = None

    def to_json(self) -> str:
        """One line of JSON; values that are not finite are written as strings, which `from_json` reads back."""
        return _dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(line: str) -> StepRecord:
        """The inverse of `to_json`.

        Raises ValueError: where the line is not a step record, for example cut off in the middle.
        """
        try:
            values = json.loads(line)
            for name, value in values.items():
                values[name] = _read(value)
            return StepRecord(**values)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a step record ({error}): {line[:80]!r}") from None

    def scalars(self) -> dict[str, float]:
        """The record as flat numbers: `idle_s/rank_2`, `time_s/optimizer/rank_0`; what is None is left out.

        `time_share/<category>` is the share of all ranks' time, so that one chart shows where a step goes.
        """
        flat: dict[str, float] = {}
        for field in dataclasses.fields(self):
            if field.name != "step":
                flat |= dict(_flat(field.name, getattr(self, field.name)))
        for category, seconds in self.time_s.items():
            flat[f"time_share/{category}"] = sum(seconds) / (len(seconds) * self.step_s)
        return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubbles:
    """Share of the pipeline's time without work: as it was, as simulated, and by the published formula."""

    measured: float
    simulated: float
    formula: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The outcome of a run. seconds: wall time of its steps; wandb_dir: the offline folder, None without W&B."""

    run_dir: str
    final_loss: float
    validation_loss: float | None
    tokens_per_s: float
    bubble: Bubbles
    wandb_dir: str | None
    steps: int
    seconds: float

    def to_json(self) -> str:
        """One line of JSON."""
        return _dumps(dataclasses.asdict(self))


def _dumps(values: dict[str, Any]) -> str:
    return json.dumps({name: _plain(value) for name, value in values.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_read, value))
    if isinstance(value, dict):
        return {key: _read(each) for key, each in value.items()}
    return float(value) if isinstance(value, str) else value


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, tuple):
        value = {f"rank_{rank}": each for rank, each in enumerate(value)}
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{name}/{key}", each)
    elif value is not None:
        yield name, value
