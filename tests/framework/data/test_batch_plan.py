"""The batch of every step: against a walk, sample by sample, by the published rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.framework.data.batch_plan import BatchPlan, BatchRampConfig, StepBatch


def test_without_a_ramp_every_step_is_alike() -> None:
    plan = BatchPlan(num_microbatches=8, samples_per_microbatch=3)
    assert plan.at(0) == StepBatch(8, 0, 24)
    assert plan.at(7) == StepBatch(8, 168, 24)
    assert plan.batches_before(7) == 7.0


def test_a_ramp_by_hand() -> None:
    """From 4 to 8 samples in 20: sizes 4 and 6 for 10 samples each, to the end of the step that passes them."""
    ramp = BatchRampConfig(start_num_microbatches=2, increment=1, ramp_samples=20)
    plan = BatchPlan(num_microbatches=4, samples_per_microbatch=2, ramp=ramp)
    sizes = [plan.at(step).num_samples for step in range(7)]
    assert sizes == [4, 4, 4, 6, 6, 8, 8]
    assert [plan.samples_before(step) for step in range(7)] == [0, 4, 8, 12, 18, 24, 32]
    assert plan.batches_before(5) == 3.0


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 6), st.integers(1, 5), st.integers(1, 300))
def test_it_is_the_published_rule(
    start: int, increment: int, rises: int, width: int, ramp_samples: int
) -> None:
    """Megatron-LM's: of the samples read so far, how often the ramp's share of one rise went into them."""
    ramp = BatchRampConfig(start_num_microbatches=start, increment=increment, ramp_samples=ramp_samples)
    plan = BatchPlan(num_microbatches=start + rises * increment, samples_per_microbatch=width, ramp=ramp)
    position = 0
    for step in range(60):
        passed = position * rises // ramp_samples if position <= ramp_samples else rises
        count = start + min(passed, rises) * increment
        assert plan.at(step) == StepBatch(count, position, count * width)
        position += count * width


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"start_num_microbatches": 2}, r"training\.batch_ramp\.ramp_samples=null: a ramp has"),
        ({"ramp_samples": 9}, r"training\.batch_ramp\.start_num_microbatches=null: a ramp has"),
        ({"start_num_microbatches": 0, "ramp_samples": 9}, r"start_num_microbatches=0: set it to 1 or more"),
        (
            {"start_num_microbatches": 1, "ramp_samples": 9, "increment": 0},
            r"increment=0: set it to 1 or more",
        ),
    ],
)
def test_half_a_ramp_is_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchRampConfig(**values)


@pytest.mark.parametrize(("start", "increment"), [(9, 1), (3, 2)])
def test_a_ramp_that_misses_its_end_is_refused(start: int, increment: int) -> None:
    ramp = BatchRampConfig(start_num_microbatches=start, increment=increment, ramp_samples=20)
    with pytest.raises(ValueError, match=r"do not lead from it to schedule\.num_microbatches=8"):
        BatchPlan(num_microbatches=8, samples_per_microbatch=1, ramp=ramp)
