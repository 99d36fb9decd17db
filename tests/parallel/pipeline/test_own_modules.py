"""What a user's modules do to their linear layers: every schedule gives the losses and gradients of plain torch."""

from __future__ import annotations

import copy
import os
import types
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, jvp
from torch.utils.checkpoint import checkpoint

from counterflow.parallel.ops.recompute import recompute
from counterflow.parallel.pipeline.api import build_pipeline
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.rank_pool import RankPool

WIDTH, NUM_MICROBATCHES, NUM_RANKS, NUM_STEPS = 4, 4, 2, 2
SCHEDULES = tuple(sorted(set(generated_schedules()) - {"naive"}))


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


class Embedded(Two):
    """Sparse gradients; `tied`: of the weight of a linear as well."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH, sparse=True)
        if tied:
            self.a.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) + self.embedding(x.detach().argmax(-1)))


def hook_where_it_accumulates(layer: nn.Linear) -> None:
    """As libraries do that take gradients while a backward runs; the node lives as long as somebody holds it."""
    node = get_gradient_edge(layer.weight).node
    node.register_prehook(lambda grads: (3 * grads[0],))
    vars(layer)["node"] = node


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
    "hook on the node of the weight": lambda: Two(hook_where_it_accumulates),
    "sparse": lambda: Embedded(tied=False),
    "sparse, tied to a linear": lambda: Embedded(tied=True),
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


# Where a stage passes no gradient on the stages before it have none: with others beside it they would.
ALONE = ("gradient of the input", "without gradients")
TOGETHER = tuple(case for case in CASES if case not in ALONE)


class Together(nn.Module):
    """Every case on its own part of the input, x [rows, cases, WIDTH], so that one pipeline is built for all."""

    def __init__(self, index: int, names: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.cases = nn.ModuleDict({name: CASES[name]() for name in names})

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.cases.values(), x.unbind(1), strict=True)
        return torch.stack([case(part) for case, part in parts], 1)


class Result(NamedTuple):
    losses: Tensor
    gradients: dict[str, Tensor | None]


def batch(step: int, num_cases: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 2 * NUM_MICROBATCHES, num_cases, WIDTH, generator=generator)
    return inputs, targets


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean((0, 2)).sum()


def run(schedule: str, names: tuple[str, ...]) -> Result:
    with build_pipeline(
        lambda index: Together(index, names), schedule, num_microbatches=NUM_MICROBATCHES
    ) as pipeline:
        losses = [pipeline.step(*batch(step, len(names)), loss_of).losses for step in range(NUM_STEPS)]
    gradients = {
        f"{index}.{name}": parameter.grad
        for index, module in pipeline.modules.items()
        for name, parameter in module.named_parameters()
    }
    return Result(torch.stack(losses), gradients)


def run_all(schedule: str) -> list[Result]:
    return [run(schedule, names) for names in (TOGETHER, *((case,) for case in ALONE))]


@cache
def run_plain(names: tuple[str, ...], num_stages: int) -> Result:
    model = nn.Sequential(*(Together(index, names) for index in range(num_stages)))
    losses: list[Tensor] = []
    for step in range(NUM_STEPS):
        parts = (values.chunk(NUM_MICROBATCHES) for values in batch(step, len(names)))
        for x, target in zip(*parts, strict=True):
            loss = loss_of(model(x), target)
            (loss / NUM_MICROBATCHES).backward()
            losses.append(loss.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Result(torch.stack(losses).view(NUM_STEPS, -1), gradients)


def differences(found: Result, expected: Result) -> list[str]:
    wrong: list[str] = []
    if float((found.losses - expected.losses).norm() / expected.losses.norm()) > 1e-6:
        wrong.append(f"losses are {found.losses}, not {expected.losses}")
    for name, gradient in found.gradients.items():
        wanted = expected.gradients[name]
        if gradient is None or wanted is None:
            if gradient is not wanted:
                wrong.append(f"{name} is {gradient}, not {wanted}")
            continue
        if gradient.is_sparse != wanted.is_sparse:
            wrong.append(f"{name} has the layout {gradient.layout}, not {wanted.layout}")
        gradient, wanted = gradient.to_dense(), wanted.to_dense()
        difference = float((gradient - wanted).norm() / (wanted.norm() + 1e-6))
        # A sum over micro-batches in bf16 depends on their order, which is the schedule's.
        if difference > (1e-2 if "autocast" in name else 1e-6):
            wrong.append(f"{name}: relative difference {difference:.1e}")
    return wrong


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_plain_torch(ranks: RankPool, schedule: str) -> None:
    num_stages = generate(schedule, NUM_RANKS, NUM_MICROBATCHES).num_stages
    for by_case in ranks.run(run_all, NUM_RANKS, schedule):
        for names, found in zip((TOGETHER, *((case,) for case in ALONE)), by_case, strict=True):
            assert differences(found, run_plain(names, num_stages)) == []


class Tied(nn.Module):
    def __init__(self, index: int, tied: nn.Module | nn.Parameter | None) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.own, self.tied = nn.Linear(WIDTH, WIDTH), tied

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.own(x))
        if self.tied is None:
            return x
        return x @ self.tied if isinstance(self.tied, nn.Parameter) else self.tied(x)


def tied_maker(num_stages: int, is_linear: bool) -> tuple[Callable[[int], Tied], nn.Parameter]:
    """Stages of which the first and the last share a weight, and that weight."""
    torch.manual_seed(1)
    shared = nn.Linear(WIDTH, WIDTH, bias=False) if is_linear else nn.Parameter(torch.randn(WIDTH, WIDTH))
    weight = cast(nn.Parameter, shared.weight if isinstance(shared, nn.Linear) else shared)
    return lambda index: Tied(index, shared if index in (0, num_stages - 1) else None), weight


def step_with_tie(schedule: str) -> list[tuple[Tensor | None, int]]:
    num_stages = generate(schedule, NUM_RANKS, NUM_MICROBATCHES).num_stages
    found: list[tuple[Tensor | None, int]] = []
    for is_linear in (True, False):
        make, weight = tied_maker(num_stages, is_linear)
        with build_pipeline(make, schedule, num_microbatches=NUM_MICROBATCHES) as pipeline:
            for step in range(NUM_STEPS):
                pipeline.step(*batch(step, 1), loss_of)
        found.append((weight.grad, sum(parameter is weight for parameter in pipeline.parameters())))
    return found


@pytest.mark.parametrize("schedule", ["zbv", "v_half", "v_min", "dualpipe", "dualpipe_v"])
def test_a_weight_of_two_stages_of_a_rank_counts_once(ranks: RankPool, schedule: str) -> None:
    by_rank = ranks.run(step_with_tie, NUM_RANKS, schedule)
    num_stages = generate(schedule, NUM_RANKS, NUM_MICROBATCHES).num_stages
    for number, is_linear in enumerate((True, False)):
        make, weight = tied_maker(num_stages, is_linear)
        model = nn.Sequential(*map(make, range(num_stages)))
        for step in range(NUM_STEPS):
            for x, target in zip(*(v.chunk(NUM_MICROBATCHES) for v in batch(step, 1)), strict=True):
                (loss_of(model(x), target) / NUM_MICROBATCHES).backward()
        assert weight.grad is not None
        # Both copies of two-copy schedules hold it; of others the rank of the first stage.
        for found in by_rank if schedule == "dualpipe" else by_rank[:1]:
            gradient, count = found[number]
            assert count == 1
            assert gradient is not None
            assert float((gradient - weight.grad).norm() / weight.grad.norm()) < 1e-6


def build_with_a_cached_weight(schedule: str) -> None:
    cached: list[nn.Linear] = []

    def make(index: int) -> Tied:
        cached.extend([] if cached else [nn.Linear(WIDTH, WIDTH)])
        return Tied(index, cached[0])

    build_pipeline(make, schedule, num_microbatches=NUM_MICROBATCHES)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "zbv"])
def test_a_weight_that_is_made_with_the_first_stage_and_kept_is_refused_too(
    ranks: RankPool, schedule: str
) -> None:
    with pytest.raises(AssertionError, match=r"'tied.weight' of stage \d .* are one parameter"):
        ranks.run(build_with_a_cached_weight, NUM_RANKS, schedule)


def stages_that_are_made() -> list[int]:
    made: list[int] = []

    def make(index: int) -> nn.Module:
        made.append(index)
        return nn.Sequential(Two(), nn.ModuleList([nn.Embedding(2, 2), nn.BatchNorm1d(2), nn.Identity()]))

    build_pipeline(make, "1f1b", num_microbatches=NUM_MICROBATCHES).close()
    return made


def test_stages_of_other_ranks_are_not_made_where_nothing_is_shared(ranks: RankPool) -> None:
    assert ranks.run(stages_that_are_made, NUM_RANKS) == [[0], [1]]


def test_a_weight_of_stages_on_different_ranks_is_refused(ranks: RankPool) -> None:
    message = (
        r"'tied.weight' of stage 0 \(pipeline ranks \[0\]\) and 'tied.weight' of stage 1 \(ranks \[1\]\)"
    )
    with pytest.raises(AssertionError, match=message):
        ranks.run(step_with_tie, NUM_RANKS, "1f1b")


def test_hooks_after_accumulation_are_called_for_each_backward() -> None:
    module = Two()
    calls: list[bool] = []
    module.a.weight.register_post_accumulate_grad_hook(lambda weight: calls.append(weight.grad is not None))
    with build_pipeline(lambda index: module, "zb1p", num_microbatches=2) as pipeline:
        pipeline.step(torch.randn(2, WIDTH), torch.randn(2, WIDTH), F.mse_loss)
    assert calls == [True, True]


def test_an_input_may_need_a_gradient() -> None:
    def derivative_of(stage: Two, x: Tensor) -> Tensor:
        return torch.autograd.grad(energy(stage, x), x, create_graph=True)[0] + x

    inputs = torch.randn(4, WIDTH, requires_grad=True)
    model = Two(use=derivative_of)
    (expected,) = torch.autograd.grad(F.mse_loss(model(inputs), torch.zeros(4, WIDTH)), inputs)
    with build_pipeline(lambda index: model, "1f1b", num_microbatches=2) as pipeline:
        pipeline.step(inputs, torch.zeros(4, WIDTH), F.mse_loss)
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad, expected)


def test_dropout_draws_what_it_draws_in_plain_torch() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH))
    inputs = torch.randn(4, WIDTH)
    torch.manual_seed(0)
    expected = [F.mse_loss(model(x), x).detach() for x in inputs.chunk(2)]
    torch.manual_seed(0)
    with build_pipeline(lambda index: model, "zb1p", num_microbatches=2) as pipeline:
        torch.testing.assert_close(pipeline.step(inputs, inputs, F.mse_loss).losses, torch.stack(expected))


def test_a_closed_pipeline_leaves_the_modules_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    pipeline = build_pipeline(lambda index: model, "1f1b", num_microbatches=1)
    average = copy.deepcopy(model)
    assert torch.equal(average(torch.ones(1, WIDTH)), model(torch.ones(1, WIDTH)))
    pipeline.close()
    pipeline.close()
    assert "forward" not in model[0].__dict__
    with pytest.raises(RuntimeError, match="has been closed"):
        pipeline.step(torch.ones(1, WIDTH), torch.ones(1, WIDTH), F.mse_loss)


def threads_and_groups() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(dist.distributed_c10d._world.pg_map)


def build_and_close() -> list[tuple[int, int]]:
    dist.barrier()
    found = [threads_and_groups()]
    for _ in range(2):
        with build_pipeline(
            lambda index: nn.Linear(WIDTH, WIDTH), "dualpipe", num_microbatches=4
        ) as pipeline:
            pipeline.step(torch.ones(4, WIDTH), torch.ones(4, WIDTH), F.mse_loss)
        found.append(threads_and_groups())
    return found


def test_a_closed_pipeline_leaves_no_group_and_no_thread(ranks: RankPool) -> None:
    for before, first, second in ranks.run(build_and_close, NUM_RANKS):
        assert first[1] == second[1] == before[1]
        assert first[0] == second[0]
