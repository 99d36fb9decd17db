"""Every composition against one process: loss and gradients within 1e-5 in fp32 after five steps.

The grids are covered pairwise here; `make parity` and `pytest -m slow` run all of them. With experts the loads of
every layer and step are those of one process too, to the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from counterflow.framework.checks.parity import (
    Parity,
    StepTrail,
    compare,
    gradient_difference,
    train_and_save,
    update_bound,
)
from counterflow.framework.config.mapping import from_mapping
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.trainer import step as step_module
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import TokenLoss
from counterflow.parallel.collectives import Axis
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.config import ScheduleConfig
from counterflow.parallel.pipeline.ir.text import to_csv
from counterflow.parallel.pipeline.schedules.registry import generate
from counterflow.parallel.zero.stage import ShardedStage
from tests.rank_pool import RankPool
from tests.references import CPU, References
from tests.tiny import MIXTURES, layers_for, merged, run_context, tiny_config

AXES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2),
    "pp": (1, 2, 4),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3),
    "schedule": ("gpipe", "1f1b", "dualpipe"),
}


def fits(point: dict[str, Any]) -> bool:
    """Whether eight ranks hold it and the schedule takes it."""
    return point["tp"] * point["pp"] * point["dp"] <= 8 and not (
        point["schedule"] == "dualpipe" and point["pp"] == 1
    )


def grid() -> list[dict[str, Any]]:
    return [
        point for values in product(*AXES.values()) if fits(point := dict(zip(AXES, values, strict=True)))
    ]


def pairwise(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Few of `points` that together show every pair of values of two axes that any of them shows."""
    pairs_of = [set(combinations(sorted(point.items()), 2)) for point in points]
    missing = set[Any]().union(*pairs_of)
    chosen: list[dict[str, Any]] = []
    while missing:
        index = max(range(len(points)), key=lambda candidate: len(pairs_of[candidate] & missing))
        missing -= pairs_of[index]
        chosen.append(points[index])
    return chosen


def assert_parity(parity: Parity) -> None:
    print(parity)
    assert parity.loss_rel <= 1e-5, parity
    assert parity.grad_rel <= 1e-5, parity
    assert parity.param_rel <= 1e-5, parity
    assert parity.norm_rel <= 1e-5, parity
    assert (parity.mtp_loss_rel or 0) <= 1e-5, parity
    assert parity.different_routing is None, parity


def microbatches(point: dict[str, Any]) -> int:
    return 2 * point["pp"] if point["schedule"] == "dualpipe" else 4


@pytest.mark.parametrize(
    "point", pairwise(grid()), ids=lambda point: "-".join(f"{key}{value}" for key, value in point.items())
)
def test_layout_trains_like_one_process(
    references: References, tmp_path: Path, point: dict[str, Any]
) -> None:
    layers = {"num_layers": layers_for(point["schedule"], point["pp"])}
    config = tiny_config(**point, num_microbatches=microbatches(point), model=layers)
    assert_parity(references.parity(config, tmp_path))


MORE_SCHEDULES = ("interleaved_1f1b", "zb1p", "zb_h2", "zbv", "v_half", "v_min", "dualpipe_v")


