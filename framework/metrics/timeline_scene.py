"""The picture of a timeline, laid out: measured above simulated on one scale, idle time by its cause.

`scene` decides where everything is; timeline_render.py makes SVG, PNG and an HTML page of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from counterflow.framework.metrics.timeline import Timeline
from counterflow.parallel.pipeline.analysis.draw import BACKGROUND, CHARACTER, COLOURS, FAINT, INK, MEANINGS
from counterflow.parallel.pipeline.ir.action import Kind, Schedule
from counterflow.parallel.pipeline.ir.trace import COMPUTE_ACTIVITIES, OTHER, Activity, exclusive

# Pixels of the SVG; the PNG takes the same geometry.
MIN_PLOT, MAX_PLOT, COMFORTABLE_ACTION = 900, 2200, 22
SHARES, GAP, MARGIN = 170, 28, 24
TITLE, HEADER, AXIS, LEGEND_ROW = 64, 24, 34, 22
MUTED = "#66707c"
WAIT_COLOURS = {
    Activity.RECEIVE_WAIT: "#f4d58a",
    Activity.SEND_WAIT: "#d3b4e6",
    Activity.GATHER_WAIT: "#c3b5e3",
    Activity.COLLECTIVE_WAIT: "#a5dcd6",
    Activity.EXPERT_WAIT: "#e58f84",
    Activity.OFFLOAD_WAIT: "#c9b79c",
    Activity.REDUCE: "#f0b3cc",
    Activity.OPTIMIZER: "#b4bcc8",
}
_WAIT_MEANINGS = {
    Activity.RECEIVE_WAIT: "receive wait",
    Activity.SEND_WAIT: "send wait",
    Activity.GATHER_WAIT: "gather wait (parameters)",
    Activity.COLLECTIVE_WAIT: "collective wait (gradient norm)",
    Activity.EXPERT_WAIT: "expert wait (tokens on their way, exposed)",
    Activity.OFFLOAD_WAIT: "offload wait (activations on their way)",
    Activity.REDUCE: "gradient reduction",
    Activity.OPTIMIZER: "optimizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle, in pixels. `on_scale`: it lies on the time axis, and zooming moves it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    hover: str = ""
    label: str = ""
    label_colour: str = "#ffffff"
    on_scale: bool = False

    @property
    def shows_label(self) -> bool:
        """Whether the label is there and fits."""
        return bool(self.label) and len(self.label) * CHARACTER + 2 <= self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """anchor: `start`, `middle` or `end`, as in SVG; y is the middle of the letters."""

    x: float
    y: float
    text: str
    size: float = 11
    anchor: str = "start"
    colour: str = INK
    is_bold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Where the rows of one panel are; `axis` is the y of its time axis."""

    top: float
    axis: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is drawn. A pixel of the plot is 1 / scale seconds; ticks are labelled in `unit`."""

    title: str
    width: float
    height: float
    left: float
    plot_width: float
    scale: float
    unit: str
    unit_s: float
    ticks: tuple[float, ...]
    panels: tuple[Panel, ...]
    grounds: tuple[Bar, ...]
    bars: tuple[Bar, ...]
    texts: tuple[Text, ...]


def scene(timeline: Timeline, run_name: str) -> Scene:
    """Lay out `timeline`. `run_name` goes into the title."""
    num_ranks = len(timeline.traces)
    row = 30.0 if num_ranks <= 16 else 18.0
    bar_height = row - 4
    labels = [_row_label(timeline, rank) for rank in range(num_ranks)]
    left = MARGIN + 10 + CHARACTER * max(map(len, labels))
    length = max(timeline.end_s, timeline.pipeline_start_s + timeline.simulation.makespan) or 1.0
    plot_width = _plot_width(timeline, length)
    scale = plot_width / length
    shares_x = left + plot_width + GAP
    unit, unit_s = next((u for u in (("s", 1.0), ("ms", 1e-3)) if length >= 2 * u[1]), ("µs", 1e-6))

    texts = [Text(x=MARGIN, y=20, text=_title(timeline, run_name), size=15, is_bold=True)]
    texts.append(Text(x=MARGIN, y=42, text=_subtitle(timeline, unit, unit_s), colour=MUTED))
    grounds: list[Bar] = []
    bars: list[Bar] = []
    panels: list[Panel] = []
    top = float(TITLE)
    headers = (
        f"measured ({timeline.clock.alignment})",
        "simulated: the same schedule at the mean cost of each stage and kind in this step, no communication",
    )
    rows = (_measured_rows(timeline), _simulated_rows(timeline))
    shares = (_measured_shares(timeline), _simulated_shares(timeline))
    for header, of_panel, of_shares in zip(headers, rows, shares, strict=True):
        texts.append(Text(x=left, y=top + 10, text=header, is_bold=True))
        texts.append(Text(x=shares_x, y=top + 10, text="share of the step", is_bold=True))
        top += HEADER
        for rank in range(num_ranks):
            y = top + rank * row
            grounds.append(Bar(x=left, y=y, width=plot_width, height=bar_height, fill=BACKGROUND))
            texts.append(Text(x=left - 10, y=y + bar_height / 2, text=labels[rank], anchor="end"))
            for piece in of_panel[rank]:
                bars.append(
                    Bar(
                        x=left + piece.start_s * scale,
                        y=y + piece.slot * bar_height / piece.num_slots,
                        width=(piece.end_s - piece.start_s) * scale,
                        height=bar_height / piece.num_slots,
                        fill=piece.fill,
                        hover=f"{piece.hover}\n{_span_text(piece, unit, unit_s)}",
                        label=piece.label,
                        label_colour=piece.label_colour,
                        on_scale=True,
                    )
                )
            x = shares_x
            for name, share, fill in of_shares[rank]:
                hover = f"{timeline.rank_name(rank)}: {name} {share:.1%}"
                bars.append(Bar(x=x, y=y, width=share * SHARES, height=bar_height, fill=fill, hover=hover))
                x += share * SHARES
        axis = top + num_ranks * row
        panels.append(Panel(top=top - 4, axis=axis))
        top = axis + AXIS
    entries = list(_legend(timeline))
    x, y = left, top + 4
    for fill, text in entries:
        width = 26 + len(text) * CHARACTER + 20
        if x + width > shares_x + SHARES:
            x, y = left, y + LEGEND_ROW
        grounds.append(Bar(x=x, y=y, width=20, height=14, fill=fill))
        texts.append(Text(x=x + 26, y=y + 7, text=text))
        x += width
    return Scene(
        title=_title(timeline, run_name),
        width=shares_x + SHARES + MARGIN,
        height=y + LEGEND_ROW + 14,
        left=left,
        plot_width=plot_width,
        scale=scale,
        unit=unit,
        unit_s=unit_s,
        ticks=tuple(_ticks(length / unit_s, plot_width / 80)),
        panels=tuple(panels),
        grounds=tuple(grounds),
        bars=tuple(bar for bar in bars if bar.width >= 0.15),
        texts=tuple(texts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A stretch of one row; a pair has two, one above the other."""

    start_s: float
    end_s: float
    fill: str
    hover: str
    label: str = ""
    label_colour: str = "#ffffff"
    slot: int = 0
    num_slots: int = 1


