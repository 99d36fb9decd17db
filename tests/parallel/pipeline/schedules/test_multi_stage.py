"""Zero-bubble, interleaved and V-shaped schedules: proven at every size, within their memory, as on file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import Action, Kind
from counterflow.parallel.pipeline.ir.text import from_csv, to_csv
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.parallel.pipeline.analysis.test_simulate import slow_simulation
from tests.parallel.pipeline.oracle import survives

GOLDEN = Path(__file__).parents[3] / "golden"

# (name, chunks)
SCHEDULES = [
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("interleaved_1f1b", 4),
    ("zb1p", 1),
    ("zb_h2", 1),
    ("zbv", 2),
    ("v_half", 2),
    ("v_min", 2),
    ("dualpipe_v", 2),
]


def sizes(name: str) -> Iterator[tuple[int, int]]:
    """Ranks from 2 to 16; micro-batches at both ends of p..4p, and one number between, which moves along."""
    for num_ranks in range(2, 17):
        least = 2 * num_ranks if name == "dualpipe_v" else num_ranks
        between = least + 1 + (7 * num_ranks) % (4 * num_ranks - least - 1)
        choice = (least, between, 4 * num_ranks)
        # From nine ranks on one of them in turn, which leaves 4p for 16 ranks.
        for num_microbatches in choice if num_ranks < 9 else (choice[(num_ranks + 1) % 3],):
            yield num_ranks, num_microbatches


def held_together(actions: tuple[Action, ...]) -> int:
    """Most activations and weight gradients to be computed at once: a pair stores before it frees."""
    held = peak = 0
    for action in actions:
        for leaf in action.leaves:
            if leaf.kind is Kind.F:
                held += 1
                peak = max(peak, held)
            elif leaf.kind in (Kind.B, Kind.W):
                held -= 1
    return peak


# Of rank r with p ranks and m micro-batches: activations, and activations and owed weight gradients together.
BOUNDS: dict[str, tuple[Callable[[int, int, int], int], Callable[[int, int, int], int]]] = {
    "zb1p": (lambda r, p, m: min(p - r, m), lambda r, p, m: p),
    "zb_h2": (lambda r, p, m: min(2 * (p - r) - 1, m), lambda r, p, m: 2 * p - 1),
    "zbv": (lambda r, p, m: 2 * p, lambda r, p, m: 2 * p),
    "v_half": (lambda r, p, m: 2 * ((p + 2) // 2), lambda r, p, m: 2 * ((p + 2) // 2)),
    "v_min": (lambda r, p, m: 2 * ((p + 4) // 3), lambda r, p, m: 2 * ((p + 4) // 3)),
    "dualpipe_v": (lambda r, p, m: 2 * p + 1, lambda r, p, m: 2 * p + 1),
}


@pytest.mark.parametrize(("name", "num_chunks"), SCHEDULES)
def test_every_size_is_proven(name: str, num_chunks: int) -> None:
    for num_ranks, num_microbatches in sizes(name):
        schedule = generate(name, num_ranks, num_microbatches, num_chunks=num_chunks)
        assert schedule.num_stages == num_chunks * num_ranks
        report = verify(schedule)
        assert not report.executable
        for zero_stage in (0, 3):
            assert verify(lower(schedule, zero_stage=zero_stage)).executable
        together = [held_together(actions) for actions in schedule.actions]
        for rank in range(num_ranks):
            if name == "interleaved_1f1b":
                first_round = num_ranks + -(
                    -(num_microbatches % num_ranks) // (num_microbatches // num_ranks)
                )
                ahead = (num_chunks - 1) * first_round + 2 * (num_ranks - 1 - rank)
                bound = bound_together = min(ahead + 1, num_chunks * num_microbatches)
                assert report.peak_activations[rank] == bound
            else:
                bound, bound_together = (
                    of_rank(rank, num_ranks, num_microbatches) for of_rank in BOUNDS[name]
                )
            assert report.peak_activations[rank] <= bound
            assert together[rank] <= bound_together, (num_ranks, num_microbatches, rank)


@pytest.mark.parametrize("name", ["zb1p", "zb_h2", "zbv", "v_half", "v_min", "dualpipe_v"])
def test_the_bounds_are_reached(name: str) -> None:
    for num_ranks in (2, 3, 4, 6, 8, 9):
        m = 4 * num_ranks
        schedule = generate(name, num_ranks, m)
        together = BOUNDS[name][1](0, num_ranks, m)
        assert max(map(held_together, schedule.actions)) == together
        verify(schedule, max_live_activations=together)
    live = {"v_half": 10, "v_min": 6, "zbv": 16, "dualpipe_v": 17}
    if name in live:
        assert verify(generate(name, 8, 32)).peak_activations == (live[name],) * 8


@pytest.mark.parametrize(("name", "num_chunks"), SCHEDULES)
def test_small_sizes(name: str, num_chunks: int) -> None:
    """One rank, and fewer micro-batches than ranks: right, or refused by name."""
    for num_ranks in (1, 2, 3, 5):
        for num_microbatches in (1, 2, 3, 4):
            if name == "dualpipe_v" and num_microbatches < 2 * num_ranks:
                with pytest.raises(
                    ValueError, match=f"num_microbatches={num_microbatches}: dualpipe_v needs"
                ):
                    generate(name, num_ranks, num_microbatches)
                continue
            schedule = generate(name, num_ranks, num_microbatches, num_chunks=num_chunks)
            verify(schedule)
            for zero_stage in (0, 3):
                lowered = lower(schedule, zero_stage=zero_stage)
                verify(lowered)
                assert survives(lowered)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_interleaving_needs_no_multiple_of_the_ranks(num_ranks: int) -> None:
    """The bubble is the one of a multiple: (p-1)(F+B) of a chunk, at any number of micro-batches from p on."""
    for num_microbatches in range(num_ranks, 4 * num_ranks + 1):
        for num_chunks in (1, 2, 3):
            schedule = generate("interleaved_1f1b", num_ranks, num_microbatches, num_chunks=num_chunks)
            verify(lower(schedule, zero_stage=3))
            assert simulate(schedule, Costs()).idle == (3.0 * (num_ranks - 1),) * num_ranks


def test_one_chunk_is_1f1b() -> None:
    for num_ranks, num_microbatches in ((2, 5), (4, 3), (4, 9)):
        interleaved = generate("interleaved_1f1b", num_ranks, num_microbatches, num_chunks=1)
        assert interleaved.actions == generate("1f1b", num_ranks, num_microbatches).actions


@pytest.mark.parametrize(("name", "num_chunks"), SCHEDULES)
def test_uneven_costs(name: str, num_chunks: int) -> None:
    """Stages that differ: against the slow simulation, and never below the busiest rank's work."""
    rng = random.Random(name)
    for num_ranks, num_microbatches in ((2, 7), (4, 8), (5, 13)):
        schedule = generate(name, num_ranks, num_microbatches, num_chunks=num_chunks)
        per_stage = [tuple(float(rng.randint(1, 9)) for _ in range(schedule.num_stages)) for _ in range(3)]
        costs = Costs(
            forward=per_stage[0],
            input_gradient=per_stage[1],
            weight_gradient=per_stage[2],
            latency_s=float(rng.randint(0, 2)),
        )
        simulation = simulate(schedule, costs)
        expected = slow_simulation(schedule, costs)
        for interval in simulation.intervals:
            assert (interval.start, interval.end) == expected[interval.rank][str(interval.action)]
        work = [
            num_microbatches * sum(cost[stage] for cost in per_stage for stage in schedule.stages_of(rank))
            for rank in range(num_ranks)
        ]
        assert simulation.busy == tuple(work)
        assert max(work) <= simulation.makespan < sum(work)