@pytest.mark.parametrize("schedule", MORE_SCHEDULES)
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_every_schedule_composes_with_tensor_parallelism_and_zero(
    references: References, tmp_path: Path, schedule: str, zero: int
) -> None:
    """zero=3 adds a data-parallel axis to shard over."""
    dp = 2 if zero else 1
    layers = {"num_layers": layers_for(schedule, 2)}
    config = tiny_config(pp=2, tp=2, dp=dp, zero=zero, schedule=schedule, model=layers)
    assert_parity(references.parity(config, tmp_path))


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_searched_schedule_and_one_of_a_file(references: References, tmp_path: Path, zero: int) -> None:
    """Every rank searches, so few do; the layers are cut over the tensor axis in the other."""
    dp = 2 if zero else 1
    searched = {"name": "auto", "num_chunks": 2, "costs": {"forward": [1.0, 3.0, 2.0, 1.0]}}
    config = tiny_config(pp=2, dp=dp, zero=zero, schedule="auto", num_microbatches=6)
    config = replace(config, schedule=from_mapping(ScheduleConfig, {**searched, "num_microbatches": 6}))
    assert_parity(references.parity(config, tmp_path / "auto"))
    config = tiny_config(pp=2, tp=2, dp=dp, zero=zero, num_microbatches=6, model={"num_layers": 2})
    path = tmp_path / "mirrored.csv"
    path.write_text(to_csv(lower(generate("dualpipe", 2, 6), zero_stage=0), compute_only=False))
    config = replace(config, schedule=ScheduleConfig(name="csv", path=str(path), num_microbatches=6))
    assert_parity(references.parity(config, tmp_path / "csv"))


@pytest.mark.parametrize(
    "point",
    [
        {"pp": 2, "dp": 2, "zero": 3, "schedule": "1f1b"},
        {"pp": 4, "tp": 2, "zero": 1, "schedule": "dualpipe"},
        {"pp": 2, "dp": 2, "zero": 0, "schedule": "dualpipe"},
        {"pp": 1, "tp": 2, "zero": 3, "schedule": "1f1b"},
        {"pp": 4, "dp": 2, "zero": 2, "schedule": "gpipe"},
    ],
    ids=str,
)
def test_tied_embeddings(references: References, tmp_path: Path, point: dict[str, Any]) -> None:
    layers = layers_for(point["schedule"], point["pp"])
    config = tiny_config(**point, num_microbatches=8, model={"tie_embeddings": True, "num_layers": layers})
    assert_parity(references.parity(config, tmp_path))


def test_without_sequence_parallelism(references: References, tmp_path: Path) -> None:
    config = tiny_config(tp=2, pp=2, zero=2, parallel={"sequence_parallel": False}, model={"num_layers": 2})
    assert_parity(references.parity(config, tmp_path))


def test_parameters_kept_whole_over_the_step(references: References, tmp_path: Path) -> None:
    config = tiny_config(pp=2, dp=2, schedule="dualpipe", zero=3, num_microbatches=8, model={"num_layers": 2})
    config = replace(config, zero=replace(config.zero, reshard_after="step"))
    assert_parity(references.parity(config, tmp_path))


def test_another_learning_rate_is_seen(
    ranks: RankPool, references: References, tiny_data: PreparedData, tmp_path: Path
) -> None:
    """The comparison itself can fail: another learning rate leaves other parameters."""
    layout = tiny_config(pp=2, optimizer={"base_lr": 4e-3})
    run, checkpoint = run_context(tiny_data, tmp_path), tmp_path / "step-00000005"
    trail = ranks.run(train_and_save, 2, layout, run, checkpoint, CPU)[0]
    parity = compare(references.of(tiny_config(pp=2)), checkpoint, trail)
    assert not parity.holds
    assert parity.grad_rel <= 1e-5
    assert parity.param_of_bound > 1


def train_wrongly(
    fault: str, config: TrainConfig, run: RunContext, folder: Path, device: torch.device
) -> list[StepTrail]:
    """`train_and_save` with a gradient that is broken by hand."""
    plain_ties, plain_loss = step_module.add_tied_gradients, step_module.TokenLoss.__call__
    calls = [0]

    def scaled(stages: Iterable[ShardedStage], axis: Axis) -> None:
        kept = list(stages)
        plain_ties(kept, axis)
        unit = next(unit for stage in kept for unit in stage.units)
        slot = unit.slots[0]
        unit.grad[slot.start : slot.stop] *= 1 + 1e-3

    def dropped(self: TokenLoss, output: Any, targets: Tensor) -> Tensor:
        """The loss is there, its gradient is not: of the first micro-batch, or of one in the third step."""
        loss = plain_loss(self, output, targets)
        calls[0] += 1
        # What gradients are taken of comes before the steps.
        wanted = calls[0] == 1 if fault == "dropped" else calls[0] == 3 * config.schedule.num_microbatches + 1
        return loss - (loss - loss.detach()) if wanted else loss

    try:
        if fault == "scaled":
            step_module.add_tied_gradients = scaled
        else:
            step_module.TokenLoss.__call__ = dropped
        return train_and_save(config, run, folder, device)
    finally:
        step_module.add_tied_gradients, step_module.TokenLoss.__call__ = plain_ties, plain_loss