def _measured_rows(timeline: Timeline) -> list[list[_Piece]]:
    rows: list[list[_Piece]] = []
    for rank, trace in enumerate(timeline.traces):
        offset = timeline.clock.offsets_s[rank]
        row: list[_Piece] = []
        for interval in exclusive(trace.intervals):
            start, end = offset + interval.start_s, offset + interval.end_s
            if interval.activity in COMPUTE_ACTIVITIES:
                kind = Kind(interval.activity.value)
                hover = f"{interval.stage}{kind.value}{interval.microbatch}   {timeline.rank_name(rank)}"
                piece = _compute(timeline.schedule, rank, kind, interval.stage, interval.microbatch, hover)
                row.append(replace(piece, start_s=start, end_s=end))
            else:
                what = _WAIT_MEANINGS[interval.activity]
                where = f" of stage {interval.stage}" if interval.stage >= 0 else ""
                which = "" if interval.microbatch is None else f", micro-batch {interval.microbatch}"
                hover = f"{what}{where}{which}   {timeline.rank_name(rank)}"
                row.append(
                    _Piece(start_s=start, end_s=end, fill=WAIT_COLOURS[interval.activity], hover=hover)
                )
        rows.append(row)
    return rows


def _simulated_rows(timeline: Timeline) -> list[list[_Piece]]:
    rows: list[list[_Piece]] = [[] for _ in timeline.traces]
    origin = timeline.pipeline_start_s
    for interval in timeline.simulation.intervals:
        leaves = interval.action.leaves
        for slot, leaf in enumerate(leaves):
            hover = f"{interval.action}   {timeline.rank_name(interval.rank)}"
            piece = _compute(timeline.schedule, interval.rank, leaf.kind, leaf.stage, leaf.microbatch, hover)
            rows[interval.rank].append(
                replace(
                    piece,
                    start_s=origin + interval.start,
                    end_s=origin + interval.end,
                    slot=slot,
                    num_slots=len(leaves),
                )
            )
    return rows


def _compute(
    schedule: Schedule, rank: int, kind: Kind, stage: int, microbatch: int | None, hover: str
) -> _Piece:
    is_second = schedule.stages_of(rank).index(stage) % 2 == 1
    return _Piece(
        start_s=0.0,
        end_s=0.0,
        fill=_tint(COLOURS[kind]) if is_second else COLOURS[kind],
        hover=hover,
        label="" if microbatch is None else str(microbatch),
        label_colour=INK if is_second else "#ffffff",
    )


