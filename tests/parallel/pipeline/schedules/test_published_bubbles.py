"""Simulated bubble rates against those that the zero-bubble paper prints (Qi et al., arXiv 2401.10241v1).

Their rate is (cost - m (T_F + T_B + T_W)) / cost, the cost being the longest execution time of a stage: what
`Simulation.bubble_span` is for equal stages. T_B is their name for I. Times are in ms, of a rank's whole stage.
"""

from __future__ import annotations

import pytest

from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.schedules.registry import generate

# Table 9 (profiled T_F, T_B, T_W, T_comm), and from Table 5 the rates of 1F1B, ZB-H1, ZB-H2 and of interleaved
# 1F1B, which has as many chunks as a rank has layers (Table 3; the first and the last stage count as one more).
TABLE_5 = [
    # p, m, T_F, T_B, T_W, T_comm, 1F1B, ZB-H1, ZB-H2, 1F1B-I, chunks
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.1055, 3),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.0818, 3),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 0.0443, 3),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.0808, 4),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 0.0628, 4),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 0.0320, 4),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672, 0.1104, 3),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516, 0.0852, 3),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266, 0.0445, 3),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641, 0.1493, 2),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490, 0.1164, 2),
]

# Table 8: other runs, whose profiled times the paper does not print.
TABLE_8 = [
    # p, m, 1F1B, ZB-H1, ZB-H2, ZB-V
    (16, 48, 0.2668, 0.1536, 0.0823, 0.0697),
    (16, 64, 0.2206, 0.1198, 0.0630, 0.0533),
    (16, 128, 0.1390, 0.0637, 0.0325, 0.0274),
    (24, 72, 0.2699, 0.1439, 0.0628, 0.0638),
    (24, 96, 0.2229, 0.1121, 0.0480, 0.0483),
    (32, 96, 0.2676, 0.1429, 0.0629, 0.0593),
    (32, 128, 0.2204, 0.1111, 0.0478, 0.0451),
]

ROUNDED = 0.5e-4 + 1e-9  # the tables have four digits


def rate(
    name: str, num_ranks: int, num_microbatches: int, times: tuple[float, ...], num_chunks: int = 1
) -> float:
    """The paper's bubble rate where a stage of the whole rank takes `times` (F, I, W, link) and chunks share it."""
    forward, input_gradient, weight_gradient = (time / num_chunks for time in times[:3])
    costs = Costs(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        latency_s=times[3],
    )
    schedule = generate(name, num_ranks, num_microbatches, num_chunks=num_chunks)
    simulation = simulate(schedule, costs)
    cost = max(simulation.span)
    by_their_words = (cost - num_microbatches * sum(times[:3])) / cost
    assert simulation.bubble_span == pytest.approx(by_their_words, abs=1e-9)
    return simulation.bubble_span


@pytest.mark.parametrize("row", TABLE_5)
def test_table_5(row: tuple[float, ...]) -> None:
    """1F1B, ZB-H1 and ZB-H2 to the last printed digit; interleaved 1F1B, of another implementation, to 0.005."""
    p, m, *times, f1b, zb_h1, zb_h2, interleaved, num_chunks = row
    sizes = int(p), int(m)
    assert rate("1f1b", *sizes, tuple(times)) == pytest.approx(f1b, abs=ROUNDED)
    assert rate("zb1p", *sizes, tuple(times)) == pytest.approx(zb_h1, abs=ROUNDED)
    assert rate("zb_h2", *sizes, tuple(times)) == pytest.approx(zb_h2, abs=ROUNDED)
    assert rate("interleaved_1f1b", *sizes, tuple(times), int(num_chunks)) == pytest.approx(
        interleaved, abs=0.005
    )


