"""Draw a timeline, simulated or measured: one row per rank, as SVG with hover titles and as PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from counterflow.parallel.pipeline.analysis.simulate import Interval
from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule

# Sizes in pixels of the SVG; the PNG takes the same geometry at 100 pixels per inch.
ROW = 30
BAR = 26
RIGHT, TOP, BOTTOM = 24, 52, 62
MIN_WIDTH, MAX_WIDTH = 640, 2600
COMFORTABLE_ACTION = 24
CHARACTER = 6.2

INK = "#1f2933"
FAINT = "#d5dae1"
BACKGROUND = "#f3f5f8"
COLOURS = {Kind.F: "#2f6db5", Kind.B: "#d9772b", Kind.I: "#b8433f", Kind.W: "#3d8b5f"}
OTHER = "#8a94a3"
MEANINGS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of the drawing, in pixels; `label` is empty where it does not fit."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    text_colour: str
    label: str
    hover: str


def timeline_svg(intervals: Sequence[Interval], *, schedule: Schedule, title: str, unit: str = "") -> str:
    """The timeline as the text of an SVG file.

    intervals: from a simulation or a measurement; the earliest start is time 0.
    unit: of the times, printed on the axis.
    """
    frame = _frame(intervals, schedule)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{frame.width:.0f}" height="{frame.height:.0f}" '
        f'viewBox="0 0 {frame.width:.0f} {frame.height:.0f}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="11">',
        f"<style>.b{{shape-rendering:crispEdges;stroke:#fff;stroke-width:{frame.gap:.2f}}}.n{{text-anchor:middle;pointer-events:none}}"
        f".t{{fill:{INK}}}.g{{stroke:{FAINT};shape-rendering:crispEdges}}.b:hover{{stroke:{INK}}}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="t" x="{frame.left:.1f}" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for rank in range(schedule.num_ranks):
        y = TOP + rank * ROW
        parts.append(
            f'<rect x="{frame.left:.1f}" y="{y}" width="{frame.plot_width:.1f}" height="{BAR}" fill="{BACKGROUND}"/>'
            f'<text class="t" x="{frame.left - 10:.1f}" y="{y + BAR / 2 + 4}" text-anchor="end">'
            f"{escape(_row_label(schedule, rank))}</text>"
        )
    for time in frame.ticks:
        x = frame.x(time)
        parts.append(
            f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{frame.axis}"/>'
            f'<text class="t n" x="{x:.1f}" y="{frame.axis + 14}">{time:g}</text>'
        )
    if unit:
        parts.append(
            f'<text class="t" x="{frame.left - 10:.1f}" y="{frame.axis + 14}" text-anchor="end">{escape(unit)}</text>'
        )
    for box in _boxes(intervals, schedule, frame):
        parts.append(
            f'<rect class="b" x="{box.x:.2f}" y="{box.y:.1f}" width="{box.width:.2f}" height="{box.height:.1f}" '
            f'fill="{box.fill}"><title>{escape(box.hover)}</title></rect>'
        )
        if box.label:
            size = "" if box.height > BAR / 2 else ' font-size="9.5"'
            parts.append(
                f'<text class="n" x="{box.x + box.width / 2:.2f}" y="{box.y + box.height / 2 + 3.6:.1f}" '
                f'fill="{box.text_colour}"{size}>{box.label}</text>'
            )
    for swatches, label, x in _legend(intervals, schedule, frame.left):
        y = frame.height - 24
        for row, colour in enumerate(swatches):
            height = 14 / len(swatches)
            parts.append(
                f'<rect class="b" x="{x:.1f}" y="{y + row * height:.1f}" width="22" height="{height:.1f}" '
                f'fill="{colour}"/>'
            )
        parts.append(f'<text class="t" x="{x + 28:.1f}" y="{y + 11}">{escape(label)}</text>')
    parts.append("</svg>\n")
    return "\n".join(parts)


def timeline_png(
    intervals: Sequence[Interval],
    path: Path,
    *,
    schedule: Schedule,
    title: str,
    unit: str = "",
    dpi: int = 150,
) -> None:
    """The same drawing as `timeline_svg`, written to `path` as PNG."""
    # Imported here: it takes half a second that a rank or a command without a picture should not pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    frame = _frame(intervals, schedule)
    figure: Any = Figure(figsize=(frame.width / 100, frame.height / 100), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, frame.width)
    axes.set_ylim(frame.height, 0)
    axes.axis("off")
    points = 0.72  # of the SVG's pixels

    def text(x: float, y: float, label: str, size: float = 11, **options: Any) -> None:
        options = {"color": INK, "va": "center", "ha": "left"} | options
        axes.text(x, y, label, fontsize=size * points, **options)

    def rectangles(
        corners: list[tuple[float, float, float, float]], fills: Sequence[str], line: float
    ) -> None:
        polygons = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in corners]
        axes.add_collection(
            PolyCollection(polygons, facecolors=fills, edgecolors="white", linewidths=line, zorder=2)
        )

    text(frame.left, 20, title, 15, weight="bold")
    for rank in range(schedule.num_ranks):
        y = TOP + rank * ROW
        axes.add_patch(
            Rectangle((frame.left, y), frame.plot_width, BAR, color=BACKGROUND, linewidth=0, zorder=0)
        )
        text(frame.left - 10, y + BAR / 2, _row_label(schedule, rank), ha="right")
    for time in frame.ticks:
        axes.plot((frame.x(time),) * 2, (TOP - 6, frame.axis), color=FAINT, linewidth=0.7, zorder=1)
        text(frame.x(time), frame.axis + 10, f"{time:g}", ha="center")
    if unit:
        text(frame.left - 10, frame.axis + 10, unit, ha="right")
    corners: list[tuple[float, float, float, float]] = []
    fills: list[str] = []
    for box in _boxes(intervals, schedule, frame):
        corners.append((box.x, box.y, box.width, box.height))
        fills.append(box.fill)
        if box.label:
            size = 11 if box.height > BAR / 2 else 9.5
            x, y = box.x + box.width / 2, box.y + box.height / 2
            text(x, y + 0.5, box.label, size, ha="center", color=box.text_colour, va="center_baseline")
    rectangles(corners, fills, points * frame.gap)
    for swatches, label, x in _legend(intervals, schedule, frame.left):
        height = 14 / len(swatches)
        y = frame.height - 24
        rectangles([(x, y + row * height, 22, height) for row in range(len(swatches))], swatches, points)
        text(x + 28, y + 7, label)
    figure.savefig(path, dpi=dpi)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where time and ranks lie on the drawing; `gap` is the white line around a box."""

    start: float
    scale: float
    left: float
    plot_width: float
    num_ranks: int
    gap: float
    ticks: tuple[float, ...]

    @property
    def width(self) -> float:
        return self.left + self.plot_width + RIGHT

    @property
    def axis(self) -> float:
        return TOP + self.num_ranks * ROW

    @property
    def height(self) -> float:
        return self.axis + BOTTOM

    def x(self, time: float) -> float:
        """Of a time since the first start."""
        return self.left + time * self.scale


