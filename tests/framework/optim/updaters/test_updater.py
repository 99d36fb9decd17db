"""Updaters against torch.optim.AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.updaters.updater import STATE_NAMES, Part, TorchAdamW, Updater

SIZES = (1, 63, 1000, 4100)
RATES = (1e-3, 3e-3, 2e-3, 1e-3)


def parts_of(updater: Updater, config: OptimizerConfig, seed: int = 0) -> list[Part]:
    """A part of each of `SIZES`, every other one without weight decay."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[Part] = []
    for index, size in enumerate(SIZES):
        master = torch.randn(size, generator=generator)
        parts.append(
            Part(
                master=master,
                grad=torch.zeros(size),
                state=updater.new_state(master),
                weight_decay=config.weight_decay * (index % 2),
            )
        )
    return parts


def run_updater(updater: Updater, parts: list[Part]) -> list[Tensor]:
    """Masters and moments after a step at each of `RATES`."""
    for step, rate in enumerate(RATES, start=1):
        generator = torch.Generator().manual_seed(step)
        for part in parts:
            part.grad.copy_(torch.randn(part.grad.numel(), generator=generator))
        updater.update(parts, step=step, learning_rate=rate)
    return [tensor.clone() for part in parts for tensor in (part.master, *part.state.values())]


def torch_reference(config: OptimizerConfig, parts: list[Part]) -> list[Tensor]:
    """The same steps by torch.optim.AdamW, on copies."""
    masters = [torch.nn.Parameter(part.master.clone()) for part in parts]
    adamw = torch.optim.AdamW(
        [
            {"params": [master], "weight_decay": part.weight_decay}
            for master, part in zip(masters, parts, strict=True)
        ],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for step, rate in enumerate(RATES, start=1):
        generator = torch.Generator().manual_seed(step)
        for group, master in zip(adamw.param_groups, masters, strict=True):
            group["lr"] = rate
            master.grad = torch.randn(master.numel(), generator=generator)
        adamw.step()
    return [
        tensor.detach()
        for master in masters
        for tensor in (master, *(adamw.state[master][name] for name in STATE_NAMES))
    ]


def test_torch_adamw_is_the_optimizer_to_the_bit() -> None:
    config = OptimizerConfig(weight_decay=0.3)
    updater = TorchAdamW(config)
    parts = parts_of(updater, config)
    expected = torch_reference(config, parts)
    for mine, theirs in zip(run_updater(updater, parts), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("chunk", [64, 1024])
def test_a_part_may_be_cut(chunk: int) -> None:
    config = OptimizerConfig()
    updater = TorchAdamW(config)
    expected = run_updater(updater, parts_of(updater, config))
    parts = parts_of(updater, config)
    cut = [
        part.cut(start, min(start + chunk, part.master.numel()))
        for part in parts
        for start in range(0, part.master.numel(), chunk)
    ]
    for step, rate in enumerate(RATES, start=1):
        generator = torch.Generator().manual_seed(step)
        for part in parts:
            part.grad.copy_(torch.randn(part.grad.numel(), generator=generator))
        updater.update(cut, step=step, learning_rate=rate)
    mine = [tensor for part in parts for tensor in (part.master, *part.state.values())]
    for one, other in zip(mine, expected, strict=True):
        assert torch.equal(one, other)