# (name, chunks, ranks, micro-batches)
GOLDEN_SIZES = [
    (name, num_chunks, num_ranks, 2 * num_ranks)
    for name, num_chunks in SCHEDULES
    if num_chunks <= 2
    for num_ranks in (2, 4)
] + [("interleaved_1f1b", 3, 2, 5)]


@pytest.mark.parametrize(("name", "num_chunks", "num_ranks", "num_microbatches"), GOLDEN_SIZES)
def test_golden_files(name: str, num_chunks: int, num_ranks: int, num_microbatches: int) -> None:
    schedule = generate(name, num_ranks, num_microbatches, num_chunks=num_chunks)
    chunks = f"_v{num_chunks}" if generated_schedules()[name].any_chunks else ""
    stem = f"{name}{chunks}_p{num_ranks}_m{num_microbatches}"
    text = (GOLDEN / f"{stem}.csv").read_text()
    assert to_csv(schedule, compute_only=True) == text
    assert from_csv(text, name=name) == schedule
    lowered = lower(schedule, zero_stage=3, reshard_after="use")
    text = (GOLDEN / f"{stem}.executable.csv").read_text()
    assert to_csv(lowered, compute_only=False) == text
    assert from_csv(text, name=name) == lowered


def rows(text: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, row.split())) for row in text.strip().splitlines())


