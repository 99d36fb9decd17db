"""ZeRO over flat units: against torch's fully_shard, and what is kept where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from counterflow.parallel.collectives import Axis
from counterflow.parallel.parameters import ParameterPlacement, place
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.zero.config import ZeroConfig
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.stage import ShardedStage
from counterflow.parallel.zero.unit import FlatUnit
from tests.rank_pool import RankPool

WIDTH = 5
NUM_MICROBATCHES = 3


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3, bias=False))


def batch(rank: int, microbatch: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + microbatch))


def replica_axis() -> Axis:
    return Axis(group=dist.group.WORLD, name="data")


def sharded_model(zero_stage: int, dtype: torch.dtype = torch.float32) -> tuple[Stage, ShardedStage]:
    """The model of `make_model` under ZeRO, with its values."""
    model = make_model()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sharded = ShardedStage(
        model,
        ZeroContext(
            config=ZeroConfig(stage=zero_stage),  # type: ignore[arg-type]
            replica=ReplicaAxes.of(replica_axis()),
            dtype=dtype,
        ),
    )
    for unit in sharded.units:
        for fragment in unit.fragments():
            fragment.master.copy_(values[fragment.slot.name].view(-1)[fragment.start : fragment.stop])
        unit.sync_parameters()
    return Stage(0, model, sharded), sharded


def accumulate(stage: Stage, *, split: bool) -> None:
    """Three micro-batches through the stage; W comes after every I, in reverse order."""
    stage.parameters.begin_step()
    for microbatch in range(NUM_MICROBATCHES):
        stage.parameters.unshard()
        stage.parameters.wait_unshard()
        x = batch(dist.get_rank(), microbatch).to(next(stage.module.parameters()).dtype)
        (out,) = stage.forward(microbatch, [x])
        stage.set_loss(microbatch, out.square().sum())
        stage.parameters.reshard()
        stage.parameters.unshard()
        stage.parameters.wait_unshard()
        stage.backward(microbatch, None, defer=split)
        stage.parameters.reshard()
    if split:
        for microbatch in reversed(range(NUM_MICROBATCHES)):
            stage.weight_backward(microbatch)
    stage.parameters.reduce_grad()
    stage.parameters.finish_step()


def gathered(sharded: ShardedStage, which: str) -> dict[str, Tensor]:
    """Every parameter's whole `master` or `grad`, put together from the fragments of all ranks."""
    mine = [
        (fragment.slot.name, fragment.slot.shape, fragment.start, getattr(fragment, which).clone())
        for unit in sharded.units
        for fragment in unit.fragments()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, Tensor] = {}
    for fragments in everyone:
        for name, shape, start, values in fragments:
            whole.setdefault(name, torch.full(shape, torch.nan)).view(-1)[start : start + len(values)] = (
                values
            )
    return whole


def gradients_by_zero(zero_stage: int, split: bool) -> dict[str, Tensor]:
    stage, sharded = sharded_model(zero_stage)
    accumulate(stage, split=split)
    return gathered(sharded, "grad")


def gradients_by_fully_shard() -> dict[str, Tensor]:
    model = make_model()
    fully_shard(model)
    for microbatch in range(NUM_MICROBATCHES):
        model(batch(dist.get_rank(), microbatch)).square().sum().backward()
    # fully_shard averages over ranks; here gradients are summed.
    return {
        name: parameter.grad.full_tensor() * dist.get_world_size()  # type: ignore[union-attr]
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("split", [False, True], ids=["full", "split"])
def test_gradients_are_those_of_fully_shard(ranks: RankPool, zero_stage: int, split: bool) -> None:
    reference = ranks.run(gradients_by_fully_shard, 3, leaves_open=True)[0]
    for found in ranks.run(gradients_by_zero, 3, zero_stage, split):
        assert found.keys() == reference.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, reference[name], rtol=1e-5, atol=1e-6)


def what_is_kept(zero_stage: int, dtype: torch.dtype) -> tuple[int, int, int]:
    stage, sharded = sharded_model(zero_stage, dtype)
    accumulate(stage, split=True)
    held = sharded.persistent_bytes()
    return (
        held.parameters,
        held.gradients,
        sum(p.untyped_storage().nbytes() for p in stage.module.parameters()),
    )


NUMEL = sum(parameter.numel() for parameter in make_model().parameters())


@pytest.mark.parametrize(
    ("zero_stage", "dtype", "parameter_bytes", "gradient_bytes"),
    [
        (0, torch.float32, 4 * NUMEL, 4 * NUMEL),
        (1, torch.float32, 4 * NUMEL, 4 * NUMEL),
        (2, torch.float32, 4 * NUMEL, 4 * NUMEL / 2),
        (3, torch.float32, 4 * NUMEL / 2, 4 * NUMEL / 2),
        # bf16 parameters beside fp32 masters
        (0, torch.bfloat16, 6 * NUMEL, 4 * NUMEL),
        (2, torch.bfloat16, 4 * NUMEL, 4 * NUMEL / 2),
        (3, torch.bfloat16, 4 * NUMEL / 2, 4 * NUMEL / 2),
    ],
)
def test_bytes_kept_are_the_papers(
    ranks: RankPool, zero_stage: int, dtype: torch.dtype, parameter_bytes: float, gradient_bytes: float
) -> None:
    """Table 1 of arXiv 1910.02054, with gradients accumulated in fp32."""
    parameters, gradients, seen = ranks.run(what_is_kept, 2, zero_stage, dtype)[0]
    # Five parameters and two shards, each to a multiple of 64 elements, in fp32 and perhaps bf16 beside it.
    padding = 64 * (5 + 2) * 6
    assert parameter_bytes <= parameters <= parameter_bytes + padding
    assert gradient_bytes <= gradients <= gradient_bytes + padding
    assert (seen == 0) == (zero_stage == 3), "after RESHARD the module's parameters have no storage"


def use_without_unshard() -> None:
    stage, _ = sharded_model(3)
    stage.parameters.wait_unshard()


def test_use_before_unshard_is_caught(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="before UNSHARD"):
        ranks.run(use_without_unshard, 2)


def unit_with_partial_gradients() -> dict[str, Tensor]:
    """On a tensor axis of two ranks: a norm whose gradient is partial there, and a weight whose is not."""
    norm = place(nn.Parameter(torch.ones(3)), ParameterPlacement(global_shape=(3,), partial_over_tensor=True))
    weight = nn.Parameter(torch.ones(2, 2))
    unit = FlatUnit(
        [("weight", weight), ("norm", norm)],
        ZeroContext(config=ZeroConfig(stage=2), replica=ReplicaAxes.of(Axis()), tensor=replica_axis()),
        replica=ReplicaAxes.of(Axis()),
    )
    unit.begin_step()
    for new in unit.parameters.values():
        unit.gradient_buffer(new).fill_(1.0 + dist.get_rank())
    unit.reduce_grad()
    unit.finish_step()
    return {fragment.slot.name: fragment.grad.clone() for fragment in unit.fragments()}


def test_partial_gradients_are_summed_over_the_tensor_axis(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(unit_with_partial_gradients, 2)):
        torch.testing.assert_close(found["norm"], torch.full((3,), 3.0))
        torch.testing.assert_close(found["weight"], torch.full((4,), 1.0 + rank))
