"""The simulator against published values, closed forms and a slow simulation written apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.parallel.offload.plan import add_offload
from counterflow.parallel.pipeline.analysis.copy_timing import CopyModel
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.simulate import Costs, costs_from, simulate
from counterflow.parallel.pipeline.analysis.verify import ScheduleError, verify
from counterflow.parallel.pipeline.config import CostsConfig
from counterflow.parallel.pipeline.ir.action import Kind, Schedule
from counterflow.parallel.pipeline.ir.offload_sizes import UnitBytes
from counterflow.parallel.pipeline.schedules.registry import bubble_formula, generate, generated_schedules
from tests.parallel.pipeline.analysis.test_passes import parse
from tests.parallel.pipeline.schedules.test_registry import fitting_sizes


@pytest.mark.parametrize(
    ("pair", "makespan", "idle"),
    [(3.0, 66, (6,) * 8), (None, 66, (6,) * 8), (2.0, 52, (1, 2, 3, 3, 3, 3, 2, 1))],
)
def test_golden_dualpipe(pair: float | None, makespan: float, idle: tuple[int, ...]) -> None:
    simulation = simulate(generate("dualpipe", 8, 20), Costs(pair=pair))
    assert simulation.makespan == makespan
    assert simulation.idle == idle
    assert simulation.peak_activations == (9,) * 8


@pytest.mark.parametrize(("name", "bubble"), [("1f1b", 21 / 117), ("gpipe", 21 / 117), ("dualpipe", 6 / 102)])
def test_golden_bubbles_of_32_microbatches(name: str, bubble: float) -> None:
    """.180 and .059, at F=I=W=1 on 8 ranks."""
    simulation = simulate(generate(name, 8, 32), Costs())
    assert simulation.bubble_makespan == pytest.approx(bubble)
    formula = generated_schedules()[name].bubble(8, 32, Costs())
    assert formula is not None
    assert formula.fraction == pytest.approx(simulation.bubble_makespan, rel=1e-12)
    assert formula.idle == pytest.approx(simulation.idle[0])


@given(
    num_ranks=st.integers(1, 8),
    extra=st.integers(0, 8),
    forward=st.integers(1, 5),
    backward=st.integers(2, 9),
)
@settings(max_examples=40, deadline=None)
def test_the_formula_of_1f1b_is_exact_for_equal_stages(
    num_ranks: int, extra: int, forward: int, backward: int
) -> None:
    costs = Costs(forward=float(forward), input_gradient=1.0, weight_gradient=float(backward - 1))
    microbatches = num_ranks + extra
    for name in ("1f1b", "gpipe"):
        simulation = simulate(generate(name, num_ranks, microbatches), costs)
        assert simulation.makespan == (microbatches + num_ranks - 1) * (forward + backward)
        formula = generated_schedules()[name].bubble(num_ranks, microbatches, costs)
        assert formula is not None
        assert simulation.idle == pytest.approx((formula.idle,) * num_ranks)
        assert simulation.bubble_makespan == pytest.approx(formula.fraction)


def test_formulas_of_the_others() -> None:
    dualpipe = generated_schedules()["dualpipe"].bubble(8, 20, Costs(pair=2.0))
    assert dualpipe is not None
    assert dualpipe.idle == 3 * (2 + 2 - 3)
    simulation = simulate(generate("dualpipe", 8, 20), Costs(pair=2.0))
    assert sum(simulation.busy) / 8 == pytest.approx(dualpipe.idle / dualpipe.fraction - dualpipe.idle)
    naive = generated_schedules()["naive"].bubble(4, 3, Costs())
    assert naive is not None
    assert naive.fraction == pytest.approx(simulate(generate("naive", 4, 3), Costs()).bubble_makespan) == 0.75
    assert bubble_formula(replace(generate("gpipe", 4, 8), name="csv"), Costs()) is None


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "num_chunks", "idle", "fraction"),
    [
        ("interleaved_1f1b", 8, 32, 2, 21, 21 / 213),
        ("interleaved_1f1b", 8, 32, 4, 21, 21 / 405),
        ("zb1p", 8, 32, 1, 7, 7 / 103),
        ("dualpipe_v", 4, 10, 2, 6, 6 / 66),
    ],
)
def test_published_formulas_of_other_schedules(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, idle: float, fraction: float
) -> None:
    """At F=I=W=1 and pairs of 3 they meet the simulation."""
    costs = Costs(pair=3.0)
    formula = generated_schedules()[name].bubble(num_ranks, num_microbatches, costs, num_chunks=num_chunks)
    assert formula is not None
    assert formula.idle == idle
    assert formula.fraction == pytest.approx(fraction)
    chosen = num_chunks if name == "interleaved_1f1b" else None
    simulated = simulate(generate(name, num_ranks, num_microbatches, num_chunks=chosen), costs)
    assert simulated.bubble_makespan == pytest.approx(fraction)


def slow_simulation(schedule: Schedule, costs: Costs) -> list[dict[str, tuple[float, float]]]:
    """Start and end of each action by repeated relaxation from the definition, without the dependency table."""
    done: dict[tuple[str, int, int], tuple[float, int]] = {}  # tensor -> (time, rank)
    result: list[dict[str, tuple[float, float]]] = [{} for _ in schedule.actions]
    free, at = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
    while any(at[rank] < len(schedule.actions[rank]) for rank in range(schedule.num_ranks)):
        for rank, actions in enumerate(schedule.actions):
            if at[rank] == len(actions):
                continue
            action = actions[at[rank]]
            wanted: list[tuple[str, int, int]] = []
            for leaf in action.leaves:
                if leaf.kind is Kind.F and leaf.stage > 0:
                    wanted.append(("y", leaf.stage - 1, leaf.microbatch))
                if leaf.kind in (Kind.B, Kind.I):
                    wanted.append(("y", leaf.stage, leaf.microbatch))
                    if leaf.stage + 1 < schedule.num_stages:
                        wanted.append(("dx", leaf.stage + 1, leaf.microbatch))
            if not all(tensor in done for tensor in wanted):
                continue
            arrivals = [done[t][0] + (costs.latency_s if done[t][1] != rank else 0) for t in wanted]
            start = max([free[rank], *arrivals])
            free[rank] = end = start + costs.of(action)
            at[rank] += 1
            result[rank][str(action)] = (start, end)
            for leaf in action.leaves:
                if leaf.kind is Kind.F:
                    done["y", leaf.stage, leaf.microbatch] = (end, rank)
                elif leaf.kind in (Kind.B, Kind.I):
                    done["dx", leaf.stage, leaf.microbatch] = (end, rank)
    return result


@given(sizes=fitting_sizes(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_against_a_slow_simulation(sizes: tuple[str, int, int], data: st.DataObject) -> None:
    schedule = generate(*sizes)
    number = st.integers(1, 9).map(float)
    per_stage = st.lists(number, min_size=schedule.num_stages, max_size=schedule.num_stages).map(tuple)
    costs = Costs(
        forward=data.draw(per_stage),
        input_gradient=data.draw(per_stage),
        weight_gradient=data.draw(number),
        pair=data.draw(st.none() | number),
        latency_s=data.draw(st.integers(0, 3).map(float)),
    )
    simulation = simulate(schedule, costs)
    expected = slow_simulation(schedule, costs)
    for interval in simulation.intervals:
        assert (interval.start, interval.end) == expected[interval.rank][str(interval.action)]
    assert len(simulation.intervals) == sum(map(len, expected))
    assert simulation.peak_activations == verify(schedule).peak_activations


def test_added_actions_take_no_time_and_change_no_order() -> None:
    schedule = generate("dualpipe", 4, 10)
    costs = Costs(pair=2.0, latency_s=0.25)
    plain, lowered = simulate(schedule, costs), simulate(lower(schedule, zero_stage=3), costs)
    assert plain.makespan == lowered.makespan
    assert plain.busy == lowered.busy


def test_links() -> None:
    """Two activations of 4 bytes at 2 bytes/s occupy the link in turn, then take 0.5 s to arrive."""
    schedule = parse("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", placement=((0, 1),), microbatches=2)
    costs = Costs(latency_s=0.5, message_bytes=4, bandwidth_bytes_per_s=2)
    starts = {str(i.action): i.start for i in simulate(schedule, costs).intervals}
    assert starts["1F0"] == 1 + 2 + 0.5
    assert starts["1F1"] == 1 + 2 + 2 + 0.5
    assert starts["1B0"] == 6.5
    assert starts["0B0"] == 8.5 + 2.5


def test_span_bubble_leaves_out_the_ends() -> None:
    # Rank 1 starts a unit late and ends a unit early in a step of three.
    schedule = parse("0F0 0B0", "1F0 1B0", placement=((0, 1),), microbatches=1)
    simulation = simulate(schedule, Costs(forward=1.0, input_gradient=0.5, weight_gradient=0.5))
    assert simulation.span == (4.0, 2.0)
    assert simulation.bubble_span == simulation.bubble_makespan == 0.5
    uneven = parse("0F0 0B0 0F1 0B1", "0F2 0B2", placement=((0,), (1,)), microbatches=4)
    assert simulate(uneven, Costs()).bubble_span == pytest.approx(1 - (9 / 2) / 6)


def test_a_circle_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"wait for each other.*rank 0 at 0B0"):
        simulate(parse("0F0 0B0", "1B0 1F0", placement=((0, 1),), microbatches=1), Costs())


def test_costs_from_the_config() -> None:
    costs = costs_from(CostsConfig(forward=2.0, input_gradient=3.0, weight_gradient=4.0, pair=7.0), 3)
    assert costs == Costs(forward=2.0, input_gradient=3.0, weight_gradient=4.0, pair=7.0)
    assert sum(simulate(generate("1f1b", 3, 3), costs).busy) == 3 * 3 * 9


def test_copies_are_waited_for_where_they_must_be() -> None:
    """By hand: one rank, F, I and W of 1 (so B of 2), units of 10 bytes, a budget of 20, 10 bytes copied in 2."""
    schedule = parse(
        "0F0 0OFFLOAD0 0F1 0F2 0OFFLOAD1 0B2 0RELOAD0 0B0 0RELOAD1 0B1", placement=((0,),), microbatches=3
    )
    model = CopyModel(sizes=[UnitBytes(kept=10, most=10)], budget_bytes=20, bytes_per_s=5.0)
    found = simulate(schedule, Costs(), model)
    # 0F2 waits for unit 0 to be out at 3; unit 1 leaves from 4 to 6, under 0B2, which ends at 6. Unit 0 is then back
    # at 8. Unit 1 is asked for when 0B0 has ended at 10, and is back at 12.
    assert found.starts == ((0.0, 1.0, 3.0, 4.0, 8.0, 12.0),)
    assert [(str(copy.action), copy.start, copy.end) for copy in found.copies[0]] == [
        ("0OFFLOAD0", 1.0, 3.0),
        ("0OFFLOAD1", 4.0, 6.0),
        ("0RELOAD0", 6.0, 8.0),
        ("0RELOAD1", 10.0, 12.0),
    ]
    assert found.stall == (1.0 + 2.0 + 2.0,)
    assert found.peak_bytes == (20,)
    assert found.makespan == 14.0
    assert simulate(schedule, Costs()).makespan == 9.0


def test_without_a_rate_copies_take_no_time() -> None:
    schedule = generate("gpipe", 2, 6)
    sizes = [UnitBytes(kept=10, most=10)] * 2
    moved = add_offload(lower(schedule, zero_stage=0), sizes, budget_bytes=30, policy="lru")
    found = simulate(moved, Costs(), CopyModel(sizes=sizes, budget_bytes=30))
    assert found.makespan == simulate(schedule, Costs()).makespan
    assert found.stall == (0.0, 0.0)
    assert max(found.peak_bytes) <= 30