@pytest.mark.parametrize("fault", ["scaled", "dropped", "dropped later"])
def test_a_wrong_gradient_is_seen(
    ranks: RankPool, references: References, tiny_data: PreparedData, tmp_path: Path, fault: str
) -> None:
    """A tensor's gradient is too large by a thousandth; a micro-batch is left out of the first step, or the third."""
    config = tiny_config(pp=2, optimizer={"max_grad_norm": None})
    run, checkpoint = run_context(tiny_data, tmp_path), tmp_path / "step-00000005"
    trail = ranks.run(train_wrongly, 2, fault, config, run, checkpoint, CPU)[0]
    parity = compare(references.of(config), checkpoint, trail)
    print(parity)
    assert not parity.holds
    if fault == "dropped later":
        assert parity.grad_rel <= 1e-5
        assert parity.param_of_bound > 1
    else:
        assert parity.grad_rel > 9e-4


COMPOSED: dict[str, dict[str, Any]] = {
    "offloaded, validated afterwards, with biases of keys": {
        "pp": 2,
        "tp": 2,
        "schedule": "gpipe",
        "num_microbatches": 6,
        "model": {"attention_bias": True},
        "offload": {"policy": "schedule", "budget_share": 0.6},
        "optimizer": {"post_validation": True, "max_grad_norm": 100.0},
    },
    "experts that move": {
        "dp": 2,
        "parallel": {"expert_parallel_size": 2},
        "model": MIXTURES["deepseek_v3"],
        "balance": {"interval_steps": 2, "goal": 1.0},
    },
    "a router with one choice": {
        "tp": 2,
        "model": {"moe": {"num_experts": 4, "expert_intermediate_size": 24, "num_experts_per_token": 1}},
    },
}


@pytest.mark.parametrize("name", COMPOSED)
def test_every_composition_is_checked(references: References, tmp_path: Path, name: str) -> None:
    """With Adam's usual eps, where later gradients of right layouts drift."""
    parity = references.parity(tiny_config(**COMPOSED[name]), tmp_path)
    print(parity)
    assert parity.holds, parity


def test_what_adam_makes_of_rounding() -> None:
    """Held against torch's Adam: gradients that differ by d move its update by no more than the bound."""
    generator = torch.Generator().manual_seed(0)
    size, difference, eps = 4096, 1e-4, 1e-8
    # From far above the difference to far below it.
    scales = torch.logspace(-9, 0, size)
    gradients = [torch.randn(size, generator=generator) * scales for _ in range(5)]
    noise = [difference * (2 * torch.rand(size, generator=generator) - 1) for _ in range(5)]
    ways = [[torch.zeros(size, requires_grad=True)] for _ in range(2)]
    optimizers = [torch.optim.Adam(way, lr=1.0, betas=(0.9, 0.95), eps=eps) for way in ways]
    for step in range(1, 6):
        before = [way[0].detach().clone() for way in ways]
        for way, optimizer, more in zip(ways, optimizers, (0.0, noise[step - 1]), strict=True):
            way[0].grad = gradients[step - 1] + more
            optimizer.step()
        updates = [way[0].detach() - last for way, last in zip(ways, before, strict=True)]
        state = optimizers[0].state[ways[0][0]]
        denominator = (state["exp_avg_sq"] / (1 - 0.95**step)).sqrt() + eps
        bound = update_bound(denominator, difference, step=step, beta1=0.9, beta2=0.95)
        assert bool(((updates[0] - updates[1]).abs() <= bound * 1.01 + 1e-6).all())
        assert float(bound[-1]) < 0.05  # and it says something where gradients are large
    assert update_bound(torch.tensor([0.5]), 1e-3, step=1, beta1=0.9, beta2=0.95).item() == pytest.approx(
        4e-3
    )
    assert update_bound(torch.tensor([1e-8]), 1e-3, step=1, beta1=0.9, beta2=0.95).item() == 2