def _measured_shares(timeline: Timeline) -> list[list[tuple[str, float, str]]]:
    """(what, share, colour) of each rank, in the order of the categories."""
    fills = _category_fills()
    return [
        [
            (category.replace("_", " "), seconds / timeline.step_s, fills[category])
            for category, seconds in account.items()
        ]
        for account in timeline.accounts()
    ]


def _simulated_shares(timeline: Timeline) -> list[list[tuple[str, float, str]]]:
    """As measured, so that the bars compare: of the length of the measured step."""
    seconds: list[dict[Kind, float]] = [dict.fromkeys(MEANINGS, 0.0) for _ in timeline.traces]
    for interval in timeline.simulation.intervals:
        for leaf in interval.action.leaves:
            seconds[interval.rank][leaf.kind] += timeline.costs.of(leaf)
    idle = timeline.simulation.idle
    return [
        [(MEANINGS[kind], time / timeline.step_s, COLOURS[kind]) for kind, time in of_rank.items()]
        + [("idle", idle[rank] / timeline.step_s, FAINT)]
        for rank, of_rank in enumerate(seconds)
    ]


def _category_fills() -> dict[str, str]:
    fills = {activity.category: COLOURS[Kind(activity.value)] for activity in COMPUTE_ACTIVITIES}
    fills |= {activity.category: colour for activity, colour in WAIT_COLOURS.items()}
    return fills | {OTHER: FAINT}


def _legend(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """(colour, text) of what occurs."""
    accounts = timeline.accounts()
    fills = _category_fills()
    for activity in Activity:
        if any(account[activity.category] > 1e-4 * timeline.step_s for account in accounts):
            kind = Kind(activity.value) if activity in COMPUTE_ACTIVITIES else None
            text = _WAIT_MEANINGS[activity] if kind is None else f"{kind.value} {MEANINGS[kind]}"
            yield fills[activity.category], text
    yield FAINT, "other; simulated: idle"
    if any(len(timeline.schedule.stages_of(rank)) > 1 for rank in range(len(accounts))):
        yield _tint(COLOURS[Kind.F]), "lighter: the rank's second stage"


def _title(timeline: Timeline, run_name: str) -> str:
    schedule = timeline.schedule
    return (
        f"{run_name}, step {timeline.step + 1}: {schedule.name}, "
        f"{schedule.num_ranks} rank{'s' * (schedule.num_ranks > 1)}, {schedule.num_microbatches} micro-batches"
        + (f" ({timeline.which_pipeline})" if timeline.which_pipeline else "")
    )


def _subtitle(timeline: Timeline, unit: str, unit_s: float) -> str:
    simulation = timeline.simulation
    inflation = timeline.work_inflation
    return (
        f"bubble by makespan: measured {timeline.bubble_makespan:.1%}, simulated {simulation.bubble_makespan:.1%}"
        f"   ·   by span: measured {timeline.bubble_span:.1%}, simulated {simulation.bubble_span:.1%}"
        f"   ·   step {timeline.step_s / unit_s:.4g} {unit}, pipeline {timeline.makespan_s / unit_s:.4g} {unit}"
        + ("" if inflation is None else f"   ·   (I+W)/B {inflation:.2f}")
    )


def _row_label(timeline: Timeline, rank: int) -> str:
    """By the rank's number in the run, as in logs and error files."""
    stages, name = timeline.schedule.stages_of(rank), f"rank {timeline.global_ranks[rank]}"
    if stages == (timeline.global_ranks[rank],):
        return name
    return f"{name} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"


def _plot_width(timeline: Timeline, length: float) -> float:
    """Wide enough for a number in a typical action, within limits."""
    durations = sorted(interval.duration_s for trace in timeline.traces for interval in trace.compute)
    typical = durations[len(durations) // 4] if durations else length
    return min(max(COMFORTABLE_ACTION * length / max(typical, 1e-9), MIN_PLOT), MAX_PLOT)


def _ticks(length: float, most: float) -> Iterator[float]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to `length`, at most `most` of them."""
    step = 10.0 ** math.floor(math.log10(length / most))
    factor = next(f for f in (1, 2, 5, 10) if length / (f * step) <= most)
    for count in range(int(length / (factor * step)) + 1):
        yield round(count * factor * step, 9)


def _span_text(piece: _Piece, unit: str, unit_s: float) -> str:
    start, end = piece.start_s / unit_s, piece.end_s / unit_s
    return f"{start:.3f} to {end:.3f} {unit} ({end - start:.3f} {unit})"


def _tint(colour: str) -> str:
    channels = (int(colour[position : position + 2], 16) for position in (1, 3, 5))
    return "#" + "".join(f"{round(0.45 * channel + 0.55 * 255):02x}" for channel in channels)