def test_zb_h1_by_hand() -> None:
    """Figure 3 of the zero-bubble paper, for three stages and four micro-batches."""
    assert generate("zb1p", 3, 4).actions == rows(
        """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
        """
    )


def test_zbv_of_two_ranks_by_hand() -> None:
    """The three phases of section 6 of the zero-bubble paper, with p = 2: warm-up of 2p-1 forwards a rank."""
    assert generate("zbv", 2, 4).actions == rows(
        """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
        """
    )


def test_v_min_of_two_ranks_by_hand() -> None:
    """Unit by unit.

    Blocks 6 units apart, with one unit from each action to the next, order rank 0 as 0F0 3F0 3I0 0F1 0I0 3F1 3I1
    0I1 and rank 1 as 1F0 2F0 2I0 1I0 1F1 2F1 2I1 1I1. In a run, 1I0 ends with unit 6, in which rank 0 can do 3W0
    only; in unit 8 it waits for 2F1, in 11 for 1I1. Rank 1 waits for 3I1 in the units 9 and 10.
    """
    assert generate("v_min", 2, 2).actions == rows(
        """
        0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 3W1 0I1 0W1
        1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1
        """
    )


def test_placements() -> None:
    assert generate("interleaved_1f1b", 2, 2, num_chunks=3).placement == ((0, 1, 0, 1, 0, 1),)
    for name in ("zbv", "v_half", "v_min", "dualpipe_v"):
        assert generate(name, 3, 6).placement == ((0, 1, 2, 2, 1, 0),)


@pytest.mark.parametrize(
    ("name", "num_microbatches", "num_chunks", "message"),
    [
        ("dualpipe_v", 7, None, r"schedule\.num_microbatches=7: .*set schedule\.num_microbatches=8 or more"),
        ("zbv", 8, 3, r"schedule\.num_chunks=3: zbv has 2 to a rank; .*null, .*schedule=interleaved_1f1b"),
        ("1f1b", 8, 2, r"schedule\.num_chunks=2: 1f1b has 1 to a rank"),
        ("interleaved_1f1b", 8, 0, r"schedule\.num_chunks=0: .*set it to 1 or more"),
    ],
)
def test_refusals(name: str, num_microbatches: int, num_chunks: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(name, 4, num_microbatches, num_chunks=num_chunks)


def test_generators_know_their_chunks() -> None:
    for name, generator in generated_schedules().items():
        schedule = generate(name, 4, 8)
        assert schedule.name == name
        assert schedule.num_stages == 4 * generator.num_chunks
        assert len(schedule.stages_of(0)) == generator.num_chunks * (2 if generator.mirrored else 1)
        assert generate(name, 4, 8, num_chunks=generator.num_chunks) == schedule
