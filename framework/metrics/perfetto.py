"""A timeline in the trace event format, which ui.perfetto.dev and chrome://tracing open.

Source: "Trace Event Format", Google, the document that Chrome's tracing links to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from counterflow.framework.metrics.timeline import Timeline
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.ir.trace import COMPUTE_ACTIVITIES, Activity, CopyInterval, Interval

MEASURED, SIMULATED, COPIES = 1, 2, 3


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """A process for each pipeline rank with the tracks `measured` and under it `simulated`.

    Where activations are offloaded, their copies have a track of their own in each direction.

    Arrows lead from the action that sends an activation or a gradient to the one that uses it; a counter shows
    the live activations. The simulated schedule starts where the first rank began the measured one.
    """
    events: list[dict[str, Any]] = []
    for rank, trace in enumerate(timeline.traces):
        stages = ", ".join(map(str, timeline.schedule.stages_of(rank)))
        name = f"pipeline rank {rank}: stages {stages} (rank {timeline.global_ranks[rank]})"
        events.append(_metadata("process_name", rank, name=name))
        events.append(_metadata("process_sort_index", rank, sort_index=rank))
        for track, title in ((MEASURED, "measured"), (SIMULATED, "simulated")):
            events.append(_metadata("thread_name", rank, track, name=title))
            events.append(_metadata("thread_sort_index", rank, track, sort_index=track))
        offset = timeline.clock.offsets_s[rank]
        events += [_event(rank, interval, offset) for interval in trace.intervals]
        events += _live_activations(rank, trace.intervals, offset)
        events += _copies(rank, trace.copies, offset)
    events += _flows(timeline)
    origin = timeline.pipeline_start_s
    for interval in timeline.simulation.intervals:
        length = (interval.end - interval.start) / len(interval.action.leaves)
        for position, leaf in enumerate(interval.action.leaves):
            events.append(
                {
                    "ph": "X",
                    "name": f"{leaf.kind.value}{leaf.microbatch}",
                    "cat": "simulated",
                    "pid": _pid(interval.rank),
                    "tid": _tid(interval.rank, SIMULATED),
                    "ts": _us(origin + interval.start + position * length),
                    "dur": _us(length),
                    "args": {"action": str(interval.action), "stage": leaf.stage},
                }
            )
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": timeline.schedule.name,
            "step": timeline.step,
            "alignment": timeline.clock.alignment,
        },
        "traceEvents": events,
    }


def _event(rank: int, interval: Interval, offset: float) -> dict[str, Any]:
    is_compute = interval.activity in COMPUTE_ACTIVITIES
    args = {"stage": interval.stage, "microbatch": interval.microbatch}
    return {
        "ph": "X",
        "name": f"{interval.activity.value}{interval.microbatch}"
        if is_compute
        else interval.activity.category.replace("_", " "),
        "cat": "compute" if is_compute else "wait",
        "pid": _pid(rank),
        "tid": _tid(rank, MEASURED),
        "ts": _us(offset + interval.start_s),
        "dur": _us(interval.duration_s),
        "args": {key: value for key, value in args.items() if value is not None and value >= 0},
    }


def _copies(rank: int, copies: Sequence[CopyInterval], offset: float) -> Iterator[dict[str, Any]]:
    kinds = dict.fromkeys(copy.kind for copy in copies)
    tracks = {kind: COPIES + index for index, kind in enumerate(sorted(kinds))}
    for kind, track in tracks.items():
        yield _metadata("thread_name", rank, track, name=kind)
        yield _metadata("thread_sort_index", rank, track, sort_index=track)
    for copy in copies:
        yield {
            "ph": "X",
            "name": f"{copy.kind}{copy.microbatch}",
            "cat": "copy",
            "pid": _pid(rank),
            "tid": _tid(rank, tracks[copy.kind]),
            "ts": _us(offset + copy.start_s),
            "dur": _us(copy.end_s - copy.start_s),
            "args": {"stage": copy.stage, "microbatch": copy.microbatch},
        }


def _live_activations(rank: int, intervals: tuple[Interval, ...], offset: float) -> Iterator[dict[str, Any]]:
    live = 0
    ends = {
        (each.activity, each.stage, each.microbatch): each for each in intervals
    }  # the last slice of each
    for interval in sorted(ends.values(), key=lambda each: each.end_s):
        if interval.activity is Activity.FORWARD:
            live += 1
        elif interval.activity in (Activity.BACKWARD, Activity.INPUT_GRADIENT):
            live -= 1
        else:
            continue
        yield {
            "ph": "C",
            "name": "live activations",
            "pid": _pid(rank),
            "ts": _us(offset + interval.end_s),
            "args": {"micro-batches": live},
        }


def _flows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """An arrow for each activation and gradient that crossed ranks."""
    first: dict[tuple[Kind, int, int], tuple[int, Interval]] = {}  # the first and the last slice of each
    last: dict[tuple[Kind, int, int], tuple[int, Interval]] = {}
    for rank, trace in enumerate(timeline.traces):
        for interval in trace.intervals:
            if interval.activity in COMPUTE_ACTIVITIES and interval.activity is not Activity.WEIGHT_GRADIENT:
                is_forward = interval.activity is Activity.FORWARD
                assert interval.microbatch is not None
                key = (Kind.F if is_forward else Kind.B, interval.stage, interval.microbatch)
                first.setdefault(key, (rank, interval))
                last[key] = (rank, interval)
    for number, ((kind, stage, microbatch), (rank, sent)) in enumerate(sorted(last.items())):
        receiver = first.get((kind, stage + (1 if kind is Kind.F else -1), microbatch))
        if receiver is None or receiver[0] == rank:
            continue
        name = "activation" if kind is Kind.F else "gradient"
        for phase, (holder, interval), time in (
            # Just inside the two slices, for an arrow is bound to the slice it lies in.
            ("s", (rank, sent), sent.end_s - sent.duration_s / 100),
            ("f", receiver, receiver[1].start_s + receiver[1].duration_s / 100),
        ):
            yield {
                "ph": phase,
                "id": number,
                "name": name,
                "cat": "transfer",
                "pid": _pid(holder),
                "tid": _tid(holder, MEASURED),
                "ts": _us(timeline.clock.offsets_s[holder] + time),
                **({"bp": "e"} if phase == "f" else {}),
                "args": {"stage": interval.stage},
            }


def _metadata(kind: str, rank: int, track: int | None = None, **args: Any) -> dict[str, Any]:
    where = {"pid": _pid(rank)} | ({} if track is None else {"tid": _tid(rank, track)})
    return {"ph": "M", "name": kind, **where, "args": args}


def _pid(rank: int) -> int:
    return rank + 1  # Perfetto keeps process 0 for the idle task


def _tid(rank: int, track: int) -> int:
    return 100_000 * track + _pid(rank)  # no process id: a thread of that number would be its main thread


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
