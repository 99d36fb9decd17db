"""All that a run may execute is made before it starts: steps of every size, within one budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from counterflow.framework.checks.rules import check_workload
from counterflow.framework.data.documents import pack
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import ConfigError
from counterflow.framework.planning.step_sizes import MAX_CHECKED, filled_microbatches, step_sizes
from counterflow.framework.planning.workload import Workload
from counterflow.parallel.offload.config import OffloadConfig
from counterflow.parallel.offload.plan import least_budget_bytes
from counterflow.parallel.pipeline.ir.action import Kind
from tests.framework.test_batch_ramp import run_steps
from tests.framework.test_document_batches import documents  # noqa: F401
from tests.rank_pool import RankPool
from tests.tiny import run_context, tiny_config

RAMP = {"start_num_microbatches": 2, "increment": 2, "ramp_samples": 12}
DOCUMENTS = {"micro_batch_size": 2, "batching": "documents", "tokens_per_step": 150}


def partitions(total: int, most: int) -> Iterator[list[int]]:
    """Every way to write `total` as a sum of numbers up to `most`, largest first."""
    if total == 0:
        yield []
    for first in range(min(total, most), 0, -1):
        for rest in partitions(total - first, first):
            yield [first, *rest]


@pytest.mark.parametrize(
    ("seq_length", "rows", "budget", "pad"),
    [(4, 2, 14, 1), (5, 1, 13, 1), (4, 1, 12, 2), (6, 2, 17, 3), (3, 1, 3, 1)],
)
def test_the_numbers_that_documents_can_fill(seq_length: int, rows: int, budget: int, pad: int) -> None:
    """Every multiset of samples that a step can have is packed: none is outside, and both ends are there."""
    found = {
        pack(
            [-(-length // pad) * pad for length in lengths],
            max_tokens=rows * seq_length,
            num_ranks=1,
            next_count=lambda count: count,
        ).num_microbatches
        for total in range(budget - seq_length + 1, budget + 1)
        for lengths in partitions(total, seq_length)
    }
    ends = filled_microbatches(
        tokens_per_step=budget, seq_length=seq_length, micro_batch_tokens=rows * seq_length, pad_multiple=pad
    )
    assert ends[0] <= min(found)
    assert ends[1] == max(found)


def test_the_sizes_of_a_run() -> None:
    assert step_sizes(tiny_config()) == (4,)
    ramp = {"start_num_microbatches": 2, "increment": 2, "ramp_samples": 12}
    # 12 samples in three parts of 4: two steps of 2, one of 4, then (of 6, one step) 8.
    config = tiny_config(num_microbatches=8, training={"num_steps": 9, "batch_ramp": ramp})
    assert step_sizes(config) == (2, 4, 6, 8)
    short = replace(config, training=replace(config.training, num_steps=3))
    assert step_sizes(short) == (2, 4, 8), "evaluation is of the full size"
    # From 135 tokens, which 5 micro-batches of 32 hold; 8 are what the costliest samples fill. dualpipe takes even
    # numbers from 4 on.
    config = tiny_config(pp=2, schedule="dualpipe", data=DOCUMENTS)
    assert filled_microbatches(tokens_per_step=150, seq_length=16, micro_batch_tokens=32, pad_multiple=1) == (
        5,
        8,
    )
    assert step_sizes(config) == (4, 6, 8)
    assert step_sizes(tiny_config(dp=2, data=DOCUMENTS)) == (3, 4)


def test_a_budget_holds_for_the_steps_of_a_ramp(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    """It is that of the full step: a small step, whose own peak is smaller, moves nothing."""
    config = tiny_config(
        pp=2,
        schedule="gpipe",
        num_microbatches=8,
        training={"num_steps": 5, "batch_ramp": RAMP},
        offload={"policy": "schedule", "budget_share": 0.4, "min_bytes": 0},
    )
    workload = Workload.of(config)
    kinds = {
        size: {action.kind for actions in workload.schedule(size).actions for action in actions}
        for size in workload.sizes
    }
    assert Kind.OFFLOAD not in kinds[2]
    assert Kind.OFFLOAD in kinds[8]
    run = run_context(tiny_data, tmp_path)
    records, _ = ranks.run(run_steps, 2, config, run)[0]
    plain, _ = ranks.run(run_steps, 2, replace(config, offload=OffloadConfig()), run)[0]
    assert {record.num_microbatches for record in records} == {2, 4, 6, 8}
    assert [record.loss for record in records] == [record.loss for record in plain]
    assert workload.activation_budget is not None
    for record in records[1:]:  # in the first step it is not seen yet that tables are shared
        assert record.offload is not None
        assert max(record.offload.peak_bytes) <= workload.activation_budget.budget_bytes


def test_a_budget_holds_for_documents(
    ranks: RankPool,
    documents: PreparedData,  # noqa: F811
    tmp_path: Path,
) -> None:
    config = tiny_config(
        pp=2,
        schedule="gpipe",
        num_microbatches=8,
        data=DOCUMENTS,
        training={"num_steps": 4},
        offload={"policy": "schedule", "budget_share": 0.5},
    )
    records, _ = ranks.run(run_steps, 2, config, run_context(documents, tmp_path))[0]
    assert {record.num_microbatches for record in records} <= set(step_sizes(config))


def test_one_recomputation_keeps_every_step_within_its_budget() -> None:
    """Layers recompute the same in all steps, so the plan is for the largest; it is refused before ranks start."""
    nodes: dict[str, Any] = {"pp": 2, "schedule": "gpipe", "num_microbatches": 2, "data": DOCUMENTS}
    plain = Workload.of(tiny_config(**nodes), device_type="cpu")
    most = {size: max(plain.peak_activation_bytes(plain.executed(size))) for size in plain.sizes}
    assert max(most, key=lambda size: most[size]) > 2
    budget = round(0.7 * max(most.values()))
    assert most[2] < budget
    config = tiny_config(**nodes, recompute={"mode": "auto", "budget_bytes": budget})
    workload = Workload.of(config, device_type="cpu")
    assert workload.recompute_plan
    for size in workload.sizes:
        assert max(workload.peak_activation_bytes(workload.executed(size))) <= budget
    with pytest.raises(ConfigError, match=r"recompute\.budget_bytes=\d+: pipeline rank \d holds"):
        tiny_config(**nodes, recompute={"mode": "auto", "budget_bytes": 1000})


def test_a_budget_is_held_against_the_vocabulary_of_the_data() -> None:
    """The logits of a larger vocabulary are part of what the last stage works on."""
    config = tiny_config(pp=2, schedule="gpipe", num_microbatches=8)
    small = Workload.of(config, device_type="cpu")
    peak = max(small.peak_activation_bytes(small.executed(8)))
    config = tiny_config(
        pp=2, schedule="gpipe", num_microbatches=8, offload={"policy": "schedule", "budget_bytes": peak // 2}
    )
    check_workload(config, 321)
    with pytest.raises(ConfigError, match=r"offload\.budget_bytes=\d+: .*a rank needs \d+ bytes"):
        check_workload(config, 100_000)
    given = replace(config, model=replace(config.model, vocab_size=321))
    check_workload(given, 300)


def test_what_is_advised_is_enough_for_every_step() -> None:
    nodes: dict[str, Any] = {"pp": 2, "schedule": "gpipe", "num_microbatches": 8, "data": DOCUMENTS}
    workload = Workload.of(tiny_config(**nodes, offload={"policy": "schedule", "budget_share": 0.9}))
    budget = workload.activation_budget
    assert budget is not None
    least = max(least_budget_bytes(workload.executed(size), budget.sizes) for size in workload.sizes)
    with pytest.raises(ConfigError, match=rf"set offload\.budget_bytes={least} or more"):
        tiny_config(**nodes, offload={"policy": "schedule", "budget_bytes": least - 1})
    tiny_config(**nodes, offload={"policy": "schedule", "budget_bytes": least})


def test_a_wide_range_of_documents_is_checked_in_bounded_time() -> None:
    data = {"micro_batch_size": 1, "batching": "documents", "tokens_per_step": 160}
    config = tiny_config(pp=2, data=data)
    wide = replace(config, data=replace(config.data, tokens_per_step=16_000))
    ends = filled_microbatches(tokens_per_step=16_000, seq_length=16, micro_batch_tokens=16, pad_multiple=1)
    sizes = step_sizes(wide)
    assert (sizes[0], sizes[1], sizes[-1]) == (4, *ends)
    assert ends[1] - ends[0] > 500
    assert sum(sizes) < 2 * MAX_CHECKED
    # The widest hole is no wider than an even share of the range.
    assert max(after - before for before, after in pairwise(sizes[1:])) <= 1 + (ends[1] - ends[0]) / (
        len(sizes) - 3
    )
    assert step_sizes(config) == (4, *range(10, 1 + step_sizes(config)[-1]))


def test_a_workload_is_a_record_whose_parts_are_made_once() -> None:
    config = tiny_config(pp=2, offload={"policy": "schedule", "budget_share": 0.9})
    workload = Workload.of(config, data_vocab_size=300, device_type="cpu")
    assert workload == Workload(config=config, vocab_size=300, device_type="cpu")
    assert Workload.of(config).vocab_size == config.tokenizer.vocab_size
    given = replace(config, model=replace(config.model, vocab_size=400))
    assert Workload.of(given, data_vocab_size=300).vocab_size == 400
    with pytest.raises(FrozenInstanceError):
        workload.vocab_size = 1  # type: ignore[misc]
    assert workload.schedule(4) is workload.schedule(4)
    assert workload.recompute_plan is workload.recompute_plan
    assert workload.activation_budget is workload.activation_budget is not None