def test_gradients_below_rounding_are_held_to_the_whole() -> None:
    reference = torch.tensor([3e-7, 4e-7])
    assert gradient_difference(1.5 * reference, reference, whole=1e-3) == pytest.approx(0.5)
    assert gradient_difference(1.5 * reference, reference, whole=1.0) == pytest.approx(2.5e-7 * 2**20 * 1e-5)
    assert gradient_difference(torch.tensor([0.0, 2e-6]), torch.zeros(2), whole=1.0) > 1e-5
    assert gradient_difference(torch.zeros(2), torch.zeros(2), whole=0.0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("point", grid(), ids=lambda point: "-".join(f"{k}{v}" for k, v in point.items()))
def test_whole_grid(references: References, tmp_path: Path, point: dict[str, Any]) -> None:
    config = tiny_config(**point, num_microbatches=microbatches(point))
    assert_parity(references.parity(config, tmp_path))


# ------------------------------------------------------------------------------------------ mixtures of experts

EXPERT_AXES: dict[str, tuple[Any, ...]] = {
    "ep": (2, 4),
    "pp": (1, 2, 4),
    "tp": (1, 2),
    "copies": (1, 2),  # ranks with the same experts
    "zero": (0, 1, 3),
    "schedule": ("1f1b", "dualpipe", "dualpipe_v", "zbv"),
    "model": tuple(MIXTURES),
}


def ranks_of(point: dict[str, Any]) -> int:
    return point["pp"] * max(point["ep"], point["tp"]) * point["copies"]


def expert_grid(max_ranks: int) -> list[dict[str, Any]]:
    points = [dict(zip(EXPERT_AXES, values, strict=True)) for values in product(*EXPERT_AXES.values())]
    return [
        point
        for point in points
        if ranks_of(point) <= max_ranks and not (point["schedule"] == "dualpipe" and point["pp"] == 1)
    ]


def expert_config(point: dict[str, Any], **nodes: Any) -> TrainConfig:
    """Each stage has a layer; those of a V-shaped schedule are twice the ranks.

    eps: an expert sees few tokens, so some of its gradient's elements are next to zero, where Adam's usual 1e-8 turns
    their rounding into steps that show in the fifth digit of the next gradients.
    """
    model = merged(MIXTURES[point["model"]], {"num_layers": layers_for(point["schedule"], point["pp"])})
    layout = {
        "pp": point["pp"],
        "tp": point["tp"],
        "dp": ranks_of(point) // point["pp"] // point["tp"],
        "zero": point["zero"],
        "schedule": point["schedule"],
        "num_microbatches": max(4, 2 * point["pp"]),
        "parallel": {"expert_parallel_size": point["ep"]},
        "model": model,
        "data": {"micro_batch_size": 2},
        "optimizer": {"eps": 1e-6},
    }
    return tiny_config(**merged(layout, nodes))


def expert_ids(point: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in point.items())


# Four ranks hold most of what is to be seen; one point of eight has every axis. `test_whole_expert_grid` has them all.
EXPERT_POINTS = [*pairwise(expert_grid(4))[:4], pairwise(expert_grid(8))[1]]


@pytest.mark.parametrize("point", EXPERT_POINTS, ids=expert_ids)
def test_experts_train_like_one_process(
    references: References, tmp_path: Path, point: dict[str, Any]
) -> None:
    """With the auxiliary losses, further predictions and the bias of each kind of model; no token is dropped."""
    parity = references.parity(expert_config(point), tmp_path)
    assert_parity(parity)
    assert parity.num_routed_layers > 0


EXPERT_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens of a whole sequence shared out": (
        {"tp": 2, "pp": 2, "schedule": "dualpipe"},
        {"parallel": {"sequence_parallel": False}},
    ),
    "tied embeddings and further predictions": (
        {"pp": 2, "zero": 3, "schedule": "dualpipe_v", "model": "deepseek_v3"},
        {"model": {"tie_embeddings": True}},
    ),
    "two further predictions": (
        {"pp": 2, "tp": 2, "zero": 1, "model": "deepseek_v3"},
        {"model": {"mtp": {"num_modules": 2}}},
    ),
    "room for few tokens": ({"ep": 4, "pp": 2, "zero": 3}, {"model": {"moe": {"capacity_factor": 1.0}}}),
    "a gated shared expert": (
        {"tp": 2, "zero": 3},
        {"model": {"moe": {"num_shared_experts": 1, "shared_expert_gate": True}}},
    ),
}


