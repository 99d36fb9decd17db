"""The measured timeline of one step beside the simulated one: built from traces, written, read back.

The ranks of one of the run's pipelines are shown: those whose coordinate on every other axis is 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterflow.parallel.pipeline.analysis.simulate import Costs, Simulation, simulate
from counterflow.parallel.pipeline.ir.action import COMPUTE, Schedule
from counterflow.parallel.pipeline.ir.text import from_csv, to_csv
from counterflow.parallel.pipeline.ir.trace import (
    OTHER,
    Activity,
    Clock,
    CopyInterval,
    Interval,
    Trace,
    mean_seconds,
)

FORMAT, VERSION = "counterflow-timeline", 1
FOLDER = "timeline"
_COSTS = ("forward", "input_gradient", "weight_gradient", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of one pipeline; tuples have an entry for each pipeline rank.

    step: counted from 0. schedule: as it ran, its compute actions alone.
    traces: what each rank measured; its times start at its own `clock.offsets_s`. clock: the common one.
    costs: seconds, the mean of each kind on each stage. simulation: the same schedule at them, without communication.
    num_pipelines: how many ran side by side.
    """

    step: int
    schedule: Schedule
    global_ranks: tuple[int, ...]
    clock: Clock
    traces: tuple[Trace, ...]
    costs: Costs
    simulation: Simulation
    num_pipelines: int = 1

    def rank_name(self, rank: int) -> str:
        """Pipeline rank `rank` by its number in the run; both numbers where they differ."""
        name = f"rank {self.global_ranks[rank]}"
        return name if rank == self.global_ranks[rank] else f"{name}, pipeline rank {rank}"

    @property
    def which_pipeline(self) -> str:
        """`one of 4 pipelines`; empty where there is one only."""
        return f"one of {self.num_pipelines} pipelines" if self.num_pipelines > 1 else ""

    @property
    def step_s(self) -> float:
        return max(trace.step_s for trace in self.traces)

    @property
    def makespan_s(self) -> float:
        """The longest time of any rank from its first action to the end of its last gradient reduction."""
        return max(trace.pipeline_s for trace in self.traces)

    @property
    def pipeline_start_s(self) -> float:
        """When the first rank began the schedule, on the common clock."""
        return min(
            offset + trace.pipeline_start_s
            for offset, trace in zip(self.clock.offsets_s, self.traces, strict=True)
        )

    @property
    def end_s(self) -> float:
        """When the last rank ended the step, on the common clock."""
        return max(
            offset + trace.step_s for offset, trace in zip(self.clock.offsets_s, self.traces, strict=True)
        )

    @property
    def bubble_makespan(self) -> float:
        """1 - mean busy time / makespan."""
        return 1 - self._mean_busy_s / self.makespan_s

    @property
    def bubble_span(self) -> float:
        """1 - mean busy time / longest span, as in the zero-bubble papers (see `Simulation.bubble_span`)."""
        return 1 - self._mean_busy_s / max(trace.span_s for trace in self.traces)

    @property
    def _mean_busy_s(self) -> float:
        return sum(trace.busy_s for trace in self.traces) / len(self.traces)

    @property
    def work_inflation(self) -> float | None:
        """(I + W) / B over the stages that ran all three; None where none did."""
        found = [inflation for trace in self.traces if (inflation := trace.inflation()) is not None]
        if not found:
            return None
        return sum(each.split_s for each in found) / sum(each.whole_s for each in found)

    def accounts(self) -> tuple[dict[str, float], ...]:
        """Seconds in each category, rank by rank; each adds up to `step_s`.

        What a rank's own step is shorter than that of the slowest rank is `other`.
        """
        accounts = [trace.account() for trace in self.traces]
        return tuple(
            account | {OTHER: account[OTHER] + self.step_s - trace.step_s}
            for account, trace in zip(accounts, self.traces, strict=True)
        )


def build_timeline(
    step: int,
    schedule: Schedule,
    traces: Sequence[Trace],
    global_ranks: Sequence[int],
    clock: Clock,
    *,
    num_pipelines: int = 1,
) -> Timeline:
    """The timeline of the lowered `schedule` that ran as `traces`, in the order of pipeline ranks."""
    compute = schedule.with_actions(
        [action for action in actions if action.kind in COMPUTE] for actions in schedule.actions
    )
    costs = measured_costs(traces, schedule.num_stages)
    return Timeline(
        step=step,
        schedule=compute,
        global_ranks=tuple(global_ranks),
        clock=clock,
        traces=tuple(traces),
        costs=costs,
        simulation=simulate(compute, costs),
        num_pipelines=num_pipelines,
    )


def measured_costs(traces: Sequence[Trace], num_stages: int) -> Costs:
    """The mean of each kind on each stage, in seconds; 0 for a kind that did not run, but B is then I + W.

    A pair takes the sum of its halves.
    """
    means = mean_seconds(traces)

    def of(activity: Activity) -> tuple[float, ...]:
        return tuple(means.get((activity, stage), 0.0) for stage in range(num_stages))

    split = tuple(map(sum, zip(of(Activity.INPUT_GRADIENT), of(Activity.WEIGHT_GRADIENT), strict=True)))
    return Costs(
        forward=of(Activity.FORWARD),
        input_gradient=of(Activity.INPUT_GRADIENT),
        weight_gradient=of(Activity.WEIGHT_GRADIENT),
        backward=tuple(whole or sum_ for whole, sum_ in zip(of(Activity.BACKWARD), split, strict=True)),
    )


