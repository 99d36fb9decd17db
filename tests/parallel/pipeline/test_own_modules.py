"""What a user's modules do to their linear layers: every schedule gives the losses and gradients of plain torch."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.utils.checkpoint import checkpoint

from parallel.pipeline.api import build_pipeline
from parallel.pipeline.generate import GENERATORS, generate
from parallel.recompute import recompute
from tests.rank_pool import RankPool

WIDTH, NUM_MICROBATCHES, NUM_RANKS, NUM_STEPS = 4, 4, 2, 2
SCHEDULES = tuple(sorted(set(GENERATORS) - {"naive"}))


class Two(nn.Module):
    """b(tanh(a(x))); `change` is done to a, `use` is what the forward does instead."""

    def __init__(
        self,
        change: Callable[[nn.Linear], object] = lambda layer: None,
        use: Callable[[Two, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use = use
        change(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) if self.use is None else self.use(self, x)


def adapter(layer: nn.Linear) -> None:
    layer.down, layer.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))
    plain = layer.forward
    layer.forward = lambda x: plain(x) + x @ layer.down @ layer.up  # type: ignore[method-assign]


def method(layer: nn.Linear) -> None:
    def tripled(self: nn.Linear, x: Tensor) -> Tensor:
        return 3 * F.linear(x, self.weight, self.bias)

    layer.forward = types.MethodType(tripled, layer)  # type: ignore[method-assign]


class Halved(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def subclass(layer: nn.Linear) -> None:
    layer.__class__ = Halved


class Squared(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.square()


def parametrize(layer: nn.Linear) -> None:
    nn.utils.parametrize.register_parametrization(layer, "weight", Squared())


def freeze(*names: str) -> Callable[[nn.Linear], None]:
    def change(layer: nn.Linear) -> None:
        for name in names:
            getattr(layer, name).requires_grad_(False)

    return change


def quiet_weight_norm(layer: nn.Linear) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(layer)


def energy(stage: Two, x: Tensor) -> Tensor:
    return stage.b(torch.tanh(stage.a(x))).square().sum()


def force(stage: Two, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return -torch.autograd.grad(energy(stage, x), x, create_graph=True)[0]


def force_and_output(stage: Two, x: Tensor) -> Tensor:
    at = x if x.requires_grad else x.detach().requires_grad_()
    return x + torch.autograd.grad(energy(stage, at), at, create_graph=True)[0]


def detached_feature(stage: Two, x: Tensor) -> Tensor:
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        feature = torch.autograd.grad(energy(stage, at), at)[0]
    return stage.b(torch.tanh(stage.a(x)) + feature)


def norm_of_weight_gradients(stage: Two, x: Tensor) -> Tensor:
    grads = torch.autograd.grad(energy(stage, x), (stage.a.weight, stage.b.bias), create_graph=True)
    return stage.b(stage.a(x)) + sum(grad.square().mean() for grad in grads)


def own_backward(stage: Two, x: Tensor) -> Tensor:
    energy(stage, x.detach()).backward()
    return stage.a(x)


def feature_under_checkpoint(stage: Two, x: Tensor) -> Tensor:
    return checkpoint(detached_feature, stage, x, use_reentrant=False)  # type: ignore[return-value]


def no_grad(stage: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = x + stage.a(x)
    return stage.b(x)


def autocast(stage: Two, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = stage.a(x)
    return stage.b(out.float())


def autocast_twice_differentiated(stage: Two, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return force(stage, x)


def swapped_weights(stage: Two, x: Tensor) -> Tensor:
    weights = {"weight": stage.a.weight * 2, "bias": stage.a.bias + 1}
    return functional_call(stage.b, weights, (stage.a(x),))


def derivative(stage: Two, x: Tensor) -> Tensor:
    return sum(jvp(lambda y: torch.tanh(stage.a(y)), (x,), (torch.ones_like(x),)))  # type: ignore[return-value]


def in_place(stage: Two, x: Tensor) -> Tensor:
    out = stage.a(x.view(1, *x.shape))
    left, right = out.relu_().chunk(2, dim=-1)
    return stage.b(torch.cat([left, right.mul(2)], -1)).squeeze(0)


class Offset(nn.Module):
    """Two places that are given the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(2 * WIDTH))
        self.a = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Parameter(torch.randn(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.first.view_as(x) + self.a(x) + self.last.view_as(x)


class Unused(Two):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2).requires_grad_(False)


CASES: dict[str, Callable[[], nn.Module]] = {
    "as torch wrote it": Two,
    "adapter": lambda: Two(adapter),
    "forward as a method": lambda: Two(method),
    "subclass": lambda: Two(subclass),
    "parametrization": lambda: Two(parametrize),
    "old weight norm": lambda: Two(quiet_weight_norm),
    "weight norm": lambda: Two(nn.utils.parametrizations.weight_norm),
    "forward hook": lambda: Two(lambda layer: layer.register_forward_hook(lambda *given: 3 * given[2])),
    "forward pre-hook": lambda: Two(lambda layer: layer.register_forward_pre_hook(lambda _, x: 3 * x[0])),
    "backward hook": lambda: Two(
        lambda layer: layer.register_full_backward_hook(
            lambda _, grads, __: (3 * grads[0],) if grads[0] is not None else None
        )
    ),
    "backward pre-hook": lambda: Two(
        lambda layer: layer.register_full_backward_pre_hook(lambda _, grads: (3 * grads[0],))
    ),
    "hook on the weight": lambda: Two(lambda layer: layer.weight.register_hook(lambda grad: 3 * grad)),
    "frozen weight": lambda: Two(freeze("weight")),
    "frozen bias": lambda: Two(freeze("bias")),
    "frozen layer": lambda: Two(freeze("weight", "bias")),
    "weight tied within": lambda: Two(use=lambda s, x: s.b(s.a(x)) @ s.a.weight),
    "no weight but its double": lambda: Two(use=lambda s, x: F.linear(s.a(x), 2 * s.b.weight)),
    "twice": lambda: Two(use=lambda s, x: s.a(torch.tanh(s.a(x)))),
    "by keyword": lambda: Two(use=lambda s, x: s.a(input=x)),
    "three dimensions": lambda: Two(use=lambda s, x: s.b(s.a(x[:, None].expand(-1, 3, -1))).sum(1)),
    "one dimension": lambda: Two(use=lambda s, x: torch.stack([s.b(s.a(row)) for row in x])),
    "in place": lambda: Two(use=in_place),
    "gradient of the input": lambda: Two(use=force),
    "gradient and input": lambda: Two(use=force_and_output),
    "gradient as a feature": lambda: Two(use=detached_feature),
    "gradients of weights": lambda: Two(use=norm_of_weight_gradients),
    "backward within": lambda: Two(use=own_backward),
    "gradient under checkpoint": lambda: Two(use=feature_under_checkpoint),
    "checkpoint": lambda: Two(use=lambda s, x: checkpoint(lambda y: s.b(s.a(y)), x, use_reentrant=False)),
    "checkpoint, reentrant": lambda: Two(
        use=lambda s, x: checkpoint(lambda y: s.b(s.a(y)), s.a(x), use_reentrant=True)
    ),
    "recomputed": lambda: Two(use=lambda s, x: recompute(detached_feature, s, x)),
    "without gradients": lambda: Two(use=no_grad),
    "autocast": lambda: Two(use=autocast),
    "autocast, gradient of the input": lambda: Two(use=autocast_twice_differentiated),
    "weights of another": lambda: Two(use=swapped_weights),
    "forward mode": lambda: Two(use=derivative),
    "one gradient in two places": Offset,
    "no part": Unused,
}


class Result(NamedTuple):
    losses: Tensor
    gradients: dict[str, Tensor | None]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 2 * NUM_MICROBATCHES, WIDTH, generator=generator)
    return inputs, targets


