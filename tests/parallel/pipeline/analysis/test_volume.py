"""Bytes of a schedule, by hand and against the sends that the passes add."""

from __future__ import annotations

from collections import Counter

import pytest

from counterflow.parallel.pipeline.analysis.costs import Costs
from counterflow.parallel.pipeline.analysis.passes import lower
from counterflow.parallel.pipeline.analysis.volume import LinkVolume, Volume, data_volume, pipeline_volume
from counterflow.parallel.pipeline.ir.action import SENDS, Kind
from counterflow.parallel.pipeline.ir.dependencies import channel_of
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules


def test_by_hand() -> None:
    """Three stages, two micro-batches, messages of 10 and 100 bytes."""
    links = pipeline_volume(generate("1f1b", 3, 2), Costs(message_bytes=(10.0, 100.0)))
    assert links == (
        LinkVolume(source=0, target=1, num_messages=2, forward_bytes=20, backward_bytes=0),
        LinkVolume(source=1, target=0, num_messages=2, forward_bytes=0, backward_bytes=20),
        LinkVolume(source=1, target=2, num_messages=2, forward_bytes=200, backward_bytes=0),
        LinkVolume(source=2, target=1, num_messages=2, forward_bytes=0, backward_bytes=200),
    )
    volume = Volume(links=links)
    assert (volume.forward_bytes, volume.backward_bytes, volume.by_axis) == (220, 220, {"pipeline": 440})


@pytest.mark.parametrize("name", sorted(generated_schedules()))
def test_against_the_sends(name: str) -> None:
    schedule = lower(generate(name, 4, 8), zero_stage=0)
    counts: Counter[tuple[int, int, bool]] = Counter()
    for actions in schedule.actions:
        for action in actions:
            if action.kind in SENDS:
                counts[*channel_of(schedule, action), action.kind is Kind.SEND_F] += 1
    links = pipeline_volume(schedule, Costs(message_bytes=2.0))
    assert {(link.source, link.target) for link in links} == {(one, other) for one, other, _ in counts}
    for link in links:
        forward, backward = (counts[link.source, link.target, is_forward] for is_forward in (True, False))
        assert (link.forward_bytes, link.backward_bytes) == (2 * forward, 2 * backward)
        assert link.num_messages == forward + backward


def test_one_stage_sends_nothing() -> None:
    assert pipeline_volume(generate("gpipe", 1, 4), Costs(message_bytes=5.0)) == ()


def test_data_axis_by_hand() -> None:
    """Two stages of 8 and 16 parameters of 2 bytes, gradients of 4 bytes, two data-parallel ranks."""
    sizes = {"parameter_bytes": (16, 32), "gradient_bytes": (32, 64), "data_parallel_size": 2}
    schedule = generate("gpipe", 2, 2)  # gathered once: forwards and backwards follow each other at once
    whole = data_volume(lower(schedule, zero_stage=3, reshard_after="step"), zero_stage=3, **sizes)
    assert (whole.unshard_bytes, whole.reduce_bytes) == ((8, 16), (16, 32))
    nothing = data_volume(lower(schedule, zero_stage=0), zero_stage=0, **sizes)
    assert (nothing.unshard_bytes, nothing.reduce_bytes) == ((0, 0), (32, 64))
    optimizer = data_volume(lower(schedule, zero_stage=1), zero_stage=1, **sizes)
    assert (optimizer.unshard_bytes, optimizer.reduce_bytes) == ((8, 16), (16, 32))
    alone = data_volume(lower(schedule, zero_stage=3), zero_stage=3, **(sizes | {"data_parallel_size": 1}))
    assert sum(alone.unshard_bytes + alone.reduce_bytes) == 0


def test_the_mirror_is_part_of_the_data_axis() -> None:
    schedule = lower(generate("dualpipe", 2, 4), zero_stage=0)
    volume = data_volume(
        schedule, parameter_bytes=(8, 8), gradient_bytes=(8, 8), data_parallel_size=1, zero_stage=0
    )
    assert volume.reduce_bytes == (2 * 8, 2 * 8)  # two stages a rank, half of each sent twice
