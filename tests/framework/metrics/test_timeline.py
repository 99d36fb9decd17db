"""A timeline made by hand: its file, its trace for Perfetto, its pictures."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from counterflow.framework.metrics.perfetto import trace_events
from counterflow.framework.metrics.timeline import (
    Timeline,
    build_timeline,
    read_timeline,
    recorded_steps,
    step_name,
    to_json,
)
from counterflow.framework.metrics.timeline_render import to_html, to_svg, write_files
from counterflow.framework.metrics.timeline_scene import WAIT_COLOURS, scene
from counterflow.parallel.pipeline.analysis.draw import COLOURS
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.ir.trace import (
    COMPUTE_ACTIVITIES,
    Activity,
    Clock,
    CopyInterval,
    Interval,
    Trace,
)
from counterflow.parallel.pipeline.schedules.registry import generate

UNIT_S = 0.01
SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, num_ranks: int, num_microbatches: int) -> Timeline:
    """What ranks would measure that take UNIT_S for F, I and W each and wait in between, with a skew of 1 ms."""
    lowered = lower(generate(name, num_ranks, num_microbatches), zero_stage=0)
    traces: list[Trace] = []
    simulation = simulate(lowered, Costs(forward=UNIT_S, input_gradient=UNIT_S, weight_gradient=UNIT_S))
    for rank in range(num_ranks):
        intervals: list[Interval] = []
        clock = 0.0
        for action in (each for each in simulation.intervals if each.rank == rank):
            if action.start > clock + 1e-9:
                leaf = action.action.leaves[0]
                wait = Interval(Activity.RECEIVE_WAIT, leaf.stage, leaf.microbatch, clock, action.start)
                intervals.append(wait)
            start = action.start
            for leaf in action.action.leaves:
                length = UNIT_S * (2 if leaf.kind == "B" else 1)
                activity = Activity(leaf.kind.value)
                intervals.append(Interval(activity, leaf.stage, leaf.microbatch, start, start + length))
                start += length
            clock = action.end
        wait = Interval(Activity.COLLECTIVE_WAIT, -1, None, clock + 0.001, clock + 0.002)
        optimizer = Interval(Activity.OPTIMIZER, -1, None, clock, clock + 0.005)
        traces.append(
            Trace(
                start_s=1000.0 + rank / 1000,
                step_s=clock + 0.006,
                pipeline_end_s=clock,
                intervals=(*intervals, wait, optimizer),
                peak_live_activations=2,
            )
        )
    offsets = tuple(rank / 1000 for rank in range(num_ranks))
    return build_timeline(11, lowered, traces, range(num_ranks), Clock("by hand", offsets))


@pytest.fixture(params=[("1f1b", 4, 6), ("dualpipe", 4, 8), ("gpipe", 1, 3)], ids=str)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    return timeline_of(*request.param)


def test_the_simulation_takes_what_was_measured(timeline: Timeline) -> None:
    """At costs that are the same everywhere the simulated schedule is the measured one."""
    assert timeline.simulation.makespan == pytest.approx(timeline.makespan_s)
    assert timeline.bubble_makespan == pytest.approx(timeline.simulation.bubble_makespan)
    assert timeline.bubble_span == pytest.approx(timeline.simulation.bubble_span)
    if timeline.schedule.name == "1f1b":
        assert timeline.bubble_makespan == pytest.approx(3 / (6 + 3))
    # The hand-made W and I take a unit each and B two.
    assert timeline.work_inflation == (pytest.approx(1.0) if timeline.schedule.name == "dualpipe" else None)


def test_ranks_go_by_their_number_in_the_run_and_other_pipelines_are_told_of(timeline: Timeline) -> None:
    ranks = tuple(range(0, 2 * len(timeline.traces), 2))
    texts = [text.text for text in scene(replace(timeline, global_ranks=ranks, num_pipelines=2), "run").texts]
    assert any("(one of 2 pipelines)" in text for text in texts)
    for rank in ranks:
        assert any(re.match(rf"rank {rank}( |$)", text) for text in texts), rank
    assert not any("pipelines" in text.text for text in scene(timeline, "run").texts)


def test_accounts_add_up_to_the_step(timeline: Timeline) -> None:
    for account in timeline.accounts():
        assert sum(account.values()) == pytest.approx(timeline.step_s, abs=1e-6)
        assert min(account.values()) >= 0
        assert account["optimizer"] == pytest.approx(0.004)
        assert account["collective_wait"] == pytest.approx(0.001)


def test_the_file_reads_back(timeline: Timeline, tmp_path: Path) -> None:
    paths = write_files(timeline, tmp_path, ("json",))
    assert paths["json"] == tmp_path / "timeline" / "step-00000012.json"
    back = read_timeline(paths["json"])
    assert (back.schedule, back.global_ranks, back.clock) == (
        timeline.schedule,
        timeline.global_ranks,
        timeline.clock,
    )
    assert recorded_steps(tmp_path) == [11] == [back.step]
    for mine, theirs in zip(timeline.traces, back.traces, strict=True):
        assert len(mine.intervals) == len(theirs.intervals)
        for one, other in zip(mine.intervals, theirs.intervals, strict=True):
            assert one[:3] == other[:3]
            assert one[3:] == pytest.approx(other[3:], abs=1e-9)
    assert back.bubble_makespan == pytest.approx(timeline.bubble_makespan, abs=1e-6)
    # The simulated intervals are in the file too, for other readers.
    stored = json.loads(paths["json"].read_text())
    starts = [start for rank in stored["ranks"] for start, _ in rank["simulated"]]
    assert starts == [round(each.start * 1e9) for each in timeline.simulation.intervals]


def test_copies_of_activations_are_kept_and_drawn(tmp_path: Path) -> None:
    whole = timeline_of("1f1b", 2, 4)
    copies = (CopyInterval("OFFLOAD", 0, 1, 0.25, 0.5), CopyInterval("RELOAD", 0, 1, 0.5, 0.75))
    moved = replace(whole, traces=(replace(whole.traces[0], copies=copies), *whole.traces[1:]))
    path = tmp_path / "timeline.json"
    path.write_text(to_json(moved))
    assert read_timeline(path).traces[0].copies == copies
    events = [event for event in trace_events(moved)["traceEvents"] if event.get("cat") == "copy"]
    assert [(event["name"], event["dur"]) for event in events] == [
        ("OFFLOAD1", 250_000),
        ("RELOAD1", 250_000),
    ]
    assert events[0]["tid"] != events[1]["tid"]
    assert moved.traces[0].account() == whole.traces[0].account()


@pytest.mark.parametrize("damage", ["cut", "version", "other"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    text = to_json(timeline_of("1f1b", 2, 2))
    damaged = {"cut": text[:-40], "version": text.replace('"version":1', '"version":9'), "other": "[]"}[
        damage
    ]
    assert damaged != text
    (path := tmp_path / f"{step_name(0)}.json").write_text(damaged)
    with pytest.raises(ValueError, match="not a timeline of version 1"):
        read_timeline(path)


def test_perfetto_events_match(timeline: Timeline) -> None:
    values = json.loads(json.dumps(trace_events(timeline), allow_nan=False))
    events = values["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert len(names) == len(timeline.traces)
    slices: dict[str, list[dict[str, object]]] = defaultdict(list)
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[tracks[event["pid"], event["tid"]]].append(event)
            by_track[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    computed = [each for each in slices["measured"] if each["cat"] == "compute"]
    assert len(slices["measured"]) == sum(len(trace.intervals) for trace in timeline.traces)
    # The same actions ran on both tracks.
    assert sorted((each["pid"], each["name"]) for each in computed) == sorted(
        (each["pid"], each["name"]) for each in slices["simulated"]
    )
    for track, spans in by_track.items():
        for before, after in pairwise(sorted(spans, key=lambda span: (span[0], -span[1]))):
            apart = before[1] <= after[0] + 0.002
            assert apart or after[1] <= before[1] + 0.002, f"slices cross on {tracks[track]}"
    # Arrows: one end each, forwards in time, on a slice.
    ends: dict[int, dict[str, dict[str, float]]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
    schedule = timeline.schedule
    crossings = sum(
        schedule.rank_of(stage, microbatch) != schedule.rank_of(stage + 1, microbatch)
        for stage in range(schedule.num_stages - 1)
        for microbatch in range(schedule.num_microbatches)
    )
    assert len(ends) == 2 * crossings
    for pair in ends.values():
        assert set(pair) == {"s", "f"}
        assert pair["s"]["pid"] != pair["f"]["pid"]
    counters = [event for event in events if event["ph"] == "C"]
    assert counters[-1]["args"]["micro-batches"] == 0
    assert max(event["args"]["micro-batches"] for event in counters) <= 6


def test_the_svg_shows_every_action_twice(timeline: Timeline) -> None:
    drawn = scene(timeline, "a <run> & more")
    root = ElementTree.fromstring(to_svg(drawn))
    assert "a <run> & more" in (root.findtext(f"{SVG}title") or "")
    fills = [rect.get("fill") for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    waits = sum(
        interval.activity is Activity.RECEIVE_WAIT
        for trace in timeline.traces
        for interval in trace.intervals
    )
    on_scale = [bar for bar in drawn.bars if bar.on_scale]
    assert sum(bar.fill == WAIT_COLOURS[Activity.RECEIVE_WAIT] for bar in on_scale) == waits
    num_compute = sum(
        interval.activity in COMPUTE_ACTIVITIES for trace in timeline.traces for interval in trace.intervals
    )
    assert sum(bar.label != "" for bar in on_scale) == 2 * num_compute
    assert len(fills) == len(drawn.bars)
    assert COLOURS["F"] in fills
    right = drawn.left + drawn.plot_width
    for bar in on_scale:
        assert drawn.left - 0.01 <= bar.x
        assert bar.x + bar.width <= right + 0.01
    # Each row's bars of shares are as long as the step.
    shares = defaultdict(float)
    for bar in drawn.bars:
        if not bar.on_scale:
            shares[bar.y] += bar.width
    assert max(shares.values()) == pytest.approx(170, rel=1e-3)


def test_the_page_needs_no_network(timeline: Timeline) -> None:
    page = to_html(scene(timeline, "run"))
    assert page.count("</svg>") == 1
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "{" in page
    assert "{{" not in page
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def test_the_png_shows_the_colours(timeline: Timeline, tmp_path: Path) -> None:
    path = write_files(timeline, tmp_path, ("png",))["png"]
    pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    for colour in (COLOURS["F"], COLOURS["B"], WAIT_COLOURS[Activity.OPTIMIZER]):
        rgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
        assert (np.abs(pixels - rgb).max(axis=1) <= 2).sum() > 100, colour


def in_slices(timeline: Timeline) -> Timeline:
    """The same step with every F and B in three slices, an exposed wait before the last."""
    traces: list[Trace] = []
    for trace in timeline.traces:
        intervals: list[Interval] = []
        for each in trace.intervals:
            if each.activity not in (Activity.FORWARD, Activity.BACKWARD):
                intervals.append(each)
                continue
            third = each.duration_s / 3
            first = each._replace(end_s=each.start_s + third)
            wait = each._replace(
                activity=Activity.EXPERT_WAIT, start_s=each.start_s + 2 * third, end_s=each.end_s - third / 2
            )
            middle = each._replace(start_s=first.end_s, end_s=wait.start_s)
            intervals += [first, middle, wait, each._replace(start_s=wait.end_s)]
        traces.append(replace(trace, intervals=tuple(intervals)))
    return replace(timeline, traces=tuple(traces))


def test_slices_are_drawn_and_counted_as_one_action(tmp_path: Path) -> None:
    whole = timeline_of("dualpipe", 4, 8)
    sliced = in_slices(whole)
    events, expected = (json.loads(json.dumps(trace_events(each)))["traceEvents"] for each in (sliced, whole))

    def counters(of: list[dict[str, Any]]) -> list[tuple[int, float, int]]:
        return [
            (each["pid"], round(each["ts"]), each["args"]["micro-batches"])
            for each in of
            if each["ph"] == "C"
        ]

    assert counters(events) == counters(expected)
    for phase, pick in (("s", max), ("f", min)):
        found = {each["id"]: each["ts"] for each in events if each["ph"] == phase}
        before = {each["id"]: each["ts"] for each in expected if each["ph"] == phase}
        assert found.keys() == before.keys()
        # An arrow leaves the last slice and comes to the first: within a slice of where it did.
        assert all(abs(found[key] - before[key]) < 1e6 * UNIT_S for key in found), pick
    drawn = scene(sliced, "run")
    waits = [bar for bar in drawn.bars if bar.on_scale and bar.fill == WAIT_COLOURS[Activity.EXPERT_WAIT]]
    halves = sum(
        each.activity in (Activity.FORWARD, Activity.BACKWARD)
        for trace in whole.traces
        for each in trace.intervals
    )
    assert len(waits) == halves
    assert any("exposed" in text.text for text in drawn.texts)
    write_files(sliced, tmp_path, ("json",))
