"""The pipeline as a library: a user's own modules and loop."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.parallel.pipeline.api import build_pipeline
from counterflow.parallel.pipeline.ir.action import Action, Schedule
from counterflow.parallel.pipeline.schedules.registry import generate
from tests.commands import Started, free_port
from tests.rank_pool import RankPool

ROOT = Path(__file__).parents[3]
WIDTH = 4


class TwoTensors(nn.Module):
    """Passes an integer tensor along beside the activation."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) * scale.unsqueeze(-1), scale


def first_of(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[0], target)


def tuple_batch() -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        (torch.randn(2, WIDTH, generator=generator), torch.tensor([1, 2 + index])) for index in range(4)
    ]
    return inputs, [torch.randn(2, WIDTH, generator=generator) for _ in range(4)]


def run_tuples(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    pipeline = build_pipeline(TwoTensors, name, num_microbatches=4)
    inputs, targets = tuple_batch()
    losses = pipeline.step(inputs, targets, first_of).losses
    gradients = {
        f"{index}.{key}": parameter.grad
        for index, module in pipeline.modules.items()
        for key, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return losses, gradients


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_stages_may_pass_several_tensors(ranks: RankPool, name: str) -> None:
    model = nn.ModuleList([TwoTensors(0), TwoTensors(1)])
    losses: list[Tensor] = []
    for (x, scale), target in zip(*tuple_batch(), strict=True):
        for stage in model:
            x, scale = stage(x, scale)
        losses.append(nn.functional.mse_loss(x, target))
    torch.stack(losses).mean().backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    for found, gradients in ranks.run(run_tuples, 2, name):
        torch.testing.assert_close(found, torch.stack(losses).detach())
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[key])


def copies_of_a_stage() -> dict[int, Tensor]:
    torch.manual_seed(dist.get_rank())  # the user's modules start differently on every rank
    pipeline = build_pipeline(lambda index: nn.Linear(WIDTH, WIDTH), "dualpipe", num_microbatches=4)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        inputs = torch.randn(8, WIDTH)
        optimizer.zero_grad()
        pipeline.step(inputs, inputs, nn.functional.mse_loss)
        optimizer.step()
    return {index: module.weight.detach() for index, module in pipeline.modules.items()}  # type: ignore[misc]


def test_copies_of_a_stage_stay_equal(ranks: RankPool) -> None:
    first, second = ranks.run(copies_of_a_stage, 2)
    for stage in (0, 1):
        assert torch.equal(first[stage], second[stage])


def test_one_process_needs_no_process_group() -> None:
    pipeline = build_pipeline(lambda index: nn.Linear(WIDTH, WIDTH), "1f1b", num_microbatches=2)
    inputs = torch.randn(4, WIDTH)
    result = pipeline.step(inputs, inputs, nn.functional.mse_loss, return_outputs=True)
    assert result.losses.shape == (2,)
    assert result.outputs is not None
    expected = nn.functional.linear(inputs, pipeline.modules[0].weight, pipeline.modules[0].bias)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(result.outputs), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": torch.ones(3, WIDTH)}, "has 3 rows, which 2 micro-batches do not divide"),
        ({"inputs": [torch.ones(1, WIDTH)]}, "has 1 entries and the schedule 2 micro-batches"),
        ({"inputs": None}, "inputs is None on a rank that needs them"),
        ({"loss_reduction": "max"}, "loss_reduction='max'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    pipeline = build_pipeline(lambda index: nn.Linear(WIDTH, WIDTH), "1f1b", num_microbatches=2)
    good: dict[str, object] = {"inputs": torch.ones(2, WIDTH), "targets": torch.ones(2, WIDTH)}
    with pytest.raises(ValueError, match=message):
        pipeline.step(**(good | {"loss_fn": nn.functional.mse_loss} | arguments))  # type: ignore[arg-type]


def test_schedule_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="is for 2 ranks and the group has 1"):
        build_pipeline(lambda index: nn.Identity(), generate("1f1b", 2, 4))


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("out of luck")
        return x


def step_that_fails() -> None:
    pipeline = build_pipeline(lambda index: Fails(), "gpipe", num_microbatches=2)
    pipeline.step(torch.ones(2, WIDTH), torch.ones(2, WIDTH), nn.functional.mse_loss)


def test_an_error_says_in_which_action(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"out of luck\s+in action 1F0 of pipeline rank 1 \(gpipe\)"):
        ranks.run(step_that_fails, 2)


def own_loop() -> int:
    runpy.run_path(str(ROOT / "docs" / "examples" / "own_loop.py"), run_name="__main__")
    return 0


def test_example_of_an_own_loop() -> None:
    """As a script on each of four ranks, in the environment that torchrun gives them."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    programs = [
        Started(own_loop, [], environment={**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(4)
    ]
    try:
        ends = [program.finish() for program in programs]
    finally:
        for program in programs:
            program.close()
    assert [code for code, _, _ in ends] == [0] * 4, ends
    losses = [float(line.split()[-1]) for line in ends[0][1].splitlines() if line.startswith("step")]
    assert losses[-1] < 0.8 * losses[0]


def accumulated(name: str, num_steps: int) -> dict[int, Tensor]:
    pipeline = build_pipeline(make_seeded, name, num_microbatches=4)
    for seed in range(num_steps):
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        pipeline.step(inputs, inputs, nn.functional.mse_loss)
    return {index: module.weight.grad for index, module in pipeline.modules.items()}  # type: ignore[misc]


def make_seeded(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_gradients_accumulate_over_steps(ranks: RankPool, name: str) -> None:
    model = nn.Sequential(make_seeded(0), make_seeded(1))
    for seed in range(2):
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        for part in inputs.chunk(4):
            (nn.functional.mse_loss(model(part), part) / 4).backward()
    for found in ranks.run(accumulated, 2, name, 2):
        for index, gradient in found.items():
            torch.testing.assert_close(gradient, model[index].weight.grad)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x).float()


def test_autocast_and_old_weight_norm_within_a_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Autocast(), torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)))
    inputs = torch.randn(4, WIDTH)
    nn.functional.mse_loss(model(inputs), inputs).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    pipeline = build_pipeline(lambda index: model, "1f1b", num_microbatches=1)
    pipeline.step(inputs, inputs, nn.functional.mse_loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=2e-2, atol=1e-3)


def test_evaluation_leaves_the_modes_of_submodules() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout())
    model[1].eval()
    pipeline = build_pipeline(lambda index: model, "1f1b", num_microbatches=1)
    pipeline.evaluate(torch.ones(1, WIDTH), torch.ones(1, WIDTH), nn.functional.mse_loss)
    assert model.training
    assert not model[1].training


def use_in_another_order() -> Tensor:
    rows = ("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0")
    schedule = Schedule(
        name="by hand",
        num_stages=2,
        num_microbatches=2,
        placement=((0, 1),),
        actions=tuple(tuple(map(Action.parse, row.split())) for row in rows),
    )
    pipeline = build_pipeline(make_seeded, schedule)
    inputs = [torch.full((2, WIDTH), 1.0), torch.full((3, WIDTH), 2.0)]
    return pipeline.step(inputs, inputs, nn.functional.mse_loss).losses


def test_activations_may_be_used_in_another_order_than_they_come(ranks: RankPool) -> None:
    model = nn.Sequential(make_seeded(0), make_seeded(1))
    inputs = [torch.full((2, WIDTH), 1.0), torch.full((3, WIDTH), 2.0)]
    expected = torch.stack([nn.functional.mse_loss(model(x), x) for x in inputs]).detach()
    for losses in ranks.run(use_in_another_order, 2):
        torch.testing.assert_close(losses, expected)
