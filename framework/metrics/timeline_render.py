"""The files of a timeline: its data, a trace for Perfetto, and the scene as SVG, PNG and an HTML page with zoom."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from counterflow.framework.metrics.perfetto import trace_events
from counterflow.framework.metrics.timeline import FOLDER, Timeline, step_name, to_json
from counterflow.framework.metrics.timeline_scene import MUTED, Bar, Scene, Text, scene
from counterflow.parallel.pipeline.analysis.draw import CHARACTER, FAINT

FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"


def write_files(timeline: Timeline, run_dir: Path, kinds: Iterable[str]) -> dict[str, Path]:
    """Write the timeline into `run_dir`/timeline as each of `kinds`; their paths.

    json: what `read_timeline` reads. trace: for ui.perfetto.dev. svg, png, html: the picture; html zooms.
    """
    stem = run_dir / FOLDER / step_name(timeline.step)
    stem.parent.mkdir(parents=True, exist_ok=True)
    drawn = scene(timeline, run_dir.name)
    paths: dict[str, Path] = {}
    for kind in kinds:
        paths[kind] = path = stem.parent / f"{stem.name}.{'trace.json' if kind == 'trace' else kind}"
        if kind == "png":
            write_png(drawn, path)
        else:
            path.write_text(_text_of(kind, timeline, drawn), encoding="utf-8")
    return paths


def _text_of(kind: str, timeline: Timeline, drawn: Scene) -> str:
    if kind == "json":
        return to_json(timeline) + "\n"
    if kind == "trace":
        return json.dumps(trace_events(timeline), separators=(",", ":")) + "\n"
    return to_html(drawn) if kind == "html" else to_svg(drawn)


def to_svg(drawn: Scene, *, for_page: bool = False) -> str:
    """The scene as an SVG with hover titles. `for_page`: labels that fit only after zooming in are there, hidden."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawn.width:.0f}" height="{drawn.height:.0f}" '
        f'viewBox="0 0 {drawn.width:.0f} {drawn.height:.0f}" font-family={quoteattr(FONT)} font-size="11">',
        f"<title>{escape(drawn.title)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<defs><clipPath id="plot"><rect x="{drawn.left:.1f}" y="0" width="{drawn.plot_width:.1f}" '
        f'height="{drawn.height:.0f}"/></clipPath></defs>',
    ]
    parts += [_rect(bar) for bar in drawn.grounds]
    parts.append('<g id="ticks">')
    for panel in drawn.panels:
        for tick in drawn.ticks:
            x = drawn.left + tick * drawn.unit_s * drawn.scale
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{panel.top:.1f}" y2="{panel.axis:.1f}" stroke="{FAINT}"/>'
                f'<text x="{x:.1f}" y="{panel.axis + 14:.1f}" text-anchor="middle" fill="{MUTED}">{tick:g}</text>'
            )
    parts.append("</g>")
    for panel in drawn.panels:
        parts.append(
            f'<text x="{drawn.left - 10:.1f}" y="{panel.axis + 14:.1f}" text-anchor="end" fill="{MUTED}">'
            f"{drawn.unit}</text>"
        )
    parts.append('<g clip-path="url(#plot)" stroke="#fff" stroke-width=".6">')
    parts += [_rect(bar) for bar in drawn.bars if bar.on_scale]
    parts.append('</g><g id="labels" clip-path="url(#plot)" text-anchor="middle" pointer-events="none">')
    for bar in drawn.bars:
        if bar.shows_label or (bar.label and for_page):
            size = "" if bar.height > 15 else ' font-size="9"'
            hidden = "" if bar.shows_label else ' display="none"'
            width = f' data-w="{bar.width:.2f}"' if for_page else ""
            parts.append(
                f'<text x="{bar.x + bar.width / 2:.2f}" y="{bar.y + bar.height / 2 + 3.8:.1f}" '
                f'fill="{bar.label_colour}"{size}{hidden}{width}>{escape(bar.label)}</text>'
            )
    parts.append("</g>")
    parts += [_rect(bar) for bar in drawn.bars if not bar.on_scale]
    for text in drawn.texts:
        weight = ' font-weight="600"' if text.is_bold else ""
        size = "" if text.size == 11 else f' font-size="{text.size:g}"'
        parts.append(
            f'<text x="{text.x:.1f}" y="{text.y + text.size * 0.35:.1f}" text-anchor="{text.anchor}" '
            f'fill="{text.colour}"{size}{weight}>{escape(text.text)}</text>'
        )
    parts.append("</svg>\n")
    return "\n".join(parts)