def _frame(intervals: Sequence[Interval], schedule: Schedule) -> _Frame:
    """Wide enough for a number in the shortest action, within limits."""
    start = min((interval.start for interval in intervals), default=0.0)
    total = max((interval.end for interval in intervals), default=1.0) - start or 1.0
    shortest = min((length for i in intervals if (length := i.end - i.start) > 0), default=total)
    plot_width = min(max(COMFORTABLE_ACTION * total / shortest, MIN_WIDTH), MAX_WIDTH)
    step = _tick_step(total, plot_width / 80)
    ticks = tuple(round(count * step, 12) for count in range(int(total / step + 1e-9) + 1))
    return _Frame(
        start=start,
        scale=plot_width / total,
        left=28 + CHARACTER * max(len(_row_label(schedule, rank)) for rank in range(schedule.num_ranks)),
        plot_width=plot_width,
        num_ranks=schedule.num_ranks,
        gap=min(1.0, plot_width * schedule.num_ranks / max(1, len(intervals)) / 8),
        ticks=ticks,
    )


def _tick_step(total: float, most: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `total` into at most `most` parts."""
    step = 10.0**-12
    while True:
        for factor in (1, 2, 5):
            if total / (factor * step) <= most:
                return factor * step
        step *= 10


def _boxes(intervals: Sequence[Interval], schedule: Schedule, frame: _Frame) -> Iterator[Box]:
    """A box per action; a pair is its forward above its backward, at the same time."""
    for interval in intervals:
        leaves = interval.action.leaves
        x = frame.x(interval.start - frame.start)
        width = max((interval.end - interval.start) * frame.scale, 0.2)
        height = BAR / len(leaves)
        for row, leaf in enumerate(leaves):
            direction = _direction(schedule, leaf)
            label = "" if leaf.microbatch is None else str(leaf.microbatch)
            yield Box(
                x=x,
                y=TOP + interval.rank * ROW + row * height,
                width=width,
                height=height,
                fill=_fill(leaf.kind, direction),
                text_colour=INK if direction else "#ffffff",
                label=label if len(label) * CHARACTER + 3 <= width else "",
                hover=f"{interval.action}   rank {interval.rank}   "
                f"{interval.start - frame.start:g} to {interval.end - frame.start:g}",
            )


def _direction(schedule: Schedule, leaf: Action) -> int:
    return 0 if leaf.microbatch is None else schedule.direction_of(leaf.microbatch)


def _fill(kind: Kind, direction: int) -> str:
    """The kind's colour; direction 1 is a tint of it."""
    colour = COLOURS.get(kind, OTHER)
    if direction == 0:
        return colour
    channels = (int(colour[position : position + 2], 16) for position in (1, 3, 5))
    return "#" + "".join(f"{round(0.45 * channel + 0.55 * 255):02x}" for channel in channels)


def _row_label(schedule: Schedule, rank: int) -> str:
    stages = schedule.stages_of(rank)
    if stages == (rank,):
        return f"rank {rank}"
    return f"rank {rank} (stages {', '.join(map(str, stages))})" if stages else f"rank {rank}"


def _legend(
    intervals: Sequence[Interval], schedule: Schedule, left: float
) -> Iterator[tuple[tuple[str, ...], str, float]]:
    """(colours from top to bottom, label, x) of each entry."""
    kinds = {leaf.kind for interval in intervals for leaf in interval.action.leaves}
    entries: list[tuple[tuple[str, ...], str]] = [
        ((_fill(kind, 0),), f"{kind.value} {meaning}") for kind, meaning in MEANINGS.items() if kind in kinds
    ]
    if any(interval.action.parts for interval in intervals):
        entries.append(((_fill(Kind.F, 0), _fill(Kind.B, 0)), "overlapped pair"))
    if kinds - MEANINGS.keys():
        entries.append(((OTHER,), "other"))
    if schedule.num_directions > 1:
        entries.append(((_fill(Kind.F, 1),), "lighter: direction 1"))
    x = left
    for swatches, label in entries:
        yield swatches, label, x
        x += 28 + len(label) * CHARACTER + 22
