"""Masters on the host: the same bits as on the device, at every stage of ZeRO, and DeepSpeed's CPUAdam beside torch.

There is no device here but the host, so a copy goes from memory to memory; that gathers start from the right one, and
that nothing is an alias which is not, shows all the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.framework.deepspeed.cpu_adam import CpuAdam, is_built, why_no_cpu_adam
from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.optimizer import ModelOptimizer
from counterflow.framework.optim.updaters.host_states import HostStates, nothing_moves
from counterflow.framework.optim.updaters.updater import TorchAdamW
from counterflow.parallel.collectives import Axis
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.zero.config import ZeroConfig
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.stage import ShardedStage
from tests.framework.optim.updaters.test_updater import parts_of, run_updater, torch_reference
from tests.rank_pool import RankPool

CASES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1-bf16": {"stage": 1, "dtype": torch.bfloat16},
    "zero2": {"stage": 2},
    "zero3-bf16": {"stage": 3, "dtype": torch.bfloat16},
    "zero3-parameters": {"stage": 3, "offload_parameters": True},
    "zero3-quantised": {"stage": 3, "dtype": torch.bfloat16, "weights": "int8"},
}


def parameters_after(case: dict[str, Any], host_masters: bool) -> list[Tensor]:
    """The whole parameters after three steps on gradients of ones' own rank."""
    axis = Axis(group=dist.group.WORLD, name="data")
    module = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 7, bias=False)).to("meta")
    stage = ShardedStage(
        module,
        ZeroContext(
            config=ZeroConfig(stage=case["stage"], offload_parameters=case.get("offload_parameters", False)),
            replica=ReplicaAxes.of(axis),
            dtype=case.get("dtype", torch.float32),
            compression=CompressionConfig(weights=case.get("weights", "none")),
            host_masters=host_masters,
        ),
    )
    config = OptimizerConfig()
    updater = HostStates(TorchAdamW(config)) if host_masters else TorchAdamW(config)
    optimizer = ModelOptimizer([stage], config, tensor=Axis(), world=axis, updater=updater)
    for step in range(3):
        stage.begin_step()
        generator = torch.Generator().manual_seed(step * 2 + axis.rank)
        for parameter in module.parameters():
            buffer = stage.gradient_buffer(parameter)
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        stage.reduce_grad()
        stage.finish_step()
        optimizer.step(1e-2)
    stage.unshard()
    stage.wait_unshard()
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_masters_on_the_host_change_no_bit(ranks: RankPool, name: str) -> None:
    expected = ranks.run(parameters_after, 2, CASES[name], False)
    found = ranks.run(parameters_after, 2, CASES[name], True)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


def test_that_nothing_moves_on_a_cpu_is_said() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    said = nothing_moves("host", offload_parameters=True, device=cpu)
    assert said is not None
    assert said.startswith("optimizer.offload.tier=host and zero.offload_parameters=true: ranks on a CPU")
    assert nothing_moves("host", offload_parameters=True, device=gpu) is None
    assert nothing_moves("disk", offload_parameters=False, device=cpu) is None


def compare_cpu_adam() -> None:
    """1e-5 of each tensor's largest element: the operator rounds in another order, over four steps."""
    config = OptimizerConfig(weight_decay=0.3)
    updater = CpuAdam(config)
    parts = parts_of(updater, config)
    expected = torch_reference(config, parts)
    before = [part.master.clone() for part in parts]
    found = run_updater(HostStates(updater), parts)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))
    assert not any(torch.equal(old, part.master) for old, part in zip(before, parts, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not is_built(), reason="CPUAdam is not compiled here yet; `pytest -m slow` does that")
def test_cpu_adam_is_adamw() -> None:
    compare_cpu_adam()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(why_no_cpu_adam() is not None, reason=str(why_no_cpu_adam()))
def test_cpu_adam_is_compiled_and_is_adamw() -> None:
    compare_cpu_adam()


def test_without_a_compiler_cpu_adam_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterflow.framework.deepspeed.cpu_adam.is_built", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"optimizer.kernel=cpu_adam: .*no-such-compiler.*optimizer=adamw"):
        CpuAdam(OptimizerConfig())
