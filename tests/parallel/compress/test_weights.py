"""Quantised gathers of a stage's parameters, against a quantisation written out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.parameters import ParameterPlacement, place
from counterflow.parallel.zero.config import ZeroConfig
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.stage import ShardedStage
from tests.rank_pool import RankPool

BLOCK = 16
ROWS, COLUMNS = 13, 10


class Module(nn.Module):
    """A matrix that the tensor axis would cut, one that it would not, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = place(
            nn.Parameter(torch.empty(ROWS, COLUMNS)),
            ParameterPlacement(global_shape=(ROWS, COLUMNS), tensor_dim=0),
        )
        self.router = place(
            nn.Parameter(torch.empty(4, COLUMNS)), ParameterPlacement(global_shape=(4, COLUMNS))
        )
        self.norm = nn.Parameter(torch.empty(COLUMNS))


def seen(zero_stage: int, weights: str, dtype: torch.dtype) -> dict[str, Any]:
    """On one rank: the whole parameters it computes with, its master of `cut`, and the bytes of one gather."""
    meter = ByteMeter()
    module = Module()
    sharded = ShardedStage(
        module,
        ZeroContext(
            config=ZeroConfig(stage=zero_stage),  # type: ignore[arg-type]
            replica=ReplicaAxes.of(Axis(group=dist.group.WORLD, name="data", meter=meter)),
            dtype=dtype,
            compression=CompressionConfig(weights=weights, weights_block_size=BLOCK),  # type: ignore[arg-type]
        ),
        seed=7,
    )
    meter.reset()
    if zero_stage == 3:
        sharded.unshard()
        sharded.wait_unshard()
    else:
        sharded.sync_parameters()
    return {
        "parameters": {name: parameter.detach().clone() for name, parameter in module.named_parameters()},
        "master": next(unit.master for unit in sharded.units if unit.slots[0].name == "cut").clone(),
        "bytes": meter.sent_bytes().get("data", 0),
    }


def rounded(master: Tensor, weights: str) -> Tensor:
    """Each block of BLOCK, to the nearest of its numbers."""
    out: list[Tensor] = []
    for block in master.split(BLOCK):
        largest = float(block.abs().max())
        if weights == "fp8":
            scale = largest / 448
            out.append((block / scale).to(torch.float8_e4m3fn).float() * scale)
        else:
            scale = largest / (127 if weights == "int8" else 7)
            out.append((block / scale).round() * scale)
    return torch.cat(out)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_every_rank_computes_with_the_same_rounded_weights(
    ranks: RankPool, zero_stage: int, weights: str
) -> None:
    world_size = 3
    quantised = ranks.run(seen, world_size, zero_stage, weights, torch.float32)
    exact = ranks.run(seen, world_size, zero_stage, "none", torch.float32)[0]["parameters"]
    expected = torch.cat([rounded(reply["master"], weights) for reply in quantised])[: ROWS * COLUMNS]
    # The masters are those of the whole parameter, to the bit.
    masters = torch.cat([reply["master"] for reply in quantised])[: ROWS * COLUMNS]
    assert torch.equal(masters, exact["cut"].flatten())
    for reply in quantised:
        parameters = reply["parameters"]
        assert torch.equal(parameters["cut"], quantised[0]["parameters"]["cut"])
        torch.testing.assert_close(parameters["cut"].flatten(), expected, rtol=1e-5, atol=0)
        assert not torch.equal(parameters["cut"], exact["cut"])
        # Of what every tensor-parallel rank holds whole nothing is rounded.
        assert torch.equal(parameters["router"], exact["router"])
        assert torch.equal(parameters["norm"], exact["norm"])


def test_bf16_sees_the_rounded_masters(ranks: RankPool) -> None:
    replies = ranks.run(seen, 2, 3, "int8", torch.bfloat16)
    expected = torch.cat([rounded(reply["master"], "int8") for reply in replies])[: ROWS * COLUMNS]
    for reply in replies:
        torch.testing.assert_close(
            reply["parameters"]["cut"].flatten(), expected.bfloat16(), rtol=2**-7, atol=0
        )


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4), ("fp8", 8)])
def test_bytes_of_a_gather(ranks: RankPool, weights: str, bits: int) -> None:
    """Two ranks: each sends its half once, a scale of four bytes for each block, and the exact rest in fp32.

    A half is a multiple of 64 elements, and so is where a parameter starts.
    """
    reply = ranks.run(seen, 2, 3, weights, torch.float32)[0]
    half, exact_half = 128, 64
    assert half - 64 < ROWS * COLUMNS // 2 <= half
    assert exact_half - 64 < (64 + COLUMNS) // 2 <= exact_half
    codes = -(-half * bits // 8)
    payload = -(-(4 * -(-half // BLOCK) + codes) // 4) * 4
    assert reply["bytes"] == payload + 4 * exact_half


def test_one_rank_gathers_nothing_and_rounds_nothing(ranks: RankPool) -> None:
    (reply,) = ranks.run(seen, 1, 3, "int4", torch.float32)
    assert torch.equal(reply["parameters"]["cut"].flatten(), reply["master"][: ROWS * COLUMNS])
    assert reply["bytes"] == 0


@pytest.mark.parametrize(("key", "value"), [("weights_block_size", 12), ("weights_block_size", 4)])
def test_senseless_values_are_refused(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"compression.{key}={value}"):
        CompressionConfig(**{key: value})  # type: ignore[arg-type]
