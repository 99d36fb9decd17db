"""Overlapped pairs: what hides what, the same gradients, exposed waits measured, errors that end both halves."""

from __future__ import annotations

import contextvars
import logging
import threading
import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis
from counterflow.parallel.groups import new_groups
from counterflow.parallel.mesh import MeshConfig, build_mesh
from counterflow.parallel.pipeline.analysis.passes import lower, why_not_overlapped
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.api import build_pipeline
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.ir.trace import COMPUTE_ACTIVITIES, Activity, Recorder, Trace
from counterflow.parallel.pipeline.runtime.overlap import Half, Interleaver
from counterflow.parallel.pipeline.runtime.plain_parameters import PlainParameters
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.pipeline.schedules.registry import generate
from tests.parallel.pipeline.toy_experts import WIDTH, make_stage
from tests.rank_pool import RankPool

LAYERS = 2
SCHEDULES = ("dualpipe", "dualpipe_v", "interleaved_1f1b")


class FakeWork:
    """A transfer that is complete when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"{self._name} is here")


def fake(log: list[str], name: str) -> dist.Work:
    log.append(f"start {name}")
    return cast(dist.Work, FakeWork(log, name))


def forward(**callables: Callable[[], None]) -> Half:
    return Half(stage=0, microbatch=5, activity=Activity.FORWARD, **callables)


def backward(**callables: Callable[[], None]) -> Half:
    return Half(stage=1, microbatch=2, activity=Activity.BACKWARD, **callables)


def run_pair(interleaver: Interleaver, ahead: Half, back: Half) -> Trace:
    recorder = Recorder(torch.device("cpu"))
    with interleaver.step(recorder):
        interleaver.pair(ahead, back)
    return recorder.trace()


def one_layer(
    interleaver: Interleaver, log: list[str], num_layers: int = 1
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """What a forward and a backward of `num_layers` expert layers do, and how the backward fills a wait."""
    put_off: list[str] = []

    def run_forward() -> None:
        for _ in range(num_layers):
            log.append("attn_F")
            interleaver.wait(fake(log, "dispatch_F"))
            log.append("mlp_F")
            interleaver.wait(fake(log, "combine_F"))

    def run_backward() -> None:
        for _ in range(num_layers):
            interleaver.wait(fake(log, "combine_B"))
            log.append("mlp_B")
            put_off.append("mlp_W")
            interleaver.wait(fake(log, "dispatch_B"))
            log.append("attn_B")
            put_off.append("attn_W")
        fill()

    def fill() -> None:
        log.extend(put_off)
        put_off.clear()

    return run_forward, run_backward, fill


def test_every_transfer_of_a_pair_runs_under_the_other_halfs_computation() -> None:
    """The order of the DualPipe pair: combine_B | attn_F, dispatch_F | mlp_B, dispatch_B | mlp_W + mlp_F, ..."""
    interleaver, log = Interleaver(), []
    run_forward, run_backward, fill = one_layer(interleaver, log)
    run_pair(interleaver, forward(run=run_forward), backward(run=run_backward, fill=fill))
    assert log == [
        "start combine_B",
        "attn_F",
        "start dispatch_F",
        "combine_B is here",
        "mlp_B",
        "start dispatch_B",
        "mlp_W",
        "dispatch_F is here",
        "mlp_F",
        "start combine_F",
        "dispatch_B is here",
        "attn_B",
        "attn_W",
        "combine_F is here",
    ]
    assert interleaver.num_handovers == 4


def test_the_second_of_two_layers_hides_as_the_first_does() -> None:
    interleaver, log = Interleaver(), []
    run_forward, run_backward, fill = one_layer(interleaver, log, num_layers=2)
    run_pair(interleaver, forward(run=run_forward), backward(run=run_backward, fill=fill))
    assert interleaver.num_handovers == 8
    # Between the start of a transfer and the wait for it something was computed, for every one of them.
    started: dict[str, int] = {}
    for index, entry in enumerate(log):
        if entry.startswith("start "):
            started[entry[6:]] = index
        elif entry.endswith(" is here"):
            between = log[started.pop(entry[:-8]) + 1 : index]
            assert any(not each.startswith("start") and not each.endswith("here") for each in between)
    assert not started


def test_halves_of_different_length_both_come_to_their_ends() -> None:
    for layers in ((3, 1), (1, 3), (0, 2), (2, 0)):
        interleaver, log = Interleaver(), []
        run_forward, _, _ = one_layer(interleaver, log, layers[0])
        _, run_backward, fill = one_layer(interleaver, log, layers[1])
        trace = run_pair(interleaver, forward(run=run_forward), backward(run=run_backward, fill=fill))
        assert [log.count(name) for name in ("attn_F", "mlp_F")] == [layers[0]] * 2
        assert [log.count(name) for name in ("mlp_B", "attn_W")] == [layers[1]] * 2
        waits = [each for each in trace.intervals if each.activity is Activity.EXPERT_WAIT]
        assert len(waits) == 2 * sum(layers)


def test_slices_of_a_pair_never_cover_the_same_moment() -> None:
    interleaver = Interleaver()
    run_forward, run_backward, fill = one_layer(interleaver, [], 2)
    trace = run_pair(interleaver, forward(run=run_forward), backward(run=run_backward, fill=fill))
    in_time = sorted(trace.intervals, key=lambda each: each.start_s)
    assert all(one.end_s <= other.start_s for one, other in pairwise(in_time))
    slices = [each for each in in_time if each.activity in COMPUTE_ACTIVITIES]
    assert len(slices) == 10  # five of either half: four points cut it
    halves = [(each.activity, each.stage, each.microbatch) for each in slices]
    assert halves[:4] == [(Activity.BACKWARD, 1, 2), (Activity.FORWARD, 0, 5)] * 2


def test_without_a_pair_a_transfer_is_waited_for_and_counted() -> None:
    interleaver, log = Interleaver(overlap=False), []
    recorder = Recorder(torch.device("cpu"))
    with interleaver.step(recorder):
        interleaver.alone(forward())
        interleaver.wait(fake(log, "a"))
        interleaver.wait(None)
    interleaver.wait(fake(log, "b"))  # outside of a step: nobody counts
    assert log == ["start a", "a is here", "start b", "b is here"]
    (wait,) = recorder.trace().intervals
    assert (wait.activity, wait.stage, wait.microbatch) == (Activity.EXPERT_WAIT, 0, 5)
    assert interleaver.has_points(0)
    assert not interleaver.has_points(1)


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("where", ["first", "between", "last"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_an_error_in_one_half_ends_both_and_is_the_one_raised(where: str, which: str) -> None:
    interleaver, log = Interleaver(), []

    def broken_layer() -> None:
        raise BrokenError("of the user")

    def run(name: str) -> Callable[[], None]:
        def half() -> None:
            for point in ("first", "between", "last"):
                if (name, point) == (which, where):
                    broken_layer()
                interleaver.wait(fake(log, name))
            log.append(f"{name} ends")

        return half

    with pytest.raises(BrokenError, match="of the user") as caught:
        run_pair(interleaver, forward(run=run("forward")), backward(run=run("backward")))
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-2:] == ["half", "broken_layer"]
    failed = "0F5, paired with 1B2" if which == "forward" else "1B2, paired with 0F5"
    assert any(failed in note for note in caught.value.__notes__)
    assert not any(entry.endswith("ends") for entry in log)
    assert threading.active_count() == 1 or all(
        thread.name != "backward half" for thread in threading.enumerate()
    )
    # The next pair knows nothing of it.
    run_forward, run_backward, fill = one_layer(interleaver, log)
    run_pair(interleaver, forward(run=run_forward), backward(run=run_backward, fill=fill))
    assert log[-1] == "combine_F is here"


def test_a_failed_transfer_is_the_error_of_its_half() -> None:
    interleaver = Interleaver()

    class Lost:
        def wait(self) -> None:
            raise RuntimeError("connection closed by peer")

    def run() -> None:
        interleaver.wait(cast(dist.Work, Lost()))

    with pytest.raises(RuntimeError, match="connection closed by peer"):
        run_pair(interleaver, forward(run=run), backward(run=run))


def test_an_interrupt_of_the_forward_ends_the_pair() -> None:
    interleaver = Interleaver()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pair(interleaver, forward(run=interrupted), backward(run=lambda: None))


def test_the_backward_half_sees_the_torch_state_of_its_step() -> None:
    interleaver, seen = Interleaver(), []
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="lost")

    def look() -> None:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        seen.append((torch.is_grad_enabled(), product.dtype, variable.get()))

    variable.set("kept")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        run_pair(interleaver, forward(run=look), backward(run=look))
    run_pair(interleaver, forward(run=look), backward(run=look))
    assert seen == [(False, torch.bfloat16, "kept")] * 2 + [(True, torch.float32, "kept")] * 2
    assert not torch.is_autocast_enabled("cpu")


class Logged(Interleaver):
    """Keeps which half came to a point, in order."""

    def __init__(self, *, overlap: bool) -> None:
        super().__init__(overlap=overlap)
        self.points: list[str] = []

    def wait(self, work: dist.Work | None) -> None:
        self.points.append(str(self.current))
        super().wait(work)


class ToyResult(NamedTuple):
    losses: Tensor
    gradients: dict[str, Tensor]
    points: list[str]
    num_handovers: int
    trace: Trace


def make_batch(rank: int, num_microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(2, 4, WIDTH, generator=generator) for _ in range(num_microbatches)]
    return [inputs for inputs, _ in made], [targets for _, targets in made]


def toy_runtime(
    name: str, num_microbatches: int, overlap: bool, early_sends: bool, num_ranks: int = 2
) -> tuple[Runtime, Logged, int]:
    """`num_ranks` pipeline ranks by two that exchange rows."""
    schedule = lower(
        generate(name, num_ranks, num_microbatches), zero_stage=0, early_sends=early_sends, overlap=overlap
    )
    config = MeshConfig(pipeline_parallel_size=num_ranks, data_parallel_size=2, expert_parallel_size=2)
    mesh = build_mesh(config, mirrored=schedule.num_directions > 1)
    point, axis = Logged(overlap=overlap), Axis(group=mesh.expert, name="expert")
    stages: dict[int, Stage] = {}
    for index in schedule.stages_of(mesh.coordinate.pipeline):
        module = make_stage(index, LAYERS, axis, point)
        stages[index] = Stage(index, module, PlainParameters(module, mesh.expert_replica))
    return Runtime(stages, schedule, group=mesh.pipeline, interleaver=point), point, axis.rank


def run_toy(name: str, num_microbatches: int, overlap: bool, early_sends: bool) -> ToyResult:
    runtime, point, rank = toy_runtime(name, num_microbatches, overlap, early_sends)
    result = runtime.step(*make_batch(rank, num_microbatches), nn.functional.mse_loss)
    gradients = {
        f"{index}.{key}": parameter.grad
        for index, stage in runtime.stages.items()
        for key, parameter in stage.module.named_parameters()
        if parameter.grad is not None
    }
    return ToyResult(result.losses, gradients, point.points, point.num_handovers, result.trace)


def reference(num_stages: int, num_microbatches: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Both ranks of the exchange in one process, by plain autograd: losses and gradients of each."""

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank, self.size, self.group = rank, 2, None

    models = [
        [make_stage(index, LAYERS, cast(Any, Rank(rank)), Interleaver()) for index in range(num_stages)]
        for rank in range(2)
    ]
    batches = [make_batch(rank, num_microbatches) for rank in range(2)]
    losses = [torch.zeros(num_microbatches) for _ in range(2)]
    for number in range(num_microbatches):
        x = [batches[rank][0][number] for rank in range(2)]
        for index in range(num_stages):
            for number_of_layer in range(LAYERS):
                layers = [cast(Any, models[rank][index])[number_of_layer] for rank in range(2)]
                x = [
                    value + layer.attention(layer.norm(value)).tanh()
                    for value, layer in zip(x, layers, strict=True)
                ]
                halves = [value.chunk(2) for value in x]
                made = [
                    layers[rank].expert(torch.cat([half[rank] for half in halves])).tanh().chunk(2)
                    for rank in range(2)
                ]
                x = [x[rank] + torch.cat([of[rank] for of in made]) for rank in range(2)]
        of_ranks = [nn.functional.mse_loss(x[rank], batches[rank][1][number]) for rank in range(2)]
        for rank in range(2):
            losses[rank][number] = of_ranks[rank].detach()
        (sum(of_ranks) / num_microbatches).backward()  # type: ignore[union-attr]
    gradients = [
        {
            f"{index}.{key}": parameter.grad
            for index, stage in enumerate(models[rank])
            for key, parameter in stage.named_parameters()
            if parameter.grad is not None
        }
        for rank in range(2)
    ]
    return losses, gradients


