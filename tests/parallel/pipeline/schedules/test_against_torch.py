"""Multi-stage schedules against torch.distributed.pipelining's, both ways: orders, times, import and export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.analysis.verify import verify
from counterflow.parallel.pipeline.ir.action import Kind, Schedule
from counterflow.parallel.pipeline.ir.text import from_csv, to_csv
from counterflow.parallel.pipeline.schedules.registry import generate
from tests.parallel.pipeline.ir.test_text import torch_runtime
from tests.parallel.pipeline.schedules.torch_orders import (
    DUALPIPE_V,
    INTERLEAVED,
    ZBV,
    ZERO_BUBBLE,
    build,
    exported,
)

SIZES = [(2, 2), (2, 4), (3, 9), (4, 4), (4, 7), (4, 16), (5, 11), (8, 16), (8, 32)]
UNEQUAL = [
    Costs(weight_gradient=0.5),
    Costs(input_gradient=1.25, weight_gradient=0.75),
    Costs(forward=1.0, input_gradient=2.0, weight_gradient=1.0),
    Costs(forward=2.0, input_gradient=1.0, weight_gradient=1.0),
    Costs(forward=2.0, input_gradient=2.0, weight_gradient=3.0),
    Costs(latency_s=0.125),
    Costs(weight_gradient=0.5, latency_s=0.125),
]


def theirs(
    torch_class: Any, num_ranks: int, num_microbatches: int, num_chunks: int, folder: Path
) -> Schedule:
    schedule = build(torch_class, num_ranks, num_microbatches, num_chunks)
    return from_csv(exported(schedule, folder, "compute_only"), name="torch")


@pytest.mark.parametrize(
    ("name", "torch_class", "num_chunks"),
    [
        ("interleaved_1f1b", INTERLEAVED, 2),
        ("interleaved_1f1b", INTERLEAVED, 4),
        ("zb1p", ZERO_BUBBLE, 1),
        ("dualpipe_v", DUALPIPE_V, 2),
    ],
)
def test_the_order_is_torchs(name: str, torch_class: Any, num_chunks: int, tmp_path: Path) -> None:
    for num_ranks, num_microbatches in SIZES:
        if num_microbatches % max(1, num_microbatches // num_ranks):
            continue  # refused by torch's interleaved schedules
        if name == "dualpipe_v" and num_microbatches < 2 * num_ranks:
            continue
        ours = generate(name, num_ranks, num_microbatches, num_chunks=num_chunks)
        order = theirs(torch_class, num_ranks, num_microbatches, num_chunks, tmp_path)
        assert ours.placement == order.placement
        assert ours.actions == order.actions, (num_ranks, num_microbatches)


def test_zbv_differs_from_torchs_in_the_weight_gradients_of_the_drain_alone(tmp_path: Path) -> None:
    for num_ranks, num_microbatches in SIZES:
        if num_microbatches < 2 * num_ranks - 1:
            continue
        order = theirs(ZBV, num_ranks, num_microbatches, 2, tmp_path)
        for mine, other in zip(
            generate("zbv", num_ranks, num_microbatches).actions, order.actions, strict=True
        ):
            last = max(index for index, action in enumerate(mine) if action.kind is Kind.F)
            assert mine[: last + 3] == other[: last + 3]
            assert [action for action in mine if action.kind is not Kind.W] == [
                action for action in other if action.kind is not Kind.W
            ]


@pytest.mark.parametrize(
    ("name", "torch_class", "num_chunks"),
    [
        ("interleaved_1f1b", INTERLEAVED, 2),
        ("interleaved_1f1b", INTERLEAVED, 3),
        ("zb1p", ZERO_BUBBLE, 1),
        ("zbv", ZBV, 2),
        ("dualpipe_v", DUALPIPE_V, 2),
    ],
)
def test_no_slower_than_torchs(name: str, torch_class: Any, num_chunks: int, tmp_path: Path) -> None:
    compared = 0
    for num_ranks, num_microbatches in SIZES:
        try:
            order = theirs(torch_class, num_ranks, num_microbatches, num_chunks, tmp_path)
        except ValueError:
            continue
        ours = generate(name, num_ranks, num_microbatches, num_chunks=num_chunks)
        # Below 2p-1 micro-batches torch's ZBV is far slower where costs are equal, and at some others a little faster.
        few = name == "zbv" and num_microbatches < 2 * num_ranks - 1
        for costs in [Costs()] if few else [Costs(), *UNEQUAL]:
            mine, other = simulate(ours, costs).makespan, simulate(order, costs).makespan
            assert mine <= other + 1e-9, (num_ranks, num_microbatches, costs)
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize("num_microbatches", [2, 4, 6])
def test_few_micro_batches_in_a_v(num_microbatches: int, tmp_path: Path) -> None:
    order = theirs(ZBV, 8, num_microbatches, 2, tmp_path)
    ours = generate("zbv", 8, num_microbatches)
    assert simulate(ours, Costs()).makespan < simulate(order, Costs()).makespan


@pytest.mark.parametrize("torch_class", [INTERLEAVED, ZERO_BUBBLE, ZBV, DUALPIPE_V])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (8, 32)])
def test_what_torch_exports_is_verified_and_simulated(
    torch_class: Any, num_ranks: int, num_microbatches: int, tmp_path: Path
) -> None:
    schedule = build(torch_class, num_ranks, num_microbatches)
    compute = from_csv(exported(schedule, tmp_path, "compute_only"), name="torch")
    verify(compute)
    verify(lower(compute, zero_stage=0))
    verify(lower(compute, zero_stage=3))
    with_comms = from_csv(exported(schedule, tmp_path, "compute_comms"), name="torch")
    assert verify(with_comms).executable
    work = 3 * 2 * num_microbatches
    assert work < simulate(compute, Costs()).makespan <= work + 3 * num_ranks


@pytest.mark.parametrize(
    "name", ["interleaved_1f1b", "zb1p", "zb_h2", "zbv", "v_half", "v_min", "dualpipe_v"]
)
def test_torch_loads_what_we_export(name: str, tmp_path: Path) -> None:
    schedule = generate(name, 4, 8)
    path = tmp_path / "ours.csv"
    path.write_text(to_csv(schedule, compute_only=True))
    runtime = torch_runtime(schedule)
    runtime._load_csv(str(path))
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement[0]))
    assert _texts(runtime.pipeline_order) == _texts(dict(enumerate(schedule.actions)))

    lowered = lower(schedule, zero_stage=3)
    path.write_text(to_csv(lowered, compute_only=False))
    runtime._load_csv(str(path), format="compute_comms")
    assert _texts(runtime.pipeline_order_with_comms) == _texts(dict(enumerate(lowered.actions)))


def _texts(order: dict[int, Any]) -> dict[int, list[str]]:
    return {rank: list(_each_text(actions)) for rank, actions in order.items()}


def _each_text(actions: Any) -> Iterator[str]:
    return (str(action) for action in actions if action is not None)
