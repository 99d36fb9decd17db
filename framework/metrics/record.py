"""What a step and a run report: plain values, written as JSON lines and handed to every sink."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, over all ranks.

    step: its index, from 0. loss: mean over the valid tokens of the global batch. step_s: wall time.
    model_tflops_per_rank: model FLOPs, recomputation not counted, over step_s and the world size.
    mfu: over the device's peak; None where no peak is known.
    busy_s, idle_s: one value for each pipeline rank, the slowest of its replicas.
    bubble_measured: idle / (busy + idle) over all pipeline ranks; bubble_simulated: the simulator's makespan
    bubble; bubble_formula: the published closed form, None where the schedule has none.
    bytes_by_axis: bytes sent over each mesh axis by all ranks. peak_memory_bytes: the largest of any rank.
    peak_live_activations: micro-batches alive at once, one value for each pipeline rank.
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
    bubble_measured: float
    bubble_simulated: float
    bubble_formula: float | None
    bytes_by_axis: dict[str, int]
    peak_memory_bytes: int
    peak_live_activations: tuple[int, ...]
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
                if isinstance(value, list):
                    values[name] = tuple(map(_number, value))
                elif not isinstance(value, dict):
                    values[name] = _number(value)
            return StepRecord(**values)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a step record ({error}): {line[:80]!r}") from None

    def scalars(self) -> dict[str, float]:
        """The record as flat numbers: `idle_s/rank_2`, `bytes_by_axis/tensor`; what is None is left out."""
        flat: dict[str, float] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "step" or value is None:
                continue
            if isinstance(value, tuple):
                flat |= {f"{field.name}/rank_{rank}": each for rank, each in enumerate(value)}
            elif isinstance(value, dict):
                flat |= {f"{field.name}/{key}": each for key, each in value.items()}
            else:
                flat[field.name] = value
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


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value