def write_png(drawn: Scene, path: Path, *, dpi: int = 150) -> None:
    """The scene as a PNG, `dpi` / 100 of its pixels to one of the SVG."""
    # Imported here: it takes half a second that a rank without a picture should not pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(drawn.width / 100, drawn.height / 100), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawn.width)
    axes.set_ylim(drawn.height, 0)
    axes.axis("off")
    points = 0.72

    def rectangles(bars: Sequence[Bar], line: float, order: float) -> None:
        corners = [
            (
                (bar.x, bar.y),
                (bar.x + bar.width, bar.y),
                (bar.x + bar.width, bar.y + bar.height),
                (bar.x, bar.y + bar.height),
            )
            for bar in bars
        ]
        fills = [bar.fill for bar in bars]
        axes.add_collection(
            PolyCollection(corners, facecolors=fills, edgecolors="white", linewidths=line, zorder=order)
        )

    def text(entry: Text) -> None:
        axes.text(
            entry.x,
            entry.y,
            entry.text,
            fontsize=entry.size * points,
            color=entry.colour,
            ha={"start": "left", "middle": "center", "end": "right"}[entry.anchor],
            va="center",
            weight="bold" if entry.is_bold else "normal",
            zorder=4,
        )

    rectangles(drawn.grounds, 0, 0)
    lines: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for panel in drawn.panels:
        text(Text(x=drawn.left - 10, y=panel.axis + 10, text=drawn.unit, anchor="end", colour=MUTED))
        for tick in drawn.ticks:
            x = drawn.left + tick * drawn.unit_s * drawn.scale
            lines.append(((x, panel.top), (x, panel.axis)))
            text(Text(x=x, y=panel.axis + 10, text=f"{tick:g}", anchor="middle", colour=MUTED))
    axes.add_collection(LineCollection(lines, colors=FAINT, linewidths=0.6, zorder=1))
    # A white line around a box narrower than itself would leave nothing of it.
    rectangles([bar for bar in drawn.bars if bar.width >= 3], 0.4, 3)
    rectangles([bar for bar in drawn.bars if bar.width < 3], 0, 2)
    for entry in drawn.texts:
        text(entry)
    for bar in drawn.bars:
        if bar.shows_label:
            size = 11 if bar.height > 15 else 9
            x, y = bar.x + bar.width / 2, bar.y + bar.height / 2 + 0.5
            text(Text(x=x, y=y, text=bar.label, size=size, anchor="middle", colour=bar.label_colour))
    figure.savefig(path, dpi=dpi)


def _rect(bar: Bar) -> str:
    title = f"<title>{escape(bar.hover)}</title>" if bar.hover else ""
    return (
        f'<rect x="{bar.x:.2f}" y="{bar.y:.1f}" width="{bar.width:.2f}" height="{bar.height:.1f}" '
        f'fill="{bar.fill}">{title}</rect>'
    )


