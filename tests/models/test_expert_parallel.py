"""A mixture of experts over an expert and a tensor axis against one process with the same micro-batches."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterflow.framework.experts.routing import begin_step, finish_step
from counterflow.models.config import ModelConfig, MoEConfig
from counterflow.models.moe import MoE
from counterflow.models.transformer import materialize
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.expert.exchange import ExpertParallel, even_placement
from counterflow.parallel.ops.weight_grad import WeightGradStore
from counterflow.parallel.parameters import placement_of
from counterflow.parallel.pipeline.runtime.adoption import adopt
from tests.models.placement import assert_close_to_scale, grad_of, slice_of
from tests.rank_pool import RankPool

BATCH, SEQ, HIDDEN, NUM_EXPERTS = 2, 8, 16, 8
PERMUTED = {2: ((7, 2, 0, 5), (1, 6, 3, 4)), 4: ((7,), (2, 0, 5), (1, 6, 3), (4,))}

SOFTMAX = MoEConfig(
    num_experts=NUM_EXPERTS,
    num_experts_per_token=2,
    expert_intermediate_size=12,
    load_balance_loss=0.3,
    z_loss=0.05,
)
DEEPSEEK = MoEConfig(
    num_experts=NUM_EXPERTS,
    num_experts_per_token=3,
    expert_intermediate_size=8,
    num_shared_experts=2,
    shared_expert_gate=True,
    router="sigmoid",
    num_groups=4,
    num_groups_per_token=2,
    routed_scaling_factor=2.5,
    bias_update_speed=0.01,
    sequence_balance_loss=0.2,
    load_balance_loss=0.1,
    load_balance_scope="global_batch",
)
TIGHT = replace(SOFTMAX, capacity_factor=0.6)


def model(moe: MoEConfig) -> ModelConfig:
    return ModelConfig(hidden_size=HIDDEN, num_layers=2, init_std=0.3, moe=moe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks in order of data, then tensor; as many data ranks as the world gives."""

    ep: int
    tp: int = 1
    sequence_parallel: bool = False
    is_permuted: bool = False
    is_deferred: bool = False
    is_skewed: bool = False
    payload_dtype: torch.dtype | None = None


def group(ranks: list[int]) -> Any:
    return dist.new_group(ranks, use_local_synchronization=True) if len(ranks) > 1 else None


class Points:
    """Counts where it was called; the rest is `work.wait()`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.phase = ""

    def wait(self, work: dist.Work | None) -> None:
        self.calls.append(self.phase)
        self.wait_here(work)

    def wait_here(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()


def make(config: ModelConfig, layout: Layout, points: Points | None = None) -> tuple[MoE, ByteMeter]:
    rank = dist.get_rank()
    meter = ByteMeter()
    tensor = Axis(group=group([rank - rank % layout.tp + i for i in range(layout.tp)]), meter=meter)
    axis = Axis(
        group=group([rank - rank % layout.ep + i for i in range(layout.ep)]), name="expert", meter=meter
    )
    placement = PERMUTED[layout.ep] if layout.is_permuted else even_placement(NUM_EXPERTS, layout.ep)
    experts = ExpertParallel(
        axis=axis, experts_by_rank=placement, point=points, payload_dtype=layout.payload_dtype
    )
    layer = MoE(config, layer=1, tensor=tensor, sequence_parallel=layout.sequence_parallel, experts=experts)
    materialize(layer, device="cpu", seed=3)
    return layer, meter


def one_process(config: ModelConfig) -> MoE:
    experts = ExpertParallel(axis=Axis(name="expert"), experts_by_rank=even_placement(NUM_EXPERTS, 1))
    layer = MoE(config, layer=1, tensor=Axis(), sequence_parallel=False, experts=experts)
    materialize(layer, device="cpu", seed=3)
    return layer


def slice_of_experts(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    experts = placement_of(parameter).experts
    return slice_of(parameter, whole) if experts is None else whole[list(experts)]


def inputs(num_data: int, num_microbatches: int) -> list[list[Tensor]]:
    torch.manual_seed(1)
    return [[torch.randn(BATCH, SEQ, HIDDEN) for _ in range(num_microbatches)] for _ in range(num_data)]


def gradients_of_all(layer: MoE) -> dict[str, Tensor]:
    """This rank's gradients, summed over the ranks that hold the same or another part of the batch."""
    ranks: list[dict[str, tuple[Any, Tensor]]] = [{} for _ in range(dist.get_world_size())]
    mine = {
        name: (
            (placement_of(parameter).experts, placement_of(parameter).tensor_start),
            grad_of(parameter),
        )
        for name, parameter in layer.named_parameters()
    }
    dist.all_gather_object(ranks, mine)
    found: dict[str, Tensor] = {}
    tp = layer.tensor.size
    for name, parameter in layer.named_parameters():
        placement = placement_of(parameter)
        terms = [
            grad
            for rank, (key, grad) in enumerate(each[name] for each in ranks)
            if key == mine[name][0]
            and (
                placement.experts is not None
                or placement.partial_over_tensor
                or rank % tp == dist.get_rank() % tp
            )
        ]
        found[name] = torch.stack(terms).sum(0)
    return found


