"""Learning rates against hand-computed values and the schedulers of torch and transformers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_wsd_schedule,
)

from counterflow.framework.optim.lr import LearningRateConfig, learning_rate

BASE = 3e-3


def rates(config: LearningRateConfig, total_steps: int, data_parallel_size: int = 1) -> list[float]:
    return [learning_rate(config, step, total_steps, BASE, data_parallel_size) for step in range(total_steps)]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)


def after_each_step(scheduler: LRScheduler, steps: int) -> list[float]:
    """What the scheduler holds once 1, 2, ... steps are done."""
    found: list[float] = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    return found


def test_cosine_by_hand() -> None:
    config = LearningRateConfig(name="cosine", warmup_steps=2, min_ratio=0.2)
    found = rates(config, 6)
    expected = [0.5, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2]
    assert found == pytest.approx([BASE * factor for factor in expected], rel=1e-12)


def test_wsd_by_hand() -> None:
    config = LearningRateConfig(name="wsd", warmup_steps=4, decay_steps=2, min_ratio=0.0)
    assert rates(config, 8) == pytest.approx(
        [BASE * factor for factor in (0.25, 0.5, 0.75, 1, 1, 1, 0.5, 0)], rel=1e-12
    )


def test_sqrt_data_parallel_scales_the_base_rate() -> None:
    plain = LearningRateConfig(name="constant", warmup_steps=0)
    scaled = LearningRateConfig(name="constant", warmup_steps=0, scale="sqrt_data_parallel")
    assert learning_rate(plain, 0, 10, BASE, 16) == BASE
    assert learning_rate(scaled, 0, 10, BASE, 16) == 4 * BASE


@pytest.mark.parametrize(("warmup", "total"), [(0, 30), (1, 30), (7, 30)])
def test_cosine_matches_transformers(warmup: int, total: int) -> None:
    config = LearningRateConfig(name="cosine", warmup_steps=warmup, min_ratio=0.1)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer(), warmup, total, min_lr_rate=0.1)
    assert rates(config, total) == pytest.approx(after_each_step(theirs, total), rel=1e-9)


def test_cosine_matches_torch() -> None:
    config = LearningRateConfig(name="cosine", warmup_steps=5, min_ratio=0.1)
    sgd = optimizer()
    theirs = SequentialLR(
        sgd,
        [
            LinearLR(sgd, start_factor=1e-12, total_iters=5),
            CosineAnnealingLR(sgd, T_max=20, eta_min=0.1 * BASE),
        ],
        milestones=[5],
    )
    assert rates(config, 25) == pytest.approx(after_each_step(theirs, 25), rel=1e-9)


def test_wsd_matches_transformers() -> None:
    config = LearningRateConfig(name="wsd", warmup_steps=5, decay_steps=8, min_ratio=0.0)
    theirs = get_wsd_schedule(optimizer(), 5, 8, num_training_steps=30, decay_type="linear")
    assert rates(config, 30) == pytest.approx(after_each_step(theirs, 30), rel=1e-9, abs=1e-15)


def test_constant_matches_transformers() -> None:
    config = LearningRateConfig(name="constant", warmup_steps=5)
    theirs = get_constant_schedule_with_warmup(optimizer(), 5)
    assert rates(config, 12) == pytest.approx(after_each_step(theirs, 12), rel=1e-9)


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(10, 3), (10, 10), (0, 1)])
def test_a_run_shorter_than_its_schedule_has_rates(name: str, warmup: int, total: int) -> None:
    config = LearningRateConfig(name=name, warmup_steps=warmup, decay_steps=20)  # type: ignore[arg-type]
    assert all(0 < rate <= BASE for rate in rates(config, total))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"warmup_steps": -1}, r"warmup_steps=-1: .*0 or more"),
        ({"decay_steps": -2}, r"decay_steps=-2: .*0 or more"),
        ({"min_ratio": 1.5}, r"min_ratio=1.5: .*from 0 to 1"),
    ],
)
def test_refusals(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearningRateConfig(**values)  # type: ignore[arg-type]
