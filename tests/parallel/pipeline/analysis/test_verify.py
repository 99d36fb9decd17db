"""What the verifier says: the rule, the action, the grid. That it says it when it should is test_mutation.py."""

from __future__ import annotations

import time

import pytest

from counterflow.parallel.pipeline.analysis.passes import forward_only, lower
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.analysis.verify import Report, ScheduleError, verify
from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.parallel.pipeline.analysis.test_passes import parse


def test_report_of_dualpipe() -> None:
    report = verify(lower(generate("dualpipe", 8, 20), zero_stage=3))
    assert report == Report(
        executable=True,
        peak_activations=(9,) * 8,
        peak_held_weight_gradients=(1, 2, 3, 4, 4, 3, 2, 1),
        peak_unsharded_stages=(2,) * 8,
        num_messages=20 * 7 * 2,
    )


def test_report_of_1f1b() -> None:
    report = verify(generate("1f1b", 4, 8))
    assert report.executable is False
    assert report.peak_activations == (4, 3, 2, 1)
    assert report.peak_held_weight_gradients == (0, 0, 0, 0)
    assert report.num_messages == 0


def test_the_memory_bound_holds() -> None:
    verify(generate("dualpipe", 4, 8), max_live_activations=5)
    with pytest.raises(ScheduleError, match=r"rank 0 holds 5 live activations at once, the bound is 4"):
        verify(generate("dualpipe", 4, 8), max_live_activations=4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ("0F0 0B0", "1F0"),
            r"input gradient of stage 1 for micro-batch 0 \(1B0 or 1I0\) is never computed on rank 1",
        ),
        (("0F0 0B0 0F0", "1F0 1B0"), r"activation of stage 0 .* is computed twice \(rank 0, step 2: 0F0\)"),
        (("0F0 0B0 0W0", "1F0 1B0"), "weight gradient of stage 0 .* is computed twice"),
        (
            ("0F0 0B0", "1F0 1I0"),
            r"weight gradient of stage 1 for micro-batch 0 \(1B0 or 1W0\) is never computed",
        ),
        (("0F0 0B0 1F0", "1B0"), "1F0 is on rank 0, its stage is on rank 1"),
        (("0F0 0B0", "1B0 1F0"), "rank 1 at 1B0 waits for 1F0 of rank 1"),
        (("0F0 0W0 0I0", "1F0 1B0"), "rank 0 at 0W0 waits for 0I0 of rank 0"),
        (("0F0 0B0 2F0", "1F0 1B0"), r"2F0 is on a stage outside 0\.\.1"),
        (("0F0 0B0 0F1", "1F0 1B0"), r"0F1 has a micro-batch outside 0\.\.0"),
        (("0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD", "1RECV_F0 1F0 1B0 1REDUCE_GRAD"), "1SEND_B0 is missing"),
        (
            ("0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD", "1RECV_F0 1F0 1B0 1SEND_B0"),
            r"rank 1 never reduces the gradients of stage 1 \(1REDUCE_GRAD\)",
        ),
        (
            ("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0 0REDUCE_GRAD", "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD"),
            r"0SEND_B0 carries nothing that another rank needs",
        ),
        (
            ("0F0 0SEND_F0 0RECV_B0 0REDUCE_GRAD 0B0", "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD"),
            "0B0 comes after the reduction of stage 0",
        ),
        (
            (
                "0UNSHARD 0F0 0SEND_F0 0RESHARD 0RECV_B0 0B0 0REDUCE_GRAD",
                "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
            ),
            "0B0 uses stage 0 while it is sharded",
        ),
        (
            (
                "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD",
                "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
            ),
            "rank 0 ends with stage 0 unsharded",
        ),
    ],
)
def test_messages(rows: tuple[str, str], message: str) -> None:
    schedule = parse(*rows, placement=((0, 1),), microbatches=1)
    with pytest.raises(ScheduleError, match=message) as error:
        verify(schedule)
    assert "rank 0" in str(error.value)
    assert "step 0" in str(error.value)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ("0F0 0SEND_F0 0RECV_B0 0B0 0OFFLOAD0", "0OFFLOAD0 moves out what is not there"),
        ("0OFFLOAD0 0F0 0SEND_F0 0RELOAD0 0RECV_B0 0B0", "0OFFLOAD0 moves out what is not there"),
        ("0F0 0SEND_F0 0OFFLOAD0 0OFFLOAD0 0RELOAD0 0RECV_B0 0B0", "moves out what is out already"),
        ("0F0 0SEND_F0 0RELOAD0 0RECV_B0 0B0", "0RELOAD0 brings back what is not out"),
        (
            "0F0 0SEND_F0 0OFFLOAD0 0RECV_B0 0B0 0RELOAD0",
            r"0B0 uses activations that are out \(RELOAD is missing",
        ),
        ("0F0 0SEND_F0 0OFFLOAD0 0RELOAD0 0RECV_B0 0B0", None),
    ],
)
def test_activations_are_back_before_their_use(moves: str, message: str | None) -> None:
    other = "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD"
    schedule = parse(f"{moves} 0REDUCE_GRAD", other, placement=((0, 1),), microbatches=1)
    if message is None:
        verify(schedule)
        return
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