def compare(moe: MoEConfig, layout: Layout, num_steps: int = 2) -> None:
    config, num_microbatches = model(moe), 2
    num_data = dist.get_world_size() // layout.tp
    data_rank, tp_rank = dist.get_rank() // layout.tp, dist.get_rank() % layout.tp
    points = Points()
    reference = one_process(config)
    layer, meter = make(config, layout, points)
    whole = dict(reference.named_parameters())
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.detach(), slice_of_experts(parameter, whole[name].detach())), name

    def buffer(parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    if layout.is_skewed:
        # All choose among the first experts: other ranks receive nothing, and most experts have no rows.
        for router in (layer.router, reference.router):
            router.state.bias[: moe.num_experts_per_token] = 10.0

    store = WeightGradStore(buffer)
    if layout.is_deferred:
        adopted = adopt(layer, store)
        assert {name for name in whole if "shared_gate" not in name} == set(adopted.deferred)

    part = slice(None)
    if layout.sequence_parallel:
        part = slice(tp_rank * SEQ // layout.tp, (tp_rank + 1) * SEQ // layout.tp)
    for _ in range(num_steps):
        reference.zero_grad()
        layer.zero_grad()
        num_valid = num_data * num_microbatches * BATCH * SEQ - 5
        begin_step([reference], num_valid)
        begin_step([layer], num_valid)
        for data, microbatches in enumerate(inputs(num_data, num_microbatches)):
            for microbatch, x in enumerate(microbatches):
                grad_output = torch.randn(x.shape) / num_valid
                expected_x = x.clone().requires_grad_()
                expected = reference(expected_x)
                expected.backward(grad_output)
                if data != data_rank:
                    continue
                own_x = x[:, part].clone().requires_grad_()
                points.phase = "forward"
                out = layer(own_x)
                points.phase = "backward"
                if layout.is_deferred:
                    with store.deferring(microbatch):
                        out.backward(grad_output[:, part])
                    assert layer.experts.up_proj.weight.grad is None or microbatch > 0
                    store.run(microbatch)
                else:
                    # A backward may run in any thread.
                    thread = threading.Thread(target=out.backward, args=(grad_output[:, part],))
                    thread.start()
                    thread.join()
                assert_close_to_scale(out.detach(), expected.detach()[:, part], "output")
                assert_close_to_scale(grad_of(own_x), grad_of(expected_x)[:, part], "input gradient", 256)
        for name, grad in gradients_of_all(layer).items():
            parameter = dict(layer.named_parameters())[name]
            assert_close_to_scale(grad, slice_of_experts(parameter, grad_of(whole[name])), name, 256)
        expected_record = finish_step([reference], config, world=Axis())
        record = finish_step(
            [layer], config, world=Axis(group=dist.group.WORLD), expert_parallel_size=layout.ep
        )
        (routing,), (expected_routing,) = record.layers, expected_record.layers
        assert routing.load == expected_routing.load
        assert routing.num_dropped == expected_routing.num_dropped
        assert (routing.num_dropped > 0) == (moe.capacity_factor is not None)
        assert routing.entropy == pytest.approx(expected_routing.entropy)
        assert routing.imbalance == expected_routing.imbalance
        for loss in ("load_balance_loss", "sequence_balance_loss", "z_loss"):
            found = getattr(routing, loss)
            assert (found is not None) == (getattr(moe, loss) > 0)
            assert found == (None if found is None else pytest.approx(getattr(expected_routing, loss)))
        assert torch.equal(layer.router.state.bias, reference.router.state.bias)
        assert torch.equal(layer.router.state.fractions, reference.router.state.fractions)
        moved = layer.router.state.bias.frac().abs().max() > 0
        assert moved == (moe.bias_update_speed > 0)
        assert (routing.imbalance == NUM_EXPERTS / moe.num_experts_per_token) == layout.is_skewed

    calls: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(calls, points.calls)
    once = ["forward"] * 2 + ["backward"] * 2
    assert calls == [once * (num_microbatches * num_steps)] * len(calls)
    assert (meter.sent_bytes().get("expert", 0) > 0) == (layout.ep > 1)


LAYOUTS = [
    (2, Layout(ep=2)),
    (2, Layout(ep=1, tp=2, sequence_parallel=True)),
    (2, Layout(ep=2, tp=2, is_permuted=True, is_deferred=True)),
    (4, Layout(ep=4, is_permuted=True)),
    (4, Layout(ep=2, tp=2, sequence_parallel=True, is_deferred=True)),
    (4, Layout(ep=4, tp=2)),
    (4, Layout(ep=4, is_skewed=True, is_deferred=True)),
]


@pytest.mark.parametrize(
    ("world_size", "layout"), LAYOUTS, ids=lambda value: str(value).replace("Layout", "")
)
@pytest.mark.parametrize("moe", [SOFTMAX, DEEPSEEK, TIGHT], ids=["softmax", "deepseek", "capacity"])
def test_matches_one_process(ranks: RankPool, moe: MoEConfig, world_size: int, layout: Layout) -> None:
    ranks.run(compare, world_size, moe, layout)


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("moe", [SOFTMAX, DEEPSEEK, TIGHT], ids=["softmax", "deepseek", "capacity"])
def test_every_layout_matches_one_process(
    ranks: RankPool,
    moe: MoEConfig,
    ep: int,
    tp: int,
    sequence_parallel: bool,
    is_permuted: bool,
    is_deferred: bool,
) -> None:
    if ep == 1 and is_permuted:
        pytest.skip("one rank holds all experts")
    layout = Layout(
        ep=ep,
        tp=tp,
        sequence_parallel=sequence_parallel,
        is_permuted=is_permuted,
        is_deferred=is_deferred,
    )
    ranks.run(compare, 4, moe, layout)


def rounded(moe: MoEConfig, layout: Layout) -> tuple[float, int]:
    """How far the output is from one process in fp32, relative to its scale, and the bytes of the first dispatch."""
    config = model(moe)
    reference = one_process(config)
    layer, _ = make(config, layout)
    (x,) = inputs(dist.get_world_size(), 1)[dist.get_rank()]
    with torch.no_grad():
        out, expected = layer(x), reference(x)
        local, _ = make(config, replace(layout, ep=1))
        assert torch.allclose(out, local(x), rtol=1e-5, atol=1e-6)  # tokens that stay are rounded alike
    return (out - expected).abs().max().item() / expected.abs().max().item(), layer.router.state.link_bytes[
        1 - dist.get_rank()
    ]


def test_a_dispatch_in_lower_precision(ranks: RankPool) -> None:
    """Errors are those of the type, and the payload shrinks; the way back is in the type of the model."""
    moe = replace(SOFTMAX, capacity_factor=None)
    found: dict[torch.dtype | None, tuple[float, int]] = {}
    for dtype in (None, torch.bfloat16, torch.float8_e4m3fn):
        errors, sent = zip(*ranks.run(rounded, 2, moe, Layout(ep=2, payload_dtype=dtype)), strict=True)
        found[dtype] = (max(errors), sum(sent))
    assert found[None][0] < 1e-6
    assert 1e-6 < found[torch.bfloat16][0] < 2e-2
    assert found[torch.bfloat16][0] < found[torch.float8_e4m3fn][0] < 0.3
    rows, back = divmod(
        found[None][1], 64 + 16 + 16 + 64
    )  # hidden, weights, slots; and the sum that comes back
    assert back == 0
    assert found[torch.bfloat16][1] == rows * (32 + 16 + 16 + 64)
    assert found[torch.float8_e4m3fn][1] == rows * (16 + 16 + 16 + 16 + 64)
