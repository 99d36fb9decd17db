"""What a user changes in a stage after the pipeline was built, or within a forward."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterflow.parallel.pipeline.api import build_pipeline
from tests.rank_pool import RankPool

WIDTH = 4


class Stage(nn.Module):
    def __init__(self, index: int, within: Callable[[Stage, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.a, self.norm, self.within = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), within

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.within is None else self.within(self, x)


def replace_weight(stage: Stage) -> None:
    stage.a.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def add_adapter(stage: Stage) -> None:
    stage.adapter = nn.Linear(WIDTH, 2, bias=False)


def freeze(stage: Stage) -> None:
    stage.a.weight.requires_grad_(False)


def step_after(change: Callable[[Stage], None], schedule: str) -> list[tuple[int, dict[str, Tensor | None]]]:
    """The gradients by stage, of a step after `change`."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    with build_pipeline(Stage, schedule, num_microbatches=4) as pipeline:
        for module in pipeline.modules.values():
            change(module)  # type: ignore[arg-type]
        pipeline.step(x, x, F.mse_loss)
        return [
            (index, {name: parameter.grad for name, parameter in module.named_parameters()})
            for index, module in pipeline.modules.items()
        ]


@pytest.mark.parametrize(
    ("change", "name"), [(replace_weight, r"a\.weight"), (add_adapter, r"adapter\.weight")]
)
def test_two_copies_refuse_parameters_that_came_later(
    ranks: RankPool, change: Callable[[Stage], None], name: str
) -> None:
    with pytest.raises(AssertionError, match=f"ValueError: {name}: not a parameter .*build it anew"):
        ranks.run(step_after, 2, change, "dualpipe")


@pytest.mark.parametrize(
    ("change", "schedule"),
    [(replace_weight, "zb1p"), (add_adapter, "1f1b"), (freeze, "zb1p"), (freeze, "dualpipe")],
)
def test_other_changes_between_steps_are_those_of_plain_torch(
    ranks: RankPool, change: Callable[[Stage], None], schedule: str
) -> None:
    model = nn.Sequential(Stage(0), Stage(1))
    for stage in model:
        change(stage)  # type: ignore[arg-type]
    for x in torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3)).chunk(4):
        (F.mse_loss(model(x), x) / 4).backward()
    for of_rank in ranks.run(step_after, 2, change, schedule):
        for index, found in of_rank:
            wanted = {name: parameter.grad for name, parameter in model[index].named_parameters()}
            torch.testing.assert_close(found, wanted)


def shrink(stage: Stage, x: Tensor) -> Tensor:
    y = stage.a(torch.tanh(x))
    with torch.no_grad():
        stage.a.weight.mul_(0.9)
    return y


def test_a_weight_that_changes_before_the_backward_is_an_error_as_in_plain_torch() -> None:
    x = torch.ones(2, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        shrink(Stage(0), x).sum().backward()
    with (
        build_pipeline(lambda index: Stage(index, shrink), "1f1b", num_microbatches=1) as pipeline,
        pytest.raises(RuntimeError, match=r"the weight \[4, 4\] of a linear layer was changed in place"),
    ):
        pipeline.step(x, x.detach(), F.mse_loss)


def normed(stage: Stage, x: Tensor) -> Tensor:
    return stage.norm(stage.a(x))


def said_by_two_steps(schedule: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    package = logging.getLogger("counterflow.parallel.pipeline")
    package.addHandler(handler)
    try:
        with build_pipeline(lambda index: Stage(index, normed), schedule, num_microbatches=4) as pipeline:
            for _ in range(2):
                pipeline.step(torch.randn(8, WIDTH), torch.randn(8, WIDTH), F.mse_loss)
    finally:
        package.removeHandler(handler)
    return [each for each in said if "changes" in each]


def test_buffers_that_two_copies_change_apart_are_said_once(ranks: RankPool) -> None:
    assert ranks.run(said_by_two_steps, 2, "1f1b") == [[], []]
    for said in ranks.run(said_by_two_steps, 2, "dualpipe"):
        assert len(said) == 2  # of two stages
        assert all("changes norm.num_batches_tracked:" in each for each in said)
