"""The runtime against plain torch: the same losses, outputs and gradients, whatever the schedule."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.parallel.mesh import MeshConfig, build_mesh
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.simulate import Costs, simulate
from counterflow.parallel.pipeline.api import build_pipeline
from counterflow.parallel.pipeline.runtime.plain_parameters import PlainParameters
from counterflow.parallel.pipeline.runtime.runtime import Runtime
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.pipeline.schedules.registry import generate
from tests.rank_pool import RankPool

WIDTH = 6
LAYOUTS = [
    ("gpipe", 1, 3),
    ("1f1b", 1, 2),
    ("naive", 2, 3),
    ("gpipe", 2, 4),
    ("1f1b", 2, 5),
    ("1f1b", 4, 8),
    ("1f1b", 4, 3),
    ("dualpipe", 2, 4),
    ("dualpipe", 4, 8),
    ("dualpipe", 4, 12),
    ("dualpipe", 8, 20),
    ("interleaved_1f1b", 2, 4),
    ("interleaved_1f1b", 4, 8),
    ("zb1p", 4, 8),
    ("zb_h2", 4, 8),
    ("zbv", 4, 8),
    ("v_half", 4, 8),
    ("v_min", 4, 8),
    ("dualpipe_v", 2, 4),
    ("dualpipe_v", 4, 10),
]


def make_stage(index: int) -> nn.Module:
    torch.manual_seed(100 + index)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    )


def make_batch(num_microbatches: int, lengths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(3, lengths[index % len(lengths)], WIDTH) for index in range(num_microbatches)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    targets = [torch.randn(shape, generator=generator) for shape in shapes]
    return inputs, targets


def make_runtime(name: str, num_ranks: int, num_microbatches: int) -> Runtime:
    schedule = lower(generate(name, num_ranks, num_microbatches), zero_stage=0)
    mesh = build_mesh(MeshConfig(pipeline_parallel_size=num_ranks), mirrored=schedule.num_directions > 1)
    stages: dict[int, Stage] = {}
    for index in schedule.stages_of(dist.get_rank()):
        module = make_stage(index)
        stages[index] = Stage(index, module, PlainParameters(module, mesh.replica))
    return Runtime(stages, schedule, group=mesh.pipeline)


def run_layout(
    name: str, num_ranks: int, num_microbatches: int, lengths: tuple[int, ...]
) -> tuple[Tensor, list[Tensor | None], dict[str, Tensor], int, Tensor]:
    runtime = make_runtime(name, num_ranks, num_microbatches)
    inputs, targets = make_batch(num_microbatches, lengths)
    evaluated = runtime.evaluate(inputs, targets, nn.functional.mse_loss)
    result = runtime.step(inputs, targets, nn.functional.mse_loss, return_outputs=True)
    assert runtime.transport.num_unretired == 0
    gradients = {
        f"{index}.{key}": parameter.grad
        for index, stage in runtime.stages.items()
        for key, parameter in stage.module.named_parameters()
        if parameter.grad is not None
    }
    assert result.outputs is not None
    return (
        result.losses,
        list(result.outputs),
        gradients,
        result.trace.peak_live_activations,
        evaluated.losses,
    )


def reference(
    num_stages: int, num_microbatches: int, lengths: tuple[int, ...]
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    model = nn.ModuleDict({str(index): make_stage(index) for index in range(num_stages)})
    inputs, targets = make_batch(num_microbatches, lengths)
    losses: list[Tensor] = []
    outputs: list[Tensor] = []
    for value, target in zip(inputs, targets, strict=True):
        for stage in model.values():
            value = stage(value)
        outputs.append(value.detach())
        losses.append(nn.functional.mse_loss(value, target))
    torch.stack(losses).mean().backward()
    gradients = {
        key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None
    }
    return torch.stack(losses).detach(), outputs, gradients


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), LAYOUTS)
@pytest.mark.parametrize("lengths", [(4,), (4, 2, 5)], ids=["even", "uneven"])
def test_schedule_computes_what_torch_computes(
    ranks: RankPool, name: str, num_ranks: int, num_microbatches: int, lengths: tuple[int, ...]
) -> None:
    results = ranks.run(run_layout, num_ranks, name, num_ranks, num_microbatches, lengths)
    schedule = generate(name, num_ranks, num_microbatches)
    losses, outputs, gradients = reference(schedule.num_stages, num_microbatches, lengths)
    peaks = simulate(schedule, Costs()).peak_activations
    seen: set[int] = set()
    found: set[str] = set()
    for rank, (rank_losses, rank_outputs, rank_gradients, peak, evaluated) in enumerate(results):
        torch.testing.assert_close(rank_losses, losses)
        torch.testing.assert_close(evaluated, losses)
        assert peak <= peaks[rank]
        for index, output in enumerate(rank_outputs):
            if output is not None:
                torch.testing.assert_close(output, outputs[index])
                seen.add(index)
        for key, gradient in rank_gradients.items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-5, atol=1e-6)
            found.add(key)
    assert seen == set(range(num_microbatches))
    assert found == set(gradients)


def run_changing_counts(name: str, counts: tuple[int, ...]) -> list[tuple[Tensor, list[Tensor]]]:
    pipeline = build_pipeline(make_stage, name, num_microbatches=counts[0])
    results: list[tuple[Tensor, list[Tensor]]] = []
    for count in counts:
        for parameter in pipeline.parameters():
            parameter.grad = None
        inputs, targets = make_batch(count, (4, 3))
        losses = pipeline.step(inputs, targets, nn.functional.mse_loss, num_microbatches=count).losses
        first = pipeline.evaluate(inputs, targets, nn.functional.mse_loss, num_microbatches=count).losses
        torch.testing.assert_close(losses, first)
        results.append((losses, [p.grad for p in pipeline.modules[min(pipeline.modules)].parameters()]))  # type: ignore[misc]
    return results


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_number_of_microbatches_may_change_between_steps(ranks: RankPool, name: str) -> None:
    counts = (4, 8, 6)
    results = ranks.run(run_changing_counts, 2, name, counts)
    for position, count in enumerate(counts):
        losses, _, gradients = reference(2, count, (4, 3))
        found, found_gradients = results[0][position]
        torch.testing.assert_close(found, losses)
        expected = [gradient for key, gradient in gradients.items() if key.startswith("0.")]
        for gradient, other in zip(found_gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6)


def test_another_number_needs_a_schedule_by_name() -> None:
    pipeline = build_pipeline(make_stage, generate("1f1b", 1, 2))
    with pytest.raises(ValueError, match="build it by the schedule's name"):
        pipeline.step(torch.ones(3, 1, WIDTH), None, nn.functional.mse_loss, num_microbatches=3)


def memory_over_steps(num_steps: int) -> list[int]:
    pipeline = build_pipeline(lambda index: nn.Linear(64, 64), "1f1b", num_microbatches=64)
    inputs = torch.zeros(64, 256, 64)
    resident: list[int] = []
    for step in range(num_steps):
        pipeline.step(inputs, inputs, nn.functional.mse_loss)
        assert pipeline.runtime.transport.num_unretired == 0
        if step % 20 == 19:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
    return resident


@pytest.mark.slow
def test_memory_does_not_grow_over_200_steps(ranks: RankPool) -> None:
    """p=8, m=64; a micro-batch is 64 KiB, so one that stayed behind in each step would be 12 MiB."""
    for resident in ranks.run(memory_over_steps, 8, 200, timeout_s=600):
        assert resident[-1] - resident[1] < 4 * 2**20, resident