@pytest.mark.parametrize("name", SCHEDULES)
def test_overlapped_steps_have_the_gradients_of_one_process(ranks: RankPool, name: str) -> None:
    num_microbatches = 6
    losses, gradients = reference(2 if name == "dualpipe" else 4, num_microbatches)
    plain = ranks.run(run_toy, 4, name, num_microbatches, False, True)
    for early_sends in (True, False):
        results = ranks.run(run_toy, 4, name, num_microbatches, True, early_sends)
        for rank, (found, without) in enumerate(zip(results, plain, strict=True)):
            expert_rank = rank % 2
            torch.testing.assert_close(found.losses, losses[expert_rank], rtol=1e-5, atol=1e-6)
            for key, gradient in found.gradients.items():
                torch.testing.assert_close(gradient, gradients[expert_rank][key], rtol=1e-5, atol=1e-6)
                # Not a bit differs: the weight gradients of a layer are added up in the same order.
                assert torch.equal(gradient, without.gradients[key]), key


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_that_exchange_rows_come_to_the_same_points_in_the_same_order(
    ranks: RankPool, name: str
) -> None:
    results = ranks.run(run_toy, 4, name, 6, True, True)
    schedule = lower(generate(name, 2, 6), zero_stage=0, early_sends=True, overlap=True)
    for first, second in (results[:2], results[2:]):
        assert first.points == second.points
        stages_of_a_rank = 1 if name == "dualpipe" else 2  # of two, micro-batches take one each
        assert len(first.points) == 4 * LAYERS * 6 * stages_of_a_rank
    for pipeline_rank in range(2):
        found = results[2 * pipeline_rank]
        pairs = [each for each in schedule.actions[pipeline_rank] if each.kind is Kind.OVERLAP_F_B]
        assert pairs
        # Halves that ran one after the other would hand nothing over.
        assert found.num_handovers == len(pairs) * 4 * LAYERS
        for pair in pairs:
            ahead, back = pair.parts
            at = [index for index, point in enumerate(found.points) if point == str(ahead)]
            assert found.points[at[0] - 1 : at[-1] + 1] == [str(back), str(ahead)] * (2 * LAYERS)
        account = found.trace.account()
        assert sum(account.values()) == pytest.approx(found.trace.step_s, abs=1e-6)
        assert account["expert_wait"] > 0
        most = max(simulate(schedule, Costs()).peak_activations)
        assert found.trace.peak_live_activations <= most


