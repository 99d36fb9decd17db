"""Where the time of a step goes: accounts add up, idle time has its cause, clocks come together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from counterflow.parallel.mesh import MeshConfig, build_mesh
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.ir.trace import (
    CATEGORIES,
    Activity,
    Inflation,
    Interval,
    Recorder,
    Trace,
    account,
    align,
    clock_id,
    exclusive,
    mean_seconds,
)
from counterflow.parallel.pipeline.runtime.plain_parameters import PlainParameters
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.pipeline.schedules.registry import generate
from tests.rank_pool import RankPool

FORWARD_S, BACKWARD_S = 0.02, 0.04


def interval(activity: Activity, start: float, end: float, stage: int = 0, microbatch: int = 0) -> Interval:
    return Interval(activity, stage, microbatch, start, end)


def test_a_moment_counts_for_the_innermost_interval() -> None:
    found = account(
        [
            interval(Activity.FORWARD, 1.0, 3.0),
            interval(Activity.COLLECTIVE_WAIT, 6.0, 7.0),
            interval(Activity.OPTIMIZER, 5.0, 9.0),
        ],
        10.0,
    )
    assert tuple(found) == CATEGORIES
    expected = {"forward": 2.0, "optimizer": 3.0, "collective_wait": 1.0, "other": 4.0}
    assert found == pytest.approx(dict.fromkeys(CATEGORIES, 0.0) | expected)


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Activity)), st.floats(0.0, 9.0), st.floats(0.0, 1.0)), max_size=30
    )
)
def test_accounts_add_up_whatever_overlaps(drawn: list[tuple[Activity, float, float]]) -> None:
    intervals = [interval(activity, start, start + length) for activity, start, length in drawn]
    found = account(intervals, 10.0)
    assert sum(found.values()) == pytest.approx(10.0, abs=1e-6)
    assert min(found.values()) >= 0
    pieces = exclusive(intervals)
    assert all(before.end_s <= after.start_s for before, after in pairwise(pieces))
    # What they cover, counted on a fine grid by another rule: a point is covered if any interval holds it.
    points = [(index + 0.5) / 200 * 10 for index in range(200)]
    covered = sum(any(each.start_s <= point < each.end_s for each in intervals) for point in points)
    assert 10.0 - found["other"] == pytest.approx(covered / 200 * 10, abs=0.05 * (len(intervals) + 1))


def test_means_and_inflation_are_those_of_the_stages() -> None:
    first = Trace(
        intervals=(
            interval(Activity.BACKWARD, 0, 4, stage=0, microbatch=0),
            interval(Activity.INPUT_GRADIENT, 4, 7, stage=0, microbatch=1),
            interval(Activity.WEIGHT_GRADIENT, 7, 9, stage=0, microbatch=1),
            interval(
                Activity.BACKWARD, 9, 99, stage=3, microbatch=2
            ),  # no I and W of this stage: not counted
        )
    )
    second = Trace(intervals=(interval(Activity.BACKWARD, 1, 3, stage=0, microbatch=5),))
    assert first.inflation() == Inflation(split_s=5, whole_s=4)
    assert second.inflation() is None
    assert mean_seconds([first, second])[Activity.BACKWARD, 0] == 3
    assert first.busy_s == 99
    assert first.span_s == 99
    assert second.span_s == 2


def test_a_wait_within_an_action_is_no_work_and_slices_are_one_action() -> None:
    trace = Trace(
        step_s=20,
        intervals=(
            interval(Activity.EXPERT_WAIT, 1, 3, stage=0, microbatch=0),
            interval(Activity.FORWARD, 0, 4, stage=0, microbatch=0),
            # A pair: two slices of either half.
            interval(Activity.BACKWARD, 4, 5, stage=1, microbatch=2),
            interval(Activity.FORWARD, 5, 9, stage=0, microbatch=1),
            interval(Activity.EXPERT_WAIT, 9, 10, stage=1, microbatch=2),
            interval(Activity.BACKWARD, 10, 13, stage=1, microbatch=2),
            interval(Activity.FORWARD, 13, 15, stage=0, microbatch=1),
        ),
    )
    found = trace.account()
    assert (found["forward"], found["backward"], found["expert_wait"], found["other"]) == (8, 4, 3, 5)
    assert trace.busy_s == 12
    assert mean_seconds([trace]) == {(Activity.FORWARD, 0): 4, (Activity.BACKWARD, 1): 4}


def test_a_recorder_measures_what_ran_within() -> None:
    """Each figure lies between the sleep within it and what a clock outside of it says, on however busy a machine."""
    before = time.perf_counter()
    recorder = Recorder(torch.device("cpu"))
    begin = time.perf_counter()
    with recorder.pipeline(), recorder.record(Activity.FORWARD, 0, 0):
        time.sleep(0.01)
    pipeline_end = time.perf_counter()
    with recorder.record(Activity.OPTIMIZER):
        time.sleep(0.01)
        inner_begin = time.perf_counter()
        with recorder.record(Activity.COLLECTIVE_WAIT):
            time.sleep(0.02)
        inner_end = time.perf_counter()
    optimizer_end = time.perf_counter()
    recorder.stop()
    trace = recorder.trace()
    assert before <= trace.start_s <= begin
    found = trace.account()
    assert sum(found.values()) == pytest.approx(trace.step_s, abs=1e-9)
    assert 0.04 <= trace.step_s <= time.perf_counter() - before
    assert 0.01 <= found["forward"] <= trace.pipeline_s <= pipeline_end - begin
    assert 0.02 <= found["collective_wait"] <= inner_end - inner_begin
    # The wait within the optimizer is taken out of it.
    outside = optimizer_end - pipeline_end - (inner_end - inner_begin)
    assert 0.01 <= found["optimizer"] <= outside + 1e-4


def test_one_clock_keeps_its_distances_and_two_are_brought_together() -> None:
    one = align([100.5, 100.0, 100.25], [7, 7, 7])
    assert one.offsets_s == (0.5, 0.0, 0.25)
    two = align([100.5, 100.0, 3.25, 3.0], [7, 7, 8, 8])
    assert two.offsets_s == (0.5, 0.0, 0.25, 0.0)
    assert one.alignment != two.alignment


def test_ranks_of_one_host_have_one_clock(ranks: RankPool) -> None:
    results = ranks.run(clock_now, 2)
    assert results[0][0] == results[1][0] == clock_id()
    # Both read the clock between the same two barriers.
    assert max(first for _, first, _ in results) <= min(last for _, _, last in results)


def clock_now() -> tuple[int, float, float]:
    before = time.perf_counter()
    dist.barrier()
    return clock_id(), before, time.perf_counter()


class SleepingStage(Stage):
    """Takes FORWARD_S and BACKWARD_S, and hardly any of a core."""

    def forward(self, microbatch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        time.sleep(FORWARD_S)
        return super().forward(microbatch, inputs)

    def backward(
        self, microbatch: int, grad_outputs: Sequence[Tensor] | None, *, defer: bool
    ) -> tuple[Tensor, ...]:
        time.sleep(BACKWARD_S)
        return super().backward(microbatch, grad_outputs, defer=defer)


def sleep_through_steps(num_ranks: int, num_microbatches: int) -> list[Trace]:
    schedule = lower(generate("1f1b", num_ranks, num_microbatches), zero_stage=0)
    mesh = build_mesh(MeshConfig(pipeline_parallel_size=num_ranks))
    module = nn.Linear(2, 2)
    stage = SleepingStage(dist.get_rank(), module, PlainParameters(module))
    runtime = Runtime({stage.index: stage}, schedule, group=mesh.pipeline)
    batch = [torch.ones(1, 2)] * num_microbatches
    traces: list[Trace] = []
    for _ in range(3):
        dist.barrier()
        traces.append(runtime.step(batch, batch, nn.functional.mse_loss, share_losses=False).trace)
    return traces


def test_idle_time_of_a_sleeping_pipeline_is_receive_wait_on_the_right_ranks(ranks: RankPool) -> None:
    """A rank has waited at least until its neighbour's action had ended, and no longer than it did not sleep itself."""
    num_ranks, num_microbatches = 4, 6
    results = ranks.run(sleep_through_steps, num_ranks, num_ranks, num_microbatches)
    own_sleep = num_microbatches * (FORWARD_S + BACKWARD_S)
    for step in range(len(results[0])):
        traces = [of_rank[step] for of_rank in results]
        ends = {
            (rank, interval.activity, interval.microbatch): trace.start_s + interval.end_s
            for rank, trace in enumerate(traces)
            for interval in trace.compute
        }
        for rank, trace in enumerate(traces):
            found = trace.account()
            assert sum(found.values()) == pytest.approx(trace.step_s, abs=1e-6)
            assert min(found.values()) >= 0
            assert trace.peak_live_activations == num_ranks - rank
            assert found["forward"] >= num_microbatches * FORWARD_S
            assert found["backward"] >= num_microbatches * BACKWARD_S
            waits = [each for each in trace.intervals if each.activity is Activity.RECEIVE_WAIT]
            assert len(waits) == num_microbatches * ((rank > 0) + (rank < num_ranks - 1))
            least = sum(
                max(0.0, _neighbour_end(ends, trace, rank, wait) - (trace.start_s + wait.start_s))
                for wait in waits
            )
            assert least - 1e-3 <= found["receive_wait"] <= trace.step_s - own_sleep
        # The last rank's first input has passed three forwards: it waits however late it may have come itself.
        assert traces[-1].account()["receive_wait"] > 0


