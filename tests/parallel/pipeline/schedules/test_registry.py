"""Generators against torch's own orders, a list written by hand, and the golden files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import RECEIVES, SENDS, Action, Schedule
from counterflow.parallel.pipeline.ir.text import from_csv, to_csv
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.parallel.pipeline.oracle import survives

GOLDEN = Path(__file__).parents[3] / "golden"
GOLDEN_SIZES = [
    (name, p, 2 * p if name == "dualpipe" else p) for name in ("gpipe", "1f1b", "dualpipe") for p in (2, 4, 8)
]


def fitting_sizes() -> st.SearchStrategy[tuple[str, int, int]]:
    """(name, ranks, micro-batches) that each generator accepts."""
    free = st.tuples(st.sampled_from(["naive", "gpipe", "1f1b"]), st.integers(1, 7), st.integers(1, 12))
    dual = st.tuples(st.integers(1, 5), st.integers(0, 6)).map(
        lambda sizes: ("dualpipe", 2 * sizes[0], 4 * sizes[0] + 2 * sizes[1])
    )
    return free | dual


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), GOLDEN_SIZES)
def test_golden_files(name: str, num_ranks: int, num_microbatches: int) -> None:
    schedule = generate(name, num_ranks, num_microbatches)
    stem = f"{name}_p{num_ranks}_m{num_microbatches}"
    assert to_csv(schedule, compute_only=True) == (GOLDEN / f"{stem}.csv").read_text()
    lowered = lower(schedule, zero_stage=3, reshard_after="use")
    assert to_csv(lowered, compute_only=False) == (GOLDEN / f"{stem}.executable.csv").read_text()


@pytest.mark.parametrize(("name", "torch_class"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (4, 4), (4, 9), (8, 20)])
def test_the_order_is_torchs(name: str, torch_class: Any, num_ranks: int, num_microbatches: int) -> None:
    sizes = SimpleNamespace(_num_stages=num_ranks, _n_microbatches=num_microbatches)
    order = torch_class._get_pipeline_order(sizes)
    expected = [
        [str(action) for action in order[rank] if action is not None and action.is_compute_op]
        for rank in range(num_ranks)
    ]
    if name == "1f1b":
        # torch 2.13 numbers the last rank's forwards from 1 (its order is used for printing only).
        assert expected[-1][0] == f"{num_ranks - 1}F1"
        expected[-1] = [f"{num_ranks - 1}{kind}{index}" for index in range(num_microbatches) for kind in "FB"]
    schedule = generate(name, num_ranks, num_microbatches)
    assert [[str(action) for action in actions] for actions in schedule.actions] == expected


def test_dualpipe_of_two_ranks_by_hand() -> None:
    text = (
        "0F0,1F2,0F1,1B2,(1F3;0B0)OVERLAP_F_B,1B3,0I1,0W1\n0F2,1F0,0F3,1B0,(1F1;0B2)OVERLAP_F_B,1B1,0I3,0W3\n"
    )
    assert to_csv(generate("dualpipe", 2, 4), compute_only=True) == text


def test_an_outer_rank_of_dualpipe_by_hand() -> None:
    """Rank 0 of 8 ranks and 20 micro-batches, phase by phase."""
    phases = [
        "0F0 0F1 0F2 0F3 0F4 0F5",
        "0F6 7F10",
        "7I10 7W10 7F11 7I11 7W11 7F12 7I12 7W12 7F13",
        "0F7&7B13 7F14&0B0 0F8&7B14 7F15&0B1 0F9&7B15 7F16&0B2",
        "7B16 7F17&0B3 7B17 7F18&0B4 7B18 7F19&0B5",
        "7B19 0I6",
        "0W6 0I7 0W7 0I8 0W8 0I9",
        "0W9",
    ]
    expected = [
        Action.pair(*map(Action.parse, item.split("&"))) if "&" in item else Action.parse(item)
        for item in " ".join(phases).split()
    ]
    assert list(generate("dualpipe", 8, 20).actions[0]) == expected


@given(sizes=fitting_sizes())
@settings(max_examples=60, deadline=None)
def test_every_size_runs(sizes: tuple[str, int, int]) -> None:
    schedule = generate(*sizes)
    assert verify(schedule).executable is False
    assert survives(schedule)
    report = verify(lower(schedule, zero_stage=3))
    name, num_ranks, num_microbatches = sizes
    bound = {
        "naive": lambda rank: 1,
        "gpipe": lambda rank: num_microbatches,
        "1f1b": lambda rank: min(num_ranks - rank, num_microbatches),
        "dualpipe": lambda rank: num_ranks + 1,
    }[name]
    assert report.peak_activations == tuple(bound(rank) for rank in range(num_ranks))


@given(half=st.integers(1, 5), extra=st.integers(0, 4))
@settings(max_examples=25, deadline=None)
def test_mirror_ranks_run_one_sequence(half: int, extra: int) -> None:
    schedule = lower(generate("dualpipe", 2 * half, 4 * half + 2 * extra), zero_stage=3)

    def shape(action: Action) -> tuple[Any, ...]:
        return tuple((leaf.kind, leaf.stage) for leaf in action.leaves)

    def without_messages(rank: int) -> list[tuple[Any, ...]]:
        return [shape(action) for action in schedule.actions[rank] if action.kind not in SENDS | RECEIVES]

    for rank in range(2 * half):
        assert without_messages(rank) == without_messages(2 * half - 1 - rank)
        assert schedule.stages_of(rank) == (rank, 2 * half - 1 - rank)


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "key", "remedy"),
    [
        ("dualpipe", 1, 4, "parallel.pipeline_parallel_size=1", "schedule=1f1b"),
        ("dualpipe", 3, 12, "parallel.pipeline_parallel_size=3", "even number"),
        ("dualpipe", 4, 9, "schedule.num_microbatches=9", "schedule.num_microbatches=10"),
        ("dualpipe", 4, 6, "schedule.num_microbatches=6", "schedule.num_microbatches=8"),
        ("1f1b", 0, 4, "parallel.pipeline_parallel_size=0", "1 or more"),
        ("gpipe", 2, 0, "schedule.num_microbatches=0", "1 or more"),
        ("pipedream", 2, 4, "schedule.name=pipedream", "dualpipe"),
    ],
)
def test_sizes_that_do_not_fit(
    name: str, num_ranks: int, num_microbatches: int, key: str, remedy: str
) -> None:
    with pytest.raises(ValueError, match=key) as error:
        generate(name, num_ranks, num_microbatches)
    assert remedy in str(error.value)


def test_generators_know_whether_they_mirror() -> None:
    for name, generator in generated_schedules().items():
        schedule: Schedule = generator.generate(4, 8)
        assert schedule.name == name
        assert generator.mirrored == any(len(schedule.replicas_of(stage)) > 1 for stage in range(4))
        assert from_csv(to_csv(schedule, compute_only=True), name=name) == schedule