def step_with_a_fault(name: str, faulty_half: str) -> tuple[str, list[str], bool]:
    """A step in which a layer of both ranks breaks: what is raised, its notes, whether a thread is left."""
    runtime, _, rank = toy_runtime(name, 6, True, True, num_ranks=1)
    calls = 0

    def break_down(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise BrokenError("a layer of the user")

    module = runtime.stages[min(runtime.stages)].module
    layer = cast(nn.Sequential, module)[0]
    if faulty_half == "forward":
        layer.register_forward_pre_hook(break_down)
    else:
        layer.register_full_backward_hook(break_down)
    batch = make_batch(rank, 6)
    try:
        runtime.step(*batch, nn.functional.mse_loss)
    except BrokenError as error:
        notes = list(error.__notes__)
        alive = any(thread.name == "backward half" for thread in threading.enumerate())
        return str(error), notes, alive
    return "nothing was raised", [], False


@pytest.mark.parametrize("faulty_half", ["forward", "backward"])
def test_a_fault_within_a_step_is_raised_with_its_action(ranks: RankPool, faulty_half: str) -> None:
    for message, notes, alive in ranks.run(step_with_a_fault, 2, "dualpipe_v", faulty_half, timeout_s=30.0):
        assert message == "a layer of the user"
        assert any("OVERLAP_F_B" in note for note in notes), notes
        assert not alive


def held_bytes(overlap: bool) -> tuple[int, list[int]]:
    runtime, _, rank = toy_runtime("dualpipe", 6, overlap, False)
    result = runtime.step(*make_batch(rank, 6), nn.functional.mse_loss)
    stores = [stage.weight_grads for stage in runtime.stages.values()]
    assert all(store.is_empty and store.held_bytes == 0 for store in stores)
    return result.trace.peak_held_weight_grad_bytes, [store.peak_held_bytes for store in stores]


def test_what_a_paired_backward_puts_off_is_counted(ranks: RankPool) -> None:
    """At its last point a layer's expert keeps x and dy of its two linears, four rows of fp32; attention keeps less.

    This schedule defers nothing else.
    """
    for overlap, expected in ((True, 4 * 4 * (WIDTH + 2 * WIDTH) * 2), (False, 0)):
        for peak, of_stores in ranks.run(held_bytes, 4, overlap):
            assert peak == max(of_stores) == expected


def step_of_a_library_pipeline(overlap: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    """One pipeline rank of two stages beside another one, with which it exchanges rows."""
    point, axis = Interleaver(overlap=overlap), Axis(group=dist.group.WORLD, name="expert")
    pipeline = build_pipeline(
        lambda index: make_stage(index, LAYERS, axis, point),
        "dualpipe_v",
        num_microbatches=6,
        group=new_groups([[rank] for rank in range(dist.get_world_size())], "alone"),
        interleaver=point,
    )
    losses = pipeline.step(*make_batch(axis.rank, 6), nn.functional.mse_loss).losses
    gradients = {
        f"{index}.{key}": parameter.grad
        for index, module in pipeline.modules.items()
        for key, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return losses, gradients, point.num_handovers


def test_a_library_pipeline_overlaps_where_it_is_given_an_interleaver(ranks: RankPool) -> None:
    together, apart = (ranks.run(step_of_a_library_pipeline, 2, overlap) for overlap in (True, False))
    expected, gradients = reference(2, 6)
    for rank, ((losses, found, switched), (_, without, never)) in enumerate(
        zip(together, apart, strict=True)
    ):
        torch.testing.assert_close(losses, expected[rank], rtol=1e-5, atol=1e-6)
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[rank][key], rtol=1e-5, atol=1e-6)
            assert torch.equal(gradient, without[key])
        assert switched > 0
        assert never == 0


def warnings_of(name: str) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("counterflow.parallel.pipeline.runtime.runtime").addHandler(handler)
    for overlap in (True, False):
        toy_runtime(name, 6, overlap, True)
    return heard


def test_one_rank_says_that_a_schedule_cannot_overlap(ranks: RankPool) -> None:
    said = ranks.run(warnings_of, 4, "zbv")
    assert [len(of_rank) for of_rank in said] == [1, 0, 0, 0]
    assert "schedule zbv has no pairs" in said[0][0]
    assert ranks.run(warnings_of, 4, "dualpipe_v") == [[]] * 4


def test_a_schedule_without_pairs_is_named() -> None:
    assert why_not_overlapped(generate("dualpipe", 2, 4)) is None
    assert "zbv" in (why_not_overlapped(generate("zbv", 2, 4)) or "")
    plain = generate("interleaved_1f1b", 2, 4)
    assert why_not_overlapped(plain) is not None
    assert why_not_overlapped(lower(plain, zero_stage=0, overlap=True)) is None
