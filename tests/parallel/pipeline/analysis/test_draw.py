"""The drawings: a box for every action, in its place, as SVG that parses and PNG that opens."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from counterflow.parallel.pipeline.analysis.draw import timeline_png, timeline_svg
from counterflow.parallel.pipeline.analysis.simulate import Costs, Interval, simulate
from counterflow.parallel.pipeline.ir.action import Action
from counterflow.parallel.pipeline.schedules.registry import generate

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[tuple[float, float, float, str, str]]:
    """(x, y, width, fill, hover title) of every action's rectangle."""
    return [
        (
            float(rect.get("x", "nan")),
            float(rect.get("y", "nan")),
            float(rect.get("width", "nan")),
            rect.get("fill", ""),
            title.text or "",
        )
        for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None
    ]


def test_every_action_has_its_box() -> None:
    schedule = generate("dualpipe", 4, 10)
    simulation = simulate(schedule, Costs(pair=2.0))
    drawn = boxes(timeline_svg(simulation.intervals, schedule=schedule, title="a < b & c"))
    leaves = [leaf for interval in simulation.intervals for leaf in interval.action.leaves]
    assert len(drawn) == len(leaves) == 4 * 10 * 2 + sum(str(leaf)[1] == "W" for leaf in leaves)
    # Boxes of one row touch where the rank is busy and leave the bubble free, to scale.
    first = {y: min(x for x, row, *_ in drawn if row == y) for y in {row for _, row, *_ in drawn}}
    scale = drawn[0][2] / 1.0
    top = sorted(first)[0]
    width = sum(width for _, row, width, *_ in drawn if row == top)
    assert width == pytest.approx(simulation.busy[0] * scale, rel=1e-3)
    fills = {fill for *_, fill, title in drawn if title.startswith("0F0 ")}
    mirrored = {fill for *_, fill, title in drawn if title.startswith("0F5 ")}
    assert len(fills) == len(mirrored) == 1
    assert fills != mirrored


def test_hover_tells_action_rank_and_time() -> None:
    schedule = generate("1f1b", 2, 2)
    svg = timeline_svg(simulate(schedule, Costs()).intervals, schedule=schedule, title="t", unit="ms")
    titles = [" ".join(title.split()) for *_, title in boxes(svg)]
    assert "1F0 rank 1 1 to 2" in titles
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"t", "ms", "rank 0", "rank 1", "F forward", "B backward"} <= set(texts)
    assert "W weight gradient" not in texts


def test_a_measured_timeline_starts_at_its_first_action() -> None:
    schedule = generate("gpipe", 1, 1)
    intervals = [
        Interval(rank=0, action=Action.parse("0F0"), start=1000.5, end=1000.502),
        Interval(rank=0, action=Action.parse("0B0"), start=1000.503, end=1000.507),
        Interval(rank=0, action=Action.parse("0REDUCE_GRAD"), start=1000.507, end=1000.507),
    ]
    svg = timeline_svg(intervals, schedule=schedule, title="measured", unit="s")
    forward, backward, _ = boxes(svg)
    assert backward[2] == pytest.approx(2 * forward[2], rel=1e-3)
    assert "other" in svg


def test_numbers_are_left_out_where_they_do_not_fit() -> None:
    schedule = generate("1f1b", 8, 512)
    svg = timeline_svg(simulate(schedule, Costs()).intervals, schedule=schedule, title="wide")
    numbers = [e.text for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if e.get("fill") == "#ffffff"]
    assert numbers == []
    assert float(ElementTree.fromstring(svg).get("width", "0")) < 4000


def test_nothing_to_draw() -> None:
    schedule = generate("1f1b", 2, 2)
    assert boxes(timeline_svg([], schedule=schedule, title="empty")) == []


def test_png_shows_the_colours(tmp_path: Path) -> None:
    schedule = generate("dualpipe", 4, 8)
    path = tmp_path / "timeline.png"
    timeline_png(simulate(schedule, Costs()).intervals, path, schedule=schedule, title="dualpipe", dpi=100)
    image = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    colours = {tuple(colour) for colour in np.unique(image.reshape(-1, 3), axis=0).tolist()}
    svg = timeline_svg(simulate(schedule, Costs()).intervals, schedule=schedule, title="dualpipe")
    for *_, fill, _title in boxes(svg):
        assert tuple(int(fill[i : i + 2], 16) for i in (1, 3, 5)) in colours