def to_html(drawn: Scene) -> str:
    """One page with the SVG: the wheel zooms the time axis, dragging moves it, a box under the pointer explains."""
    data = {
        "left": drawn.left,
        "width": drawn.plot_width,
        "scale": drawn.scale * drawn.unit_s,
        "panels": [[panel.top, panel.axis] for panel in drawn.panels],
        "character": CHARACTER,
        "faint": FAINT,
        "muted": MUTED,
    }
    return _PAGE.format(
        title=escape(drawn.title),
        svg=to_svg(drawn, for_page=True),
        data=json.dumps(data),
        script=_SCRIPT,
    )


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ margin: 16px; font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; color: #1f2933 }}
svg {{ cursor: grab; touch-action: none; user-select: none; max-width: none }}
g[clip-path] rect:hover {{ stroke: #1f2933; stroke-width: 1 }}
#tip {{ position: fixed; display: none; padding: 6px 9px; border-radius: 4px; background: #1f2933; color: #fff;
  white-space: pre; pointer-events: none; font-size: 12px; z-index: 1 }}
#help {{ color: #66707c }}
</style>
</head>
<body>
<p id="help">wheel: zoom the time axis &nbsp; drag: move &nbsp; double click: whole step &nbsp; pointer on a box:
what it is</p>
{svg}
<div id="tip"></div>
<script>const scene = {data};
{script}</script>
</body>
</html>
"""

_SCRIPT = """\
const svg = document.querySelector('svg'), tip = document.getElementById('tip');
const groups = svg.querySelectorAll('g[clip-path]'), ticks = document.getElementById('ticks');
for (const text of svg.querySelectorAll('title')) {  // the browser's own hover box comes late
  text.parentNode.hover = text.textContent;
  text.remove();
}
svg.hover = '';
const bars = [...groups[0].children].map(node => (
  {node, x: +node.getAttribute('x'), w: +node.getAttribute('width')}
));
const labels = [...groups[1].children].map(node => ({
  node, x: +node.getAttribute('x'), w: +node.dataset.w, need: node.textContent.length * scene.character + 2,
}));
let zoom = 1, start = 0;  // `start`: pixels of the unzoomed plot left of the view

function place(x) { return scene.left + (x - scene.left - start) * zoom; }
function draw() {
  for (const {node, x, w} of bars) {
    node.setAttribute('x', place(x).toFixed(2));
    node.setAttribute('width', (w * zoom).toFixed(2));
  }
  for (const {node, x, w, need} of labels) {
    node.setAttribute('x', place(x).toFixed(2));
    node.setAttribute('display', w * zoom >= need ? 'inline' : 'none');
  }
  const length = scene.width / scene.scale / zoom, first = start / scene.scale;
  const rough = length / (scene.width / 80), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(f => f * power >= rough);
  let marks = '';
  for (const [top, axis] of scene.panels) {
    for (let n = Math.ceil(first / step); n * step <= first + length; n += 1) {
      const x = place(scene.left + n * step * scene.scale).toFixed(1), time = +(n * step).toPrecision(9);
      marks += `<line x1="${x}" x2="${x}" y1="${top}" y2="${axis}" stroke="${scene.faint}"/>` +
        `<text x="${x}" y="${axis + 14}" text-anchor="middle" fill="${scene.muted}">${time}</text>`;
    }
  }
  ticks.innerHTML = marks;
}
function clamp() { start = Math.max(0, Math.min(start, scene.width - scene.width / zoom)); }
svg.addEventListener('wheel', event => {
  event.preventDefault();
  const x = event.clientX - svg.getBoundingClientRect().left - scene.left, under = start + x / zoom;
  zoom = Math.max(1, Math.min(zoom * Math.exp(-event.deltaY / 400), 5000));
  start = under - x / zoom;
  clamp(); draw();
}, {passive: false});
svg.addEventListener('dblclick', () => { zoom = 1; start = 0; draw(); });
svg.addEventListener('pointermove', event => {
  if (event.buttons) {
    start -= event.movementX / zoom;
    clamp(); draw();
  }
  const hover = event.target.hover;
  tip.style.display = hover ? 'block' : 'none';
  if (hover) {
    tip.textContent = hover;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + 'px';
  }
});
svg.addEventListener('pointerleave', () => { tip.style.display = 'none'; });
"""
