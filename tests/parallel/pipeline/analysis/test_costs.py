"""Costs, their profile file, and what the config makes of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from counterflow.parallel.pipeline.analysis.cost_profile import (
    CostProfile,
    Link,
    StageCost,
    load_profile,
    save_profile,
)
from counterflow.parallel.pipeline.analysis.costs import Costs, costs_from
from counterflow.parallel.pipeline.analysis.simulate import simulate
from counterflow.parallel.pipeline.config import CostsConfig
from counterflow.parallel.pipeline.ir.action import Action
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.parallel.pipeline.analysis.test_passes import parse

PROFILE = CostProfile(
    stages=tuple(
        StageCost(
            forward_s=float(n),
            input_gradient_s=2.0 * n,
            weight_gradient_s=n / 2,
            backward_s=2.25 * n,
            recompute_s=0.25,
            parameter_bytes=100 * n,
        )
        for n in (1, 2, 3, 4)
    ),
    activation_bytes=(10, 20, 30),
    link=Link(latency_s=0.5, bandwidth_bytes_per_s=100.0),
    links=((0, 1, Link(latency_s=2.0)),),
    provenance={"model": "m", "machine": "x", "date": "2026-01-31"},
)


def test_times_of_actions() -> None:
    costs = Costs(
        forward=(1.0, 2.0),
        input_gradient=3.0,
        weight_gradient=(1.0, 5.0),
        recompute=(0.0, 0.5),
        pair_overlap=0.5,
    )
    times = {"0F0": 1, "1F3": 2, "0I0": 3, "1I0": 3.5, "1W0": 5, "0B0": 4, "1B0": 8.5}
    assert {text: costs.of(Action.parse(text)) for text in times} == times
    pair = Action.parse("(1F6;0B5)OVERLAP_F_B")
    assert costs.of(pair) == 2 + 4 - 0.5 * 2
    assert Costs(pair_overlap=1.0, forward=9.0).of(pair) == 9  # the longer half alone
    assert Costs(pair_overlap=-0.5).of(pair) == 3.5  # contention
    assert Costs(pair=7.0, pair_overlap=1.0).of(pair) == 7
    assert Costs(backward=1.5, recompute=1.0).of(Action.parse("0B0")) == 2.5


def test_the_formula_takes_every_cost() -> None:
    """Two stages of F = 1 and 3, B = 2 after half a unit of recomputation: (PP-1)(F+B) = 2 + 2.5."""
    costs = Costs(forward=(1.0, 3.0), backward=2.0, recompute=0.5)
    formula = generated_schedules()["1f1b"].bubble(2, 4, costs)
    assert formula is not None
    assert formula.idle == 4.5
    pairs = generated_schedules()["dualpipe"].bubble(4, 8, Costs(pair_overlap=1.0))
    assert pairs is not None
    assert pairs.idle == 2 + 2 - 3


def test_which_link() -> None:
    costs = Costs(
        latency_s=1.0,
        ranks_per_node=2,
        between_nodes=Link(latency_s=5.0, bandwidth_bytes_per_s=3.0),
        links=((1, 2, Link(latency_s=9.0)),),
    )
    assert costs.link(0, 1) == Link(latency_s=1.0)
    assert costs.link(2, 1).latency_s == 5
    assert costs.link(1, 2).latency_s == 9
    assert Costs(latency_s=1.0).link(1, 2).latency_s == 1


def test_links_and_boundaries_in_time() -> None:
    """Boundary 0 has 4 bytes at 2 bytes/s; boundary 1 has 9 bytes at 3 bytes/s between nodes, 10 s under way."""
    schedule = parse("0F0 0B0", "1F0 1B0", "2F0 2B0", placement=((0, 1, 2),), microbatches=1)
    costs = Costs(
        message_bytes=(4.0, 9.0),
        bandwidth_bytes_per_s=2.0,
        ranks_per_node=2,
        between_nodes=Link(latency_s=10.0, bandwidth_bytes_per_s=3.0),
    )
    ends = {str(i.action): i.end for i in simulate(schedule, costs).intervals}
    assert ends == {
        "0F0": 1,
        "1F0": 1 + 2 + 1,
        "2F0": 4 + 3 + 10 + 1,
        "2B0": 20,
        "1B0": 20 + 3 + 10 + 2,
        "0B0": 35 + 2 + 2,
    }


def test_a_link_is_shared_by_the_boundaries_that_cross_it() -> None:
    """Rank 1 sends the gradients of two boundaries to rank 0: the second waits for the first."""
    schedule = parse(
        "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1", "1F0 1B0 1F1 1B1", placement=((0, 1, 0),), microbatches=2
    )
    costs = Costs(message_bytes=8.0, bandwidth_bytes_per_s=1.0)
    starts = {str(i.action): i.start for i in simulate(schedule, costs).intervals}
    assert starts["1F0"] == 1 + 8
    assert starts["2F0"] == 10 + 8
    assert starts["1B0"] == 21 + 8
    assert starts["0B0"] == 31 + 8


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]
    content = json.loads(path.read_text())
    assert (content["version"], content["provenance"]["date"]) == (1, "2026-01-31")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2: must be .*, version 1"),
        ({"format": None}, "format None"),
        ({"stages": []}, "0 stages and 3 activation_bytes"),
        ({"stages": 3}, "stages is int, not a list"),
        ({"activation_bytes": [1, 2]}, "n stages have n - 1 boundaries"),
        ({"activation_bytes": [1, -2, 3]}, r"activation_bytes\[1\]=-2: must be a number, 0 or above"),
        ({"link": None}, "link is missing, not an object"),
        ({"link": {"latency": 3}}, "link.latency: there is no such field; link has latency_s"),
        ({"links": [{"source": 0}]}, r"links\[0\].target=None"),
    ],
)
def test_a_profile_that_is_not_one(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message) as error:
        load_profile(path)
    assert str(path) in str(error.value)
    assert "counterflow profile" in str(error.value)


def test_a_stage_without_its_time(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    content = json.loads(path.read_text())
    del content["stages"][2]["backward_s"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"stages\[2\].backward_s is missing"):
        load_profile(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_profile(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_profile(tmp_path / "none.json")


def test_costs_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    costs = costs_from(CostsConfig(profile=str(path), latency_s=0.125, pair=3.0), 4)
    assert costs.forward == (1, 2, 3, 4)
    assert costs.of(Action.parse("1B0")) == 4.5 + 0.25
    assert costs.bytes_at(2) == 30
    assert costs.link(2, 3) == Link(latency_s=0.125, bandwidth_bytes_per_s=100)  # what is set, and the rest
    assert costs.link(0, 1).latency_s == 2
    assert costs.pair == 3


def test_a_profile_of_twice_the_stages_is_merged(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    costs = costs_from(CostsConfig(profile=str(path)), 2)
    assert (costs.forward, costs.weight_gradient, costs.message_bytes) == ((3, 7), (1.5, 3.5), (20,))
    with pytest.raises(ValueError, match="costs of 4 stages, and the schedule has 3"):
        costs_from(CostsConfig(profile=str(path)), 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"profile": "p.json", "forward": 2.0}, "schedule.costs.forward=2.0 would say another thing"),
        ({"profile": "p.json", "message_bytes": 2.0}, "leave out one of them"),
        ({"forward": (1.0, 0.0)}, "schedule.costs.forward=0.0: a cost is a positive time"),
        ({"recompute": -1.0}, "recompute=-1.0: set it to 0 or above"),
        ({"pair_overlap": 1.5}, "set it to 1 at most"),
        ({"bandwidth_bytes_per_s": 5.0}, "needs the size of a message"),
        ({"bandwidth_bytes_per_s": 0.0, "message_bytes": 1.0}, "link without limit"),
        ({"ranks_per_node": 0}, "a node has a rank"),
    ],
)
def test_refused_costs(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostsConfig(**values)


def test_costs_of_another_number_of_stages() -> None:
    with pytest.raises(ValueError, match=r"forward=\[1.0, 2.0\]: 2 values, and the schedule has 3 stages"):
        costs_from(CostsConfig(forward=(1.0, 2.0)), 3)
    with pytest.raises(ValueError, match="the schedule has 2 boundaries"):
        simulate(generate("1f1b", 3, 3), Costs(message_bytes=(1.0,)))
