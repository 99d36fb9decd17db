"""A step that does not wait for the norm gives, to the bit, what the ordinary step gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.framework.checks.memory import measure
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.experts.routing import moe_layers
from counterflow.framework.optim.optimizer import ModelOptimizer, Validation
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.checkpointing import resume, save_if_due
from counterflow.framework.trainer.loop import seed_everything, train
from counterflow.framework.trainer.run import RunContext
from counterflow.parallel.pipeline.ir.trace import Recorder
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, run_context, tiny_config, with_few_layers

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 4, "schedule": "zb_h2", "num_microbatches": 8},
    {"pp": 2, "dp": 2, "schedule": "1f1b", "zero": 1, "model": {"tie_embeddings": True}},
    {"pp": 2, "dp": 2, "schedule": "zbv", "zero": 2, "precision": {"compute": "bf16"}},
    {"pp": 2, "dp": 2, "schedule": "dualpipe", "zero": 3, "model": {"tie_embeddings": True}},
    {"pp": 2, "tp": 2, "schedule": "interleaved_1f1b", "zero": 3},
    {
        "pp": 2,
        "dp": 2,
        "schedule": "zb1p",
        "zero": 1,
        "model": MIXTURES["deepseek_v3"],
        "parallel": {"expert_parallel_size": 2},
    },
    {"pp": 1, "dp": 2, "schedule": "gpipe", "zero": 3},
]
NAMES = ["zb_h2", "1f1b-tied", "zbv-bf16", "dualpipe-zero3-tied", "interleaved-tp", "experts", "dp"]
GRID: list[dict[str, Any]] = [
    {"pp": pp, "dp": dp, "tp": tp, "schedule": schedule, "zero": zero, "num_microbatches": 8}
    for pp, dp, tp in ((2, 2, 2), (4, 2, 1))
    for schedule in ("naive", "gpipe", "zb1p", "zb_h2", "v_half", "v_min", "dualpipe", "dualpipe_v")
    for zero in range(4)
]
NUM_STEPS = 6


class Outcome(NamedTuple):
    """What a rank saw: of each step loss, norm and what routers did; the state after the last; how often a step was
    made ahead, and done again."""

    losses: list[float]
    norms: list[float]
    routing: list[Any]
    state: list[Tensor]
    num_ahead: int
    num_redone: int
    error: str


def state_of(assembly: Assembly) -> list[Tensor]:
    """Everything that an optimizer step changes: masters, moments, step count, and the parameters in use."""
    optimizer = assembly.optimizer
    tensors = [owned.fragment.master for owned in optimizer.owned]
    tensors += [state for owned in optimizer.owned for state in owned.state.values()]
    if assembly.config.zero.stage < 3:
        tensors += [
            parameter.data
            for stage in assembly.runtime.stages.values()
            for parameter in stage.module.parameters()
        ]
    tensors += [layer.router.state.bias for layer in moe_layers(assembly.modules)]
    return [tensor.clone() for tensor in tensors] + [torch.tensor(float(optimizer.num_steps))]


def spoil(optimizer: ModelOptimizer, factors: dict[int, float], rank: int | None) -> None:
    """Multiply the gradients of some steps, on every rank or on one, before the optimizer sees them."""

    def spoiled(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if rank is None or dist.get_rank() == rank:
                for owned in optimizer.owned:
                    owned.fragment.grad.mul_(factors.get(optimizer.num_steps, 1.0))
            return step(*args)

        return call

    optimizer.step = spoiled(optimizer.step)
    optimizer.step_ahead = spoiled(optimizer.step_ahead)


def run_steps(
    config: TrainConfig, run: RunContext, factors: dict[int, float], spoiled_rank: int | None = None
) -> Outcome:
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    assembly = build(config, run.data, torch.device("cpu"))
    optimizer = assembly.optimizer
    spoil(optimizer, factors, spoiled_rank)
    redone: list[bool] = []
    validate = optimizer.validate

    def counted(recorder: Recorder | None = None) -> Validation:
        validation = validate(recorder)
        redone.append(validation.is_redone)
        return validation

    optimizer.validate = counted
    losses: list[float] = []
    norms: list[float] = []
    routing: list[Any] = []
    error = ""
    try:
        for record in train(assembly, resume(assembly, run)):
            losses.append(record.loss)
            norms.append(record.grad_norm)
            routing.append((record.moe, record.mtp_loss))
            save_if_due(assembly, run, record.step + 1)
    except FloatingPointError as raised:
        error = str(raised)
    return Outcome(losses, norms, routing, state_of(assembly), len(redone), sum(redone), error)


def both(
    ranks: RankPool,
    data: PreparedData,
    folder: Path,
    layout: dict[str, Any],
    limit: float | None,
    factors: dict[int, float],
    spoiled_rank: int | None = None,
) -> list[Outcome]:
    """The ranks' outcomes with post-validation, held against the ordinary ones."""
    nodes = {"training": {"num_steps": NUM_STEPS, "eval_interval_steps": 0}, **with_few_layers(layout)}
    ordinary = tiny_config(**nodes, optimizer={"max_grad_norm": limit})
    ahead = tiny_config(**nodes, optimizer={"max_grad_norm": limit, "post_validation": True})
    size, run = ordinary.parallel.world_size, run_context(data, folder)
    expected = ranks.run(run_steps, size, ordinary, run, factors, spoiled_rank)
    found = ranks.run(run_steps, size, ahead, run, factors, spoiled_rank)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.losses == theirs.losses
        assert mine.norms == theirs.norms
        assert mine.routing == theirs.routing
        assert mine.error == theirs.error
        assert all(map(torch.equal, mine.state, theirs.state))
        assert theirs.num_ahead == 0
        assert (mine.num_ahead, mine.num_redone) == (found[0].num_ahead, found[0].num_redone)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_sometimes_clipped(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Steps 1 and 4 are clipped: each was made ahead, undone and made again; step 2 waits, for 1 was clipped."""
    found = both(ranks, tiny_data, tmp_path, layout, 30.0, {1: 1000.0, 4: 1000.0})[0]
    assert [norm > 30.0 for norm in found.norms] == [False, True, False, False, True, False]
    assert (found.num_ahead, found.num_redone) == (4, 2)


@pytest.mark.parametrize(("limit", "num_ahead", "num_redone"), [(None, 5, 0), (1e6, 5, 0), (1e-3, 1, 1)])
def test_never_or_always_clipped(
    ranks: RankPool,
    tiny_data: PreparedData,
    tmp_path: Path,
    limit: float | None,
    num_ahead: int,
    num_redone: int,
) -> None:
    """All steps but the last are made ahead; once one was clipped, those after it wait."""
    found = both(ranks, tiny_data, tmp_path, LAYOUTS[3], limit, {})[0]
    assert (found.num_ahead, found.num_redone) == (num_ahead, num_redone)


@pytest.mark.parametrize("layout", LAYOUTS[:5], ids=NAMES[:5])
def test_not_finite_on_one_rank(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Every rank raises what it raises without, and has the state that was sound."""
    for outcome in both(ranks, tiny_data, tmp_path, layout, 30.0, {3: math.nan}, spoiled_rank=1):
        assert outcome.error.startswith("the gradient norm is nan after 3 steps: nothing was updated")
        assert all(tensor.isfinite().all() for tensor in outcome.state)
        assert len(outcome.losses) == 3


def test_checkpoints_and_evaluation_see_validated_states(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    """What is saved and evaluated amid steps made ahead goes on to the same end, and has the same loss."""
    nodes: dict[str, Any] = {
        **with_few_layers(LAYOUTS[3]),
        "training": {"num_steps": NUM_STEPS, "eval_interval_steps": 2},
        "checkpoint": {"enabled": True, "interval_steps": 3},
    }
    ahead = tiny_config(**nodes, optimizer={"max_grad_norm": 30.0, "post_validation": True})
    ordinary = tiny_config(**nodes, optimizer={"max_grad_norm": 30.0})
    factors = {1: 1000.0, 4: 1000.0}
    runs = [run_context(tiny_data, tmp_path / name) for name in ("ahead", "ordinary")]
    whole, expected = (
        ranks.run(run_steps, 4, config, run, factors)[0]
        for config, run in zip((ahead, ordinary), runs, strict=True)
    )
    assert whole.losses == expected.losses
    assert whole.num_ahead == 2  # steps 0 and 4; the others are looked at, or follow a clipped one
    (runs[0].run_dir / "checkpoints" / "step-00000006").rename(tmp_path / "set-aside")
    resumed = replace(ahead, checkpoint=replace(ahead.checkpoint, resume=str(runs[0].run_dir)))
    after = ranks.run(run_steps, 4, resumed, runs[0], factors)[0]
    assert after.losses == expected.losses[3:]
    assert all(map(torch.equal, after.state, expected.state))


@pytest.mark.parametrize("zero", [0, 3])
def test_the_copies_are_counted(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, zero: int) -> None:
    """Masters and two moments are there twice, fp32 each; nothing else stays between steps."""
    nodes: dict[str, Any] = {"pp": 2, "dp": 2, "zero": zero}
    run = run_context(tiny_data, tmp_path)
    held = [
        ranks.run(measure, 4, tiny_config(**nodes, optimizer=optimizer), run, torch.device("cpu"))
        for optimizer in ({}, {"post_validation": True})
    ]
    for plain, copied in zip(*held, strict=True):
        # Moments have no padding, which masters have: each parameter and shard to a multiple of 64 elements.
        assert copied.optimizer == pytest.approx(2.5 * plain.optimizer, abs=64 * 4 * 32)
        assert copied.persistent <= copied.observed <= copied.persistent + 8192


@pytest.mark.slow
@pytest.mark.parametrize("layout", GRID, ids=str)
def test_sometimes_clipped_in_every_layout(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, layout: dict[str, Any]
) -> None:
    layout = layout | {"model": {"num_layers": 8, "tie_embeddings": layout["zero"] % 2 == 0}}
    found = both(ranks, tiny_data, tmp_path, layout, 30.0, {1: 1000.0, 4: 1000.0})[0]
    assert (found.num_ahead, found.num_redone) == (4, 2)