@pytest.mark.parametrize("name", EXPERT_VARIANTS)
def test_other_mixtures_train_like_one_process(references: References, tmp_path: Path, name: str) -> None:
    point: dict[str, Any] = {"ep": 2, "pp": 1, "tp": 1, "copies": 1, "zero": 0, "schedule": "1f1b"}
    changes, nodes = EXPERT_VARIANTS[name]
    config = expert_config({**point, "model": "mixtral", **changes}, **nodes)
    assert_parity(references.parity(config, tmp_path))


def test_tokens_routed_elsewhere_are_seen(
    ranks: RankPool, references: References, tiny_data: PreparedData, tmp_path: Path
) -> None:
    """The comparison of loads can fail: a bias that moves ten times as fast sends some tokens elsewhere."""
    point = {"ep": 2, "pp": 1, "tp": 1, "copies": 1, "zero": 0, "schedule": "1f1b", "model": "deepseek_v3"}
    layout = expert_config(point, model={"moe": {"bias_update_speed": 0.1}})
    run, checkpoint = run_context(tiny_data, tmp_path), tmp_path / "step-00000005"
    trail = ranks.run(train_and_save, 2, layout, run, checkpoint, CPU)[0]
    parity = compare(references.of(expert_config(point)), checkpoint, trail)
    assert not parity.holds
    # The first step is without a bias in both.
    assert parity.different_routing == "step 1, layer 1"


@pytest.fixture(scope="module")
def many_ranks() -> Iterator[RankPool]:
    """Sixteen ranks: four stages of four ranks that share experts out."""
    pool = RankPool(16)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", [point for point in pairwise(expert_grid(16)) if ranks_of(point) > 8], ids=expert_ids
)
def test_experts_on_more_ranks(
    many_ranks: RankPool, references: References, tmp_path: Path, point: dict[str, Any]
) -> None:
    assert_parity(replace(references, ranks=many_ranks).parity(expert_config(point), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("point", expert_grid(8), ids=expert_ids)
def test_whole_expert_grid(references: References, tmp_path: Path, point: dict[str, Any]) -> None:
    assert_parity(references.parity(expert_config(point), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["naive", "gpipe", *MORE_SCHEDULES])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_schedule_takes_experts(
    references: References, tmp_path: Path, schedule: str, precision: str
) -> None:
    """In bf16 rounding sends some tokens elsewhere, so only the losses are held to one process, and loosely."""
    point = {"ep": 2, "pp": 2, "tp": 2, "copies": 1, "zero": 3, "schedule": schedule, "model": "deepseek_v3"}
    config = expert_config(point, precision={"compute": precision})
    parity = references.parity(config, tmp_path)
    if precision == "fp32":
        assert_parity(parity)
    else:
        assert parity.loss_rel <= 1e-3, parity
        assert (parity.mtp_loss_rel or 0) <= 1e-3, parity