@pytest.mark.parametrize("row", TABLE_8)
def test_table_8(row: tuple[float, ...]) -> None:
    """ZB-V to 0.01, at times read off the other columns.

    With T_F + T_B + T_W = 1 and rate r, idle time is m r / (1-r). That of ZB-H1 is (p-1)(1 - 2 T_W + 4 T_comm),
    that of ZB-H2 (p-1)(1 - 3 T_W + 2 T_comm), exact for Table 5: two equations give T_W and T_comm. T_F = T_B,
    within 2 % in Table 9. The rate of 1F1B, of which the two equations know nothing, shows that the times are right.
    """
    p, m, f1b, zb_h1, zb_h2, zb_v = row
    sizes = int(p), int(m)
    idle_h1, idle_h2 = (m * published / (1 - published) / (p - 1) for published in (zb_h1, zb_h2))
    weight = (1 - 2 * idle_h2 + idle_h1) / 4
    link = (idle_h2 - 1 + 3 * weight) / 2
    times = ((1 - weight) / 2, (1 - weight) / 2, weight, link)
    assert 0.25 < weight < 0.28
    assert rate("zb1p", *sizes, times) == pytest.approx(zb_h1, abs=ROUNDED)
    assert rate("zb_h2", *sizes, times) == pytest.approx(zb_h2, abs=ROUNDED)
    assert rate("1f1b", *sizes, times) == pytest.approx(f1b, abs=0.0005)
    assert rate("zbv", *sizes, times, num_chunks=2) == pytest.approx(zb_v, abs=0.01)


@pytest.mark.parametrize(
    ("name", "num_chunks", "bubble", "exact"),
    [
        ("1f1b", 1, 0.180, 21 / 117),
        ("interleaved_1f1b", 2, 0.099, 21 / 213),
        ("interleaved_1f1b", 4, 0.052, 21 / 405),
        ("zb1p", 1, 0.068, 7 / 103),
        ("zbv", 2, 0.035, 7 / 199),
        ("dualpipe_v", 2, 0.068, 14 / 206),
        ("dualpipe", 1, 0.059, 6 / 102),
    ],
)
def test_makespan_bubbles_of_8_ranks_and_32_microbatches(
    name: str, num_chunks: int, bubble: float, exact: float
) -> None:
    """At F = I = W = 1 a stage, without communication."""
    simulation = simulate(generate(name, 8, 32, num_chunks=num_chunks), Costs())
    assert simulation.bubble_makespan == pytest.approx(exact, abs=1e-12)
    # Three digits; that of 1F1B is .17949, which is often printed as .180.
    assert simulation.bubble_makespan == pytest.approx(bubble, abs=0.00052)


def test_dualpipe_v_has_the_golden_values_of_dualpipe() -> None:
    folded, two_copies = generate("dualpipe_v", 4, 10), generate("dualpipe", 8, 20)
    for pair, makespan, idle in ((3.0, 66, (6, 6, 6, 6)), (2.0, 52, (1, 2, 3, 3))):
        simulation = simulate(folded, Costs(pair=pair))
        assert (simulation.makespan, simulation.idle) == (makespan, idle)
        other = simulate(two_copies, Costs(pair=pair))
        assert (other.makespan, other.idle[:4]) == (makespan, idle)
        assert simulation.peak_activations == other.peak_activations[:4] == (9,) * 4


@pytest.mark.parametrize("name", ["zb_h2", "zbv"])
@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_no_bubble_within_a_span_from_2p_minus_1_microbatches_on(name: str, num_ranks: int) -> None:
    for num_microbatches in (2 * num_ranks - 1, 4 * num_ranks):
        assert simulate(generate(name, num_ranks, num_microbatches), Costs()).bubble_span == 0


@pytest.mark.parametrize(("name", "share"), [("v_half", 1 / 2), ("v_min", 2 / 3)])
@pytest.mark.parametrize("num_ranks", [4, 5, 6, 7, 8, 9, 12, 16])
def test_the_v_shapes_have_their_share_of_the_bubble_of_1f1b(name: str, share: float, num_ranks: int) -> None:
    """At F = I = W, whatever the number of micro-batches; V-Min has a fixed number of units besides (2405.15362)."""
    for num_microbatches in (num_ranks, 4 * num_ranks):
        simulation = simulate(generate(name, num_ranks, num_microbatches), Costs())
        of_1f1b = 2 * simulate(generate("1f1b", num_ranks, num_microbatches), Costs()).idle[0]
        assert max(simulation.idle) <= share * of_1f1b + (2 if name == "v_min" else 0)


@pytest.mark.parametrize("num_ranks", [4, 5, 8, 9])
def test_unequal_costs_add_to_the_bubble_of_v_half_once_only(num_ranks: int) -> None:
    """Within W + 2I >= 2F and W + 2F >= 2I (2405.15362): more micro-batches bring no more idle time."""
    for costs in (
        Costs(weight_gradient=0.5),
        Costs(input_gradient=1.25, weight_gradient=0.75),
        Costs(input_gradient=1.5),
    ):
        few, many = (
            simulate(generate("v_half", num_ranks, count * num_ranks), costs).idle[0] for count in (3, 6)
        )
        assert many == pytest.approx(few)
