"""Products in fp8 against exact ones, where torch computes them on a CPU; the layer, a run, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterflow.framework.checks.rules import check
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.devices import device_problems
from counterflow.framework.errors import ConfigError
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.loop import train
from counterflow.framework.trainer.run import RunContext
from counterflow.models.fp8 import fp8_sizes
from counterflow.parallel.ops.fp8 import ACTIVATIONS, GRADIENTS, fp8_product, rounded
from counterflow.parallel.ops.weight_grad import WeightGradStore, split_linear
from tests.rank_pool import RankPool
from tests.tiny import MIXTURES, run_context, tiny_config

# Half a unit in the last place of 3 and of 2 bits behind the point.
UNIT = {ACTIVATIONS: 2**-4, GRADIENTS: 2**-3}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("fp8", [ACTIVATIONS, GRADIENTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_operands(fp8: torch.dtype, dtype: torch.dtype) -> None:
    x, matrix = 300 * normal(2, 5, 32, dtype=dtype), 1e-3 * normal(48, 32, seed=1, dtype=dtype)
    out = fp8_product(x, matrix, fp8)
    assert (out.shape, out.dtype) == ((2, 5, 48), dtype)
    operands = [
        values.double() * float(scale) for values, scale in (rounded(x, fp8), rounded(matrix, ACTIVATIONS))
    ]
    expected = operands[0] @ operands[1].t()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )
    exact = x.double() @ matrix.double().t()
    bound = (UNIT[fp8] + 2**-4) * (x.double().abs() @ matrix.double().abs().t())
    assert bool(((expected - exact).abs() <= 1.1 * bound).all())
    assert not torch.equal(expected, exact)


def test_rounding_uses_the_whole_range() -> None:
    values, scale = rounded(torch.tensor([0.0, 1e-6, -7e-4]), ACTIVATIONS)
    assert float(values[2].float()) == -448.0
    assert float(values[2].float() * scale) == pytest.approx(-7e-4)
    zeros, scale = rounded(torch.zeros(3), ACTIVATIONS)
    assert torch.equal(zeros.float() * scale, torch.zeros(3))
    assert rounded(torch.tensor([torch.nan, 1.0]), ACTIVATIONS)[0].float().isnan().any()


def test_a_layer_in_fp8() -> None:
    """Forward and input gradient are near the exact ones, the weight gradient is the exact one of the same inputs."""
    weight = nn.Parameter(normal(48, 32, seed=1))
    bias = nn.Parameter(normal(48, seed=2))
    buffers = {id(weight): torch.zeros(48, 32), id(bias): torch.zeros(48)}
    store = WeightGradStore(lambda parameter: buffers[id(parameter)])
    x, grad = normal(2, 5, 32).requires_grad_(), normal(2, 5, 48, seed=3)
    out = split_linear(x, weight, bias, store, fp8=True)
    out.backward(grad)
    grad_x = x.grad
    assert grad_x is not None
    theirs = x.detach().requires_grad_()
    expected = F.linear(theirs, weight, bias)
    wanted = torch.autograd.grad(expected, (theirs, weight, bias), grad)
    for found, exact in ((out, expected), (grad_x, wanted[0])):
        error = (found - exact).detach().norm() / exact.detach().norm()
        assert 1e-3 < float(error) < 0.08
    torch.testing.assert_close(buffers[id(weight)], wanted[1])
    torch.testing.assert_close(buffers[id(bias)], wanted[2])
    with torch.no_grad():
        assert torch.equal(split_linear(x, weight, bias, store, fp8=True), out)


def losses(config: TrainConfig, run: RunContext) -> list[float]:
    assembly = build(config, run.data, torch.device("cpu"))
    return [record.loss for record in train(assembly, 0)]


def test_a_run_in_fp8_follows_bf16(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    layout: dict[str, Any] = {
        "pp": 2,
        "schedule": "zb1p",
        "num_microbatches": 2,
        "model": {"num_layers": 2},
        "training": {"num_steps": 6, "eval_interval_steps": 0},
    }
    found = [
        ranks.run(
            losses,
            2,
            tiny_config(**layout, precision={"compute": "bf16", "linear": linear}),
            run_context(tiny_data, tmp_path),
        )[0]
        for linear in ("fp8", "compute")
    ]
    assert found[0] == pytest.approx(found[1], rel=2e-2)
    assert found[0] != found[1]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check(tiny_config(tp=2, precision={"linear": "fp8"}))
    assert "a rank's key/value heads is 8 with parallel.tensor_parallel_size=2" in str(caught.value)
    assert "a rank's model.intermediate_size is 24" in str(caught.value)
    mixture = tiny_config(model=MIXTURES["deepseek_v3"]).model
    assert fp8_sizes(mixture, 1)["model.mla.kv_lora_rank + qk_rope_head_dim"] == 20


def test_without_a_gpu_it_is_refused_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(precision={"linear": "fp8", "norm_kernel": "apex"}, optimizer={"kernel": "apex"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    optimizer, norm, fp8 = device_problems(config)
    assert optimizer.startswith("optimizer.kernel=apex: ")
    assert norm.startswith("precision.norm_kernel=apex: ")
    assert "CUDA capability 8.9 and up" in fp8
    assert device_problems(tiny_config()) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not any("fp8" in problem for problem in device_problems(config))
