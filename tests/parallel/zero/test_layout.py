"""Flat layouts: aligned at any number of replicas, and the blocks and orders of a stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from counterflow.models.config import ModelConfig
from counterflow.models.transformer import TransformerStage
from counterflow.parallel.collectives import Axis
from counterflow.parallel.zero.blocks import first_order, next_blocks, position_of
from counterflow.parallel.zero.layout import ALIGNMENT, lay_out, ordered

MODEL = ModelConfig(
    name="tiny",
    hidden_size=40,
    intermediate_size=72,
    num_layers=3,
    num_heads=5,
    num_kv_heads=5,
    tie_embeddings=False,
)


def stage(model: ModelConfig = MODEL, **ends: bool) -> TransformerStage:
    ends = {"first": True, "last": True, **ends}
    return TransformerStage(
        model,
        range(model.num_layers),
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=321,
        **ends,
    )


@pytest.mark.parametrize("num_replicas", [1, 2, 6, 24, 512])
def test_every_parameter_and_shard_starts_at_a_multiple_of_64(num_replicas: int) -> None:
    layout = lay_out(ordered(list(stage().named_parameters())), num_replicas)
    assert layout.shard_size % ALIGNMENT == 0
    assert all(slot.start % ALIGNMENT == 0 for slot in layout.slots)
    assert layout.slots[-1].stop <= layout.shard_size * num_replicas
    # No more than what the two roundings take.
    numel = sum(slot.stop - slot.start for slot in layout.slots)
    assert layout.shard_size * num_replicas < numel + ALIGNMENT * (len(layout.slots) + num_replicas)


def test_what_lies_in_the_buffer_is_the_parameters_and_the_padding() -> None:
    named = [
        ("a", nn.Parameter(torch.empty(3, 7))),
        ("b", nn.Parameter(torch.empty(64))),
        ("c", nn.Parameter(torch.empty(5))),
    ]
    layout = lay_out(named, 2)
    assert [(slot.start, slot.stop) for slot in layout.slots] == [(0, 21), (64, 128), (128, 133)]
    assert layout.padded_shapes() == [(3, 7), (43,), (64,), (5,)]
    assert layout.shard_size == 128  # half of 133, rounded up


def test_the_blocks_of_a_stage_have_all_its_parameters() -> None:
    whole = stage()
    names = [block.name for block in whole.blocks()]
    assert names == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    held = [id(each) for block in whole.blocks() for each in block.parameters()]
    assert sorted(held) == sorted(id(each) for each in whole.parameters())
    assert [block.name for block in stage(first=False, last=False).blocks()] == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]


def test_the_backward_of_an_embedding_needs_no_weights() -> None:
    reads = [block.reads_in_backward for block in stage().blocks()]
    assert first_order(reads, is_backward=False) == (0, 1, 2, 3, 4)
    assert first_order(reads, is_backward=True) == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("current", "coming", "count", "expected"),
    [
        (0, (1, 2, 3), 1, (1,)),
        (0, (1, 2, 3), 2, (1, 2)),
        # Over the end of a forward into the backward, which begins with the block that is there.
        (4, (4, 3, 2), 1, (3,)),
        (None, (4, 3, 2), 2, (4, 3)),
        (2, (), 3, ()),
        (1, (2, 1, 2, 3), 2, (2, 3)),
        (1, (2, 3), 0, ()),
    ],
)
def test_the_next_blocks(
    current: int | None, coming: tuple[int, ...], count: int, expected: tuple[int, ...]
) -> None:
    assert next_blocks(current, coming, count) == expected


def test_where_a_pass_is_in_its_order() -> None:
    order = (0, 1, 4, 2, 4, 3, 4)  # the head between MTP modules
    assert position_of(4, order, 0) == 2
    assert position_of(4, order, 3) == 4
    assert position_of(1, order, 5) == 1
    assert position_of(7, order, 0) == -1
