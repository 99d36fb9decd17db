"""Whole documents under a budget of tokens: every token once an epoch, in every layout the same steps."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.framework.data.documents import IGNORED, BudgetPlan, DocumentLoader, document_spans, pack
from counterflow.framework.data.loader import TokenDataset
from counterflow.framework.data.shards import SplitWriter

END = 999
LENGTHS = [3, 1, 12, 5, 0, 4, 9, 4, 20, 2, 7, 1, 1, 6]


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    """Documents of LENGTHS, numbered on through all of them, in shards that cut documents."""
    writer = SplitWriter(tmp_path / "s", vocab_size=1000, end_of_text_id=END, shard_tokens=8)
    start = 0
    for length in LENGTHS:
        writer.append(np.arange(start, start + length))
        start += length
    writer.finish()
    return TokenDataset(tmp_path / "s")


def loader(dataset: TokenDataset, rank: int = 0, size: int = 1, multiple: int = 1) -> DocumentLoader:
    return DocumentLoader(
        dataset,
        seed=3,
        seq_length=6,
        tokens_per_step=17,
        micro_batch_tokens=12,
        pad_multiple=multiple,
        data_parallel_rank=rank,
        data_parallel_size=size,
        next_count=lambda count: count + count % 2,
    )


@pytest.mark.parametrize("seq_length", [1, 4, 6, 100])
def test_samples_are_the_pieces_of_documents(dataset: TokenDataset, seq_length: int) -> None:
    expected: list[list[int]] = []
    start = 0
    for length in LENGTHS:
        document = list(range(start, start + length))
        expected += [document[at : at + seq_length] for at in range(0, length, seq_length)]
        start += length
    spans = document_spans(dataset, seq_length)
    assert [dataset.read(begin, end - begin).tolist() for begin, end in spans.tolist()] == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(9, 40), st.integers(0, 5))
def test_a_step_takes_the_next_samples_that_fit(lengths: list[int], budget: int, seed: int) -> None:
    plan = BudgetPlan(np.array(lengths), budget=budget, seed=seed)
    stream = [int(index) for index in plan.samples(0, 4 * len(lengths))]
    for epoch in range(4):
        assert sorted(stream[epoch * len(lengths) : (epoch + 1) * len(lengths)]) == list(range(len(lengths)))
    position = step = 0
    while True:  # by hand: add samples up while they fit
        end, tokens = position, 0
        while end < len(stream) and tokens + lengths[stream[end]] <= budget:
            tokens += lengths[stream[end]]
            end += 1
        if end == len(stream):
            break
        assert plan.range_of(step) == (position, end)
        position, step = end, step + 1
    # From the middle it is the same as from the start.
    assert BudgetPlan(np.array(lengths), budget=budget, seed=seed).range_of(step) == plan.range_of(step)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=30),
    st.integers(12, 40),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_micro_batches_keep_to_their_size(
    lengths: list[int], max_tokens: int, num_ranks: int, multiple: int
) -> None:
    packing = pack(
        lengths,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        next_count=lambda count: -(-count // multiple) * multiple,
    )
    assert packing.num_microbatches % multiple == 0
    groups = [group for row in packing.rows for group in row]
    assert all(len(row) == num_ranks for row in packing.rows)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert max(len(group) * max(lengths[index] for index in group) for group in groups if group) <= max_tokens
    if any(not group for group in groups):
        assert max(map(len, groups)) == 1


def test_samples_of_like_length_go_together() -> None:
    rows = pack([1, 8, 1, 8, 2, 1], max_tokens=8, num_ranks=1, next_count=lambda count: count).rows
    assert rows == (((1,),), ((3,),), ((4, 0, 2, 5),))


def test_every_layout_reads_the_same_steps(dataset: TokenDataset) -> None:
    """Tokens with their targets, as pairs: of one process, and of two ranks that pad to multiples of 3."""

    def pairs(loaders: list[DocumentLoader], step: int) -> Counter[tuple[int, int]]:
        found: Counter[tuple[int, int]] = Counter()
        for each in loaders:
            batch = each.batch(step)
            assert batch.num_microbatches == each.at(step).num_microbatches
            assert batch.num_valid_tokens == each.num_tokens(step)
            for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
                assert tokens.shape == targets.shape
                assert tokens.numel() <= 12
                found.update(
                    (token, target)
                    for token, target in zip(
                        tokens.flatten().tolist(), targets.flatten().tolist(), strict=True
                    )
                    if target != IGNORED
                )
        return found

    alone, two = [loader(dataset)], [loader(dataset, rank, 2, 3) for rank in range(2)]
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(9):
        found = pairs(alone, step)
        assert found == pairs(two, step)
        assert found.total() == alone[0].num_tokens(step) <= 17
        assert alone[0].at(step).first_sample == alone[0].samples_before(step)
        assert two[0].at(step).num_microbatches % 2 == 0
        seen += found
    expected: set[tuple[int, int]] = set()
    start = 0
    for length in LENGTHS:
        document = [*range(start, start + length), END]
        expected |= set(pairwise(document))
        start += length
    assert set(seen) == expected


def test_padding_and_context_are_measured(dataset: TokenDataset) -> None:
    alone = loader(dataset)
    for step in range(6):
        batch = alone.batch(step)
        computed = sum(tokens.numel() for tokens in batch.tokens)
        assert alone.padding_share(step) == pytest.approx(1 - batch.num_valid_tokens / computed)
        lengths = [int((row != IGNORED).sum()) for targets in batch.targets for row in targets]
        assert alone.mean_context(step) == pytest.approx(sum(length**2 for length in lengths) / sum(lengths))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokens_per_step=5: a sample has 6 tokens"):
        BudgetPlan(np.array([2, 6]), budget=5, seed=0)
    with pytest.raises(ValueError, match="no document"):
        BudgetPlan(np.zeros(0, dtype=np.int64), budget=5, seed=0)
    with pytest.raises(ValueError, match="does not fit a micro-batch of 5"):
        pack([6], max_tokens=5, num_ranks=1, next_count=lambda count: count)