def make(case: str, index: int) -> nn.Module:
    torch.manual_seed(index)
    return CASES[case]()


def run(schedule: str) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for case in CASES:
        with build_pipeline(
            lambda index, case=case: make(case, index), schedule, num_microbatches=NUM_MICROBATCHES
        ) as pipeline:
            losses = [pipeline.step(*batch(step), F.mse_loss).losses for step in range(NUM_STEPS)]
        gradients = {
            f"{index}.{name}": parameter.grad
            for index, module in pipeline.modules.items()
            for name, parameter in module.named_parameters()
        }
        found[case] = Result(torch.stack(losses), gradients)
    return found


def run_plain(case: str, num_stages: int) -> Result:
    model = nn.Sequential(*(make(case, index) for index in range(num_stages)))
    losses: list[Tensor] = []
    for step in range(NUM_STEPS):
        for x, target in zip(*(values.chunk(NUM_MICROBATCHES) for values in batch(step)), strict=True):
            loss = F.mse_loss(model(x), target)
            (loss / NUM_MICROBATCHES).backward()
            losses.append(loss.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Result(torch.stack(losses).view(NUM_STEPS, -1), gradients)


def assert_close(found: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    difference = float((found - expected).norm() / (expected.norm() + 1e-6))
    assert difference <= tolerance, f"{what}: relative difference {difference:.1e}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_plain_torch(ranks: RankPool, schedule: str) -> None:
    num_stages = generate(schedule, NUM_RANKS, NUM_MICROBATCHES).num_stages
    by_rank = ranks.run(run, NUM_RANKS, schedule)
    for case in CASES:
        expected = run_plain(case, num_stages)
        # A sum over micro-batches in bf16 depends on their order, which is the schedule's.
        tolerance = 1e-2 if "autocast" in case else 1e-6
        for found in by_rank:
            what = f"{schedule}, {case}"
            assert_close(found[case].losses, expected.losses, f"{what}: losses", tolerance)
            for name, gradient in found[case].gradients.items():
                wanted = expected.gradients[name]
                assert (gradient is None) == (wanted is None), f"{what}: {name} is {gradient}, not {wanted}"
                if gradient is not None and wanted is not None:
                    assert_close(gradient, wanted, f"{what}: {name}", tolerance)
