"""PowerSGD: what goes as factors, what they cannot lose, and what they save on the gradients of a model."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.launch.compose import compose_config
from counterflow.models.transformer import TransformerStage
from counterflow.parallel.collectives import Axis
from counterflow.parallel.compress.powersgd import PowerSGDReduction, plan_factors
from counterflow.parallel.compress.reduction import fp32_bytes
from tests.rank_pool import RankPool

SHAPES = ((20, 30), (7,), (2, 16, 12), (3, 3), (9,))
NUM_ELEMENTS = sum(map(math.prod, SHAPES)) + 3


def test_matrices_go_as_factors_and_the_rest_whole() -> None:
    plan = plan_factors(SHAPES, 2)
    assert [(each.start, each.num, each.rows, each.columns, each.rank) for each in plan.matrices] == [
        (0, 1, 20, 30, 2),
        (607, 2, 16, 12, 2),
    ]
    # The small matrix would not gain; it and the vector behind it are one range.
    assert plan.vectors == ((600, 607), (991, 1009))
    assert (plan.num_left, plan.num_right) == (2 * 20 + 2 * 2 * 16, 2 * 30 + 2 * 2 * 12)


def low_rank(rank: int) -> Tensor:
    """A buffer whose matrices have rank 1."""
    generator = torch.Generator().manual_seed(rank)
    buffer = torch.randn(NUM_ELEMENTS, generator=generator)
    for each in plan_factors(SHAPES, 2).matrices:
        left = torch.randn(each.num, each.rows, 1, generator=generator)
        right = torch.randn(each.num, 1, each.columns, generator=generator)
        each.of(buffer).copy_(left @ right)
    return buffer


def sum_of_low_rank(is_everywhere: bool) -> tuple[Tensor, float]:
    axis = Axis(group=dist.group.WORLD)
    reduce = PowerSGDReduction(plan_factors(SHAPES, 2), axis, num_elements=NUM_ELEMENTS)
    buffer, out = low_rank(axis.rank), torch.empty(NUM_ELEMENTS // 2)
    report = reduce.start(buffer, None if is_everywhere else out).wait()
    return buffer if is_everywhere else out, report.relative_error


def test_a_sum_of_that_rank_is_exact(ranks: RankPool) -> None:
    """Two matrices of rank 1 have a sum of rank 2, which two columns hold."""
    expected = low_rank(0) + low_rank(1)
    expected[-3:] = 0  # padding
    everywhere = ranks.run(sum_of_low_rank, 2, True)
    own_ranges = ranks.run(sum_of_low_rank, 2, False)
    torch.testing.assert_close(everywhere[0][0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([part for part, _ in own_ranges]), expected, rtol=1e-4, atol=1e-4)
    assert all(error < 1e-4 for _, error in everywhere)


def test_the_factor_kept_makes_the_next_sum_better(ranks: RankPool) -> None:
    first, last = ranks.run(repeated, 2)[0]
    assert last < 0.9 * first


def repeated() -> tuple[float, float]:
    """Without error feedback: how much of a matrix of falling singular values the first sum and the tenth lose."""
    axis = Axis(group=dist.group.WORLD)
    matrix = torch.randn(24, 24, generator=torch.Generator().manual_seed(5))
    matrix = torch.linalg.qr(matrix).Q @ torch.diag(0.8 ** torch.arange(24.0)) @ matrix
    reduce = PowerSGDReduction(plan_factors([(24, 24)], 2), axis, num_elements=576, error_feedback=False)
    errors = [reduce.start(matrix.flatten().clone(), None).wait().relative_error for _ in range(10)]
    return errors[0], errors[-1]


@pytest.mark.parametrize(("name", "least"), [("tiny", 20.0), ("small", 40.0), ("llama3_8b", 300.0)])
def test_bytes_on_the_gradients_of_a_model(name: str, least: float) -> None:
    model = compose_config([f"model={name}"]).model
    module = TransformerStage(
        model,
        range(model.num_layers),
        first=True,
        last=True,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=model.vocab_size or 4096,
        device="meta",
    )
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    plan = plan_factors(shapes, 4)
    num_sent = plan.num_left + plan.num_whole + plan.num_right
    assert sum(map(math.prod, shapes)) / num_sent > least


def test_bytes_by_hand() -> None:
    assert fp32_bytes(800, 4, is_everywhere=False) == 3 * 800
    assert fp32_bytes(800, 4, is_everywhere=True) == 2 * 3 * 800
