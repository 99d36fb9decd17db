"""The model over a tensor axis against one process: logits, loss, the gradient of every parameter."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from counterflow.models.config import ModelConfig
from counterflow.models.transformer import TransformerStage, materialize
from counterflow.parallel.collectives import Axis, ByteMeter
from counterflow.parallel.ops.loss import vocab_parallel_cross_entropy
from counterflow.parallel.parameters import placement_of
from tests.models.placement import assert_close_to_scale, fill, grad_of, slice_of
from tests.rank_pool import RankPool

CONFIG = ModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8, num_kv_heads=4, init_std=0.1
)
BATCH, SEQ = 2, 12
IGNORED = -100


def build(
    config: ModelConfig, axis: Axis, sequence_parallel: bool, vocab_size: int, layers: range, seed: int = 5
) -> TransformerStage:
    stage = TransformerStage(
        config,
        layers,
        first=layers.start == 0,
        last=layers.stop == config.num_layers,
        tensor=axis,
        sequence_parallel=sequence_parallel,
        vocab_size=vocab_size,
    )
    materialize(stage, device="cpu", seed=seed)
    return stage


def compare(sequence_parallel: bool, vocab_size: int, tied: bool, num_stages: int) -> None:
    config = replace(CONFIG, tie_embeddings=tied)
    torch.manual_seed(8)
    tokens = torch.randint(0, vocab_size, (BATCH, SEQ))
    targets = torch.randint(0, vocab_size, (BATCH, SEQ))
    targets[0, 3:6] = IGNORED
    weights = torch.rand(BATCH, SEQ)

    reference = build(config, Axis(), False, vocab_size, range(2))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    expected = reference(tokens)
    expected_loss = F.cross_entropy(
        expected.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
    ).view(BATCH, SEQ)
    (expected_loss * weights).sum().backward()
    whole = dict(reference.named_parameters())

    axis = Axis(group=dist.group.WORLD)
    bounds = [0, 1, 2] if num_stages == 2 else [0, 2]
    stages = [
        build(config, axis, sequence_parallel, vocab_size, range(start, stop))
        for start, stop in pairwise(bounds)
    ]
    x = tokens
    for stage in stages:
        for name, parameter in stage.named_parameters():
            fill(parameter, whole[placement_of(parameter).tied_to or name].detach())
        x = stage(x)
        if stage is not stages[-1]:
            part = SEQ // axis.size if sequence_parallel else SEQ
            assert x.shape == (BATCH, part, config.hidden_size)
    loss = vocab_parallel_cross_entropy(x, targets, axis, vocab_size=vocab_size, ignore_index=IGNORED)
    (loss * weights).sum().backward()

    local = -(-vocab_size // axis.size)
    assert x.shape == (BATCH, SEQ, local)
    columns = slice(axis.rank * local, min(vocab_size, (axis.rank + 1) * local))
    own = expected.detach()[..., columns]
    if own.shape[-1]:
        assert_close_to_scale(x[..., : own.shape[-1]], own, "logits")
    assert_close_to_scale(loss, expected_loss.detach(), "loss")

    grads: dict[str, Tensor] = {}
    owners = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            grad = grad_of(parameter).clone()
            if placement_of(parameter).partial_over_tensor:
                assert sequence_parallel
                dist.all_reduce(grad)
            source = placement_of(parameter).tied_to or name if tied else name
            grads[source] = grads[source] + grad if source in grads else grad
            owners[source] = parameter
    assert set(grads) == set(whole)
    for name, grad in grads.items():
        assert_close_to_scale(grad, slice_of(owners[name], grad_of(whole[name])), name)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tied", "num_stages"), [(False, 1), (True, 1), (True, 2)])
def test_matches_one_process(
    ranks: RankPool, size: int, sequence_parallel: bool, tied: bool, num_stages: int
) -> None:
    ranks.run(compare, size, sequence_parallel, 41, tied, num_stages)


def test_a_rank_with_nothing_but_padding(ranks: RankPool) -> None:
    ranks.run(compare, 4, True, 5, False, 1)


def initial_values(sequence_parallel: bool) -> dict[str, Tensor]:
    axis = Axis(group=dist.group.WORLD)
    stage = build(CONFIG, axis, sequence_parallel, 41, range(2))
    reference = build(CONFIG, Axis(), False, 41, range(2))
    whole = dict(reference.named_parameters())
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter.detach(), slice_of(parameter, whole[name].detach())), name
    return {name: parameter.detach() for name, parameter in whole.items()}


def test_initial_values_do_not_depend_on_the_layout(ranks: RankPool) -> None:
    found = [ranks.run(initial_values, size, True)[0] for size in (1, 2, 4)]
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


def counted_bytes(sequence_parallel: bool) -> tuple[int, int]:
    meter = ByteMeter()
    axis = Axis(group=dist.group.WORLD, meter=meter)
    stage = build(CONFIG, axis, sequence_parallel, 40, range(2))
    logits = stage(torch.zeros(BATCH, SEQ, dtype=torch.int64))
    forward = meter.sent_bytes()["tensor"]
    logits.backward(torch.ones_like(logits))
    return forward, meter.sent_bytes()["tensor"] - forward


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bytes_on_the_tensor_axis(ranks: RankPool, sequence_parallel: bool) -> None:
    """Korthikanti et al., section 4.2: sequence parallelism moves as much, an all-reduce being a
    reduce-scatter and an all-gather. q, k, v share one, gate and up another."""
    unit = (4 - 1) * BATCH * SEQ * CONFIG.hidden_size * 4 // 4  # an all-gather of one activation, 4 ranks
    for forward, backward in ranks.run(counted_bytes, 4, sequence_parallel):
        # Four leaving regions and the embedding, each 2 units as an all-reduce. Under sequence parallelism each
        # is one unit, and the same number of regions (the head is the fifth) is entered by a gather.
        assert forward == 10 * unit
        assert backward == 10 * unit


def refuse_heads() -> None:
    with pytest.raises(ValueError, match=r"model.num_kv_heads=3: .*tensor_parallel_size=2.*use fewer"):
        TransformerStage(
            replace(CONFIG, num_kv_heads=3, num_heads=6, head_dim=8),
            range(2),
            first=True,
            last=True,
            tensor=Axis(group=dist.group.WORLD),
            sequence_parallel=True,
            vocab_size=8,
        )


def test_heads_that_the_axis_does_not_divide_are_refused(ranks: RankPool) -> None:
    ranks.run(refuse_heads, 2)