def _neighbour_end(
    ends: dict[tuple[int, Activity, int | None], float], trace: Trace, rank: int, wait: Interval
) -> float:
    """When the action ended whose message `wait` waited for: the next compute on this rank tells which it was."""
    used_by = next(
        each for each in sorted(trace.compute, key=lambda each: each.start_s) if each.start_s >= wait.end_s
    )
    assert used_by.microbatch == wait.microbatch
    is_forward = used_by.activity is Activity.FORWARD
    sender, activity = (rank - 1, Activity.FORWARD) if is_forward else (rank + 1, Activity.BACKWARD)
    return ends[sender, activity, wait.microbatch]


def held_bytes(num_ranks: int, num_microbatches: int) -> list[int]:
    schedule = lower(generate("dualpipe", num_ranks, num_microbatches), zero_stage=0)
    mesh = build_mesh(MeshConfig(pipeline_parallel_size=num_ranks), mirrored=True)
    stages: dict[int, Stage] = {}
    for index in schedule.stages_of(dist.get_rank()):
        module = nn.Linear(2, 2)
        stages[index] = Stage(index, module, PlainParameters(module, mesh.replica))
    runtime = Runtime(stages, schedule, group=mesh.pipeline)
    batch = [torch.ones(1, 2)] * num_microbatches
    steps = [runtime.step(batch, batch, nn.functional.mse_loss).trace for _ in range(2)]
    return [trace.peak_held_weight_grad_bytes for trace in steps]


def test_bytes_held_for_weight_gradients_are_those_of_the_micro_batches_held(ranks: RankPool) -> None:
    """A deferred Linear(2, 2) on one row keeps its input and its output's gradient: 2 x 2 numbers of 4 bytes."""
    schedule = lower(generate("dualpipe", 4, 8), zero_stage=0)
    peaks = simulate(schedule, Costs()).peak_held_weight_gradients
    assert max(peaks) > 1
    assert ranks.run(held_bytes, 4, 4, 8) == [[16 * peak] * 2 for peak in peaks]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_of_a_device_measure_its_time() -> None:
    device = torch.device("cuda")
    recorder = Recorder(device)
    with recorder.pipeline(), recorder.record(Activity.FORWARD, 0, 0):
        torch.cuda._sleep(20_000_000)
    recorder.stop()
    trace = recorder.trace()
    assert trace.busy_s > 1e-3
    assert sum(trace.account().values()) == pytest.approx(trace.step_s, abs=1e-6)