def step_name(step: int) -> str:
    """The name of the files of `step`, without suffix. It counts from 1, as the console and checkpoints do."""
    return f"step-{step + 1:08d}"


def recorded_steps(run_dir: Path) -> list[int]:
    """The steps, counted from 0, of the run in `run_dir` that have a timeline, ascending."""
    paths = (run_dir / FOLDER).glob("step-*.json")
    return sorted(int(path.stem[5:]) - 1 for path in paths if path.stem[5:].isdigit())


def to_json(timeline: Timeline) -> str:
    """The timeline as one JSON object; times are whole nanoseconds.

    An interval is [activity, stage, micro-batch, start, end], the activity by its index in `activities`, times
    from the start of the step on its rank. A copy of offloaded activations is [kind, stage, micro-batch, start, end].
    A simulated action is [start, end], in the order of the schedule's row, from the start of the pipeline. `costs` has
    a time for each stage.
    """
    activities = list(Activity)
    schedule = timeline.schedule
    simulated: list[list[list[int]]] = [[] for _ in timeline.traces]
    for interval in timeline.simulation.intervals:
        simulated[interval.rank].append([_ns(interval.start), _ns(interval.end)])
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "step": timeline.step,
            "schedule": {
                "name": schedule.name,
                "placement": schedule.placement,
                "actions": to_csv(schedule, compute_only=True).splitlines(),
            },
            "num_pipelines": timeline.num_pipelines,
            "alignment": timeline.clock.alignment,
            "activities": [activity.value for activity in activities],
            "costs": {name: [_ns(time) for time in getattr(timeline.costs, name)] for name in _COSTS},
            "ranks": [
                {
                    "global_rank": global_rank,
                    "offset": _ns(offset),
                    "start_s": trace.start_s,
                    "step": _ns(trace.step_s),
                    "pipeline": [_ns(trace.pipeline_start_s), _ns(trace.pipeline_end_s)],
                    "peak_live_activations": trace.peak_live_activations,
                    "peak_held_weight_grad_bytes": trace.peak_held_weight_grad_bytes,
                    "measured": [
                        [
                            activities.index(interval.activity),
                            interval.stage,
                            interval.microbatch,
                            _ns(interval.start_s),
                            _ns(interval.end_s),
                        ]
                        for interval in trace.intervals
                    ],
                    "copies": [
                        [copy.kind, copy.stage, copy.microbatch, _ns(copy.start_s), _ns(copy.end_s)]
                        for copy in trace.copies
                    ],
                    "simulated": simulated[rank],
                }
                for rank, (global_rank, offset, trace) in enumerate(
                    zip(timeline.global_ranks, timeline.clock.offsets_s, timeline.traces, strict=True)
                )
            ],
        },
        separators=(",", ":"),
    )


def read_timeline(path: Path) -> Timeline:
    """The timeline that `to_json` wrote to `path`; its simulation is run again.

    Raises ValueError: where the file is none, or was written in another version of the format.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT or values["version"] != VERSION:
            raise ValueError(f"format {values['format']}, version {values['version']}")
        activities = [Activity(value) for value in values["activities"]]
        schedule = from_csv(
            "\n".join(values["schedule"]["actions"]),
            tuple(map(tuple, values["schedule"]["placement"])),
            name=values["schedule"]["name"],
        )
        costs = Costs(**{name: _seconds(values["costs"][name]) for name in _COSTS})
        ranks = values["ranks"]
        return Timeline(
            step=values["step"],
            schedule=schedule,
            global_ranks=tuple(rank["global_rank"] for rank in ranks),
            clock=Clock(values["alignment"], tuple(rank["offset"] / 1e9 for rank in ranks)),
            traces=tuple(_trace(rank, activities) for rank in ranks),
            costs=costs,
            simulation=simulate(schedule, costs),
            num_pipelines=values.get("num_pipelines", 1),
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a timeline of version {VERSION} of this format ({type(error).__name__}: {error}); "
            "train again to write one"
        ) from None


def _trace(rank: Mapping[str, Any], activities: Sequence[Activity]) -> Trace:
    return Trace(
        start_s=rank["start_s"],
        step_s=rank["step"] / 1e9,
        pipeline_start_s=rank["pipeline"][0] / 1e9,
        pipeline_end_s=rank["pipeline"][1] / 1e9,
        intervals=tuple(
            Interval(activities[activity], stage, microbatch, start / 1e9, end / 1e9)
            for activity, stage, microbatch, start, end in rank["measured"]
        ),
        copies=tuple(
            CopyInterval(kind, stage, microbatch, start / 1e9, end / 1e9)
            for kind, stage, microbatch, start, end in rank.get("copies", ())
        ),
        peak_live_activations=rank["peak_live_activations"],
        peak_held_weight_grad_bytes=rank["peak_held_weight_grad_bytes"],
    )


def _seconds(times_ns: Sequence[int]) -> Any:
    return tuple(time / 1e9 for time in times_ns)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