def test_one_channel_has_one_order() -> None:
    schedule = lower(generate("gpipe", 2, 2), zero_stage=0)
    actions = list(schedule.actions[1])
    first, second = actions.index(Action.parse("1RECV_F0")), actions.index(Action.parse("1RECV_F1"))
    actions[first], actions[second] = actions[second], actions[first]
    with pytest.raises(ScheduleError, match="rank 0 sends 0SEND_F0 where rank 1 receives 1RECV_F1"):
        verify(schedule.with_actions([schedule.actions[0], actions]))


def test_mirror_ranks_have_one_order_of_collectives() -> None:
    schedule = lower(generate("dualpipe", 4, 8), zero_stage=3)
    actions = list(schedule.actions[3])
    reductions = [index for index, action in enumerate(actions) if action.kind is Kind.REDUCE_GRAD]
    actions.append(actions.pop(reductions[0]))
    with pytest.raises(ScheduleError, match="ranks 0 and 3 hold copies of the same stages"):
        verify(schedule.with_actions([*schedule.actions[:3], actions]))


def test_a_placement_that_does_not_fit() -> None:
    schedule = Schedule(
        name="odd", num_stages=2, num_microbatches=3, placement=((0, 1), (1, 0)), actions=((), ())
    )
    with pytest.raises(ScheduleError, match="3 micro-batches are no equal shares of 2 directions"):
        verify(schedule)
    with pytest.raises(ScheduleError, match="does not put 2 stages on 2 ranks"):
        verify(parse("0F0", "1F0", placement=((0, 2),), microbatches=1))


def test_the_grid_is_cut_around_the_action() -> None:
    schedule = generate("1f1b", 32, 64)
    actions = [list(of_rank) for of_rank in schedule.actions]
    del actions[20][100]
    with pytest.raises(ScheduleError) as error:
        verify(schedule.with_actions(actions))
    assert len(str(error.value).splitlines()) < 50
    assert max(map(len, str(error.value).splitlines())) < 220


def test_time_is_linear() -> None:
    """Eight times the actions take far less than 64 times as long."""

    def seconds(num_microbatches: int) -> float:
        schedule = lower(generate("1f1b", 8, num_microbatches), zero_stage=3)
        times: list[float] = []
        for _ in range(3):
            start = time.process_time()
            verify(schedule)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(512) < 24 * seconds(64)


@pytest.mark.parametrize("name", sorted(generated_schedules()))
def test_a_schedule_of_evaluation(name: str) -> None:
    """What `Runtime.evaluate` executes is proven with `forward_only`, and is incomplete without."""
    executable = lower(generate(name, 4, 8), zero_stage=3)
    evaluation = forward_only(executable)
    report = verify(evaluation, forward_only=True)
    assert report.executable
    assert max(report.peak_activations) == 0
    with pytest.raises(ScheduleError, match="never computed"):
        verify(evaluation)
    with pytest.raises(ScheduleError, match="is of a backward, in an evaluation"):
        verify(executable, forward_only=True)


def test_mutants_of_an_evaluation_are_rejected() -> None:
    evaluation = forward_only(lower(generate("1f1b", 3, 3), zero_stage=3))
    for rank, actions in enumerate(evaluation.actions):
        for index in range(len(actions)):
            rest = [*evaluation.actions]
            rest[rank] = actions[:index] + actions[index + 1 :]
            with pytest.raises(ScheduleError):
                verify(evaluation.with_actions(rest), forward_only=True)


def test_a_failure_has_its_place() -> None:
    with pytest.raises(ScheduleError) as error:
        verify(parse("0F0 0B0 0F0", "1F0 1B0", placement=((0, 1),), microbatches=1))
    assert error.value.place == (0, 2)
    assert error.value.rule.startswith("the activation of stage 0")
    assert "\n" not in error.value.rule


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_a_large_schedule_is_fast(name: str) -> None:
    """Generation, proof and simulation of 64 ranks and 512 micro-batches, in CPU time; the best of three."""
    times: list[float] = []
    for _ in range(3):
        start = time.process_time()
        schedule = generate(name, 64, 512)
        verify(schedule)
        simulate(schedule, Costs())
        times.append(time.process_time() - start)
    assert min(times) < 1.0


@pytest.mark.slow
def test_a_very_large_schedule_takes_seconds() -> None:
    start = time.process_time()
    schedule = generate("1f1b", 256, 2048)
    verify(schedule)
    simulate(schedule, Costs())
    assert time.process_time() - start < 10
