"""Samples, their order, and batches of every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.framework.data.batch_plan import BatchPlan, BatchRampConfig
from counterflow.framework.data.loader import BatchLoader, TokenDataset, batch_indices, permute, sample_order
from counterflow.framework.data.shards import SplitWriter


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    """1000 tokens 0..999 over shards of 64 (the separator is the last one)."""
    writer = SplitWriter(tmp_path / "s", vocab_size=1000, end_of_text_id=999, shard_tokens=64)
    writer.append(np.arange(999))
    writer.finish()
    return TokenDataset(tmp_path / "s")


@pytest.mark.parametrize("seq_length", [1, 7, 64, 100, 333, 999])
def test_samples_tile_the_tokens_across_shards(dataset: TokenDataset, seq_length: int) -> None:
    count = dataset.num_samples(seq_length)
    assert count == 999 // seq_length
    for index in range(count):
        tokens, targets = dataset.sample(index, seq_length)
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.tolist() == list(range(index * seq_length, (index + 1) * seq_length))
        assert targets.tolist() == list(range(index * seq_length + 1, (index + 1) * seq_length + 1))
    with pytest.raises(IndexError):
        dataset.sample(count, seq_length)


def test_a_text_too_short_has_no_samples(dataset: TokenDataset) -> None:
    assert dataset.num_samples(1000) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 1000))
def test_an_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = sample_order(num_samples, seed, epoch)
    assert sorted(order.tolist()) == list(range(num_samples))
    assert np.array_equal(order, sample_order(num_samples, seed, epoch))


def test_orders_look_random() -> None:
    """Each of 7 samples stands at each place equally often, and neighbours are independent in a long epoch."""
    epochs = 7000
    orders = np.stack([sample_order(7, 3, epoch) for epoch in range(epochs)])
    for place in range(7):
        counts = np.bincount(orders[:, place], minlength=7)
        # chi-square with 6 degrees of freedom: 27.9 is passed once in 10,000
        assert ((counts - epochs / 7) ** 2 / (epochs / 7)).sum() < 27.9
    long = sample_order(20000, 1, 0).astype(float)
    for other in (long[1:], sample_order(20000, 1, 1)[1:], sample_order(20000, 2, 0)[1:], np.arange(19999.0)):
        assert abs(np.corrcoef(long[:-1], other)[0, 1]) < 0.03


def test_a_range_of_trillions_needs_no_table() -> None:
    positions = np.arange(10**12, 10**12 + 1000)
    found = permute(positions, 3 * 10**12, 7, 2)
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < 3 * 10**12
    assert found.mean() == pytest.approx(1.5e12, rel=0.1)


def test_the_order_is_fixed_for_ever() -> None:
    """A resumed run must go on in the order it began with, whatever version wrote it."""
    assert sample_order(10, 0, 0).tolist() == [4, 6, 9, 0, 8, 2, 5, 3, 7, 1]
    assert batch_indices(12, 4, 10, 1).tolist() == [1, 4, 9, 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 99))
def test_batches_walk_through_whole_epochs(num_samples: int, global_batch_size: int, seed: int) -> None:
    global_batch_size = min(global_batch_size, num_samples)
    steps = -(-3 * num_samples // global_batch_size)
    seen = np.concatenate(
        [
            batch_indices(step * global_batch_size, global_batch_size, num_samples, seed)
            for step in range(steps)
        ]
    )
    for epoch in range(3):
        part = seen[epoch * num_samples : (epoch + 1) * num_samples]
        assert np.array_equal(part, sample_order(num_samples, seed, epoch))


def test_epochs_differ() -> None:
    assert not np.array_equal(sample_order(50, 0, 0), sample_order(50, 0, 1))
    assert not np.array_equal(sample_order(50, 0, 0), sample_order(50, 1, 0))


def test_a_batch_larger_than_an_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 samples are fewer than one global batch of 4; give more text"):
        batch_indices(0, 4, 3, 0)


@pytest.mark.parametrize(
    ("data_parallel_size", "num_microbatches", "micro_batch_size"),
    [(1, 12, 1), (1, 1, 12), (2, 3, 2), (4, 1, 3), (3, 4, 1), (12, 1, 1)],
)
def test_every_layout_takes_the_same_global_batch(
    dataset: TokenDataset, data_parallel_size: int, num_microbatches: int, micro_batch_size: int
) -> None:
    for step in (0, 3, 17):  # 49 samples of 20 tokens: step 17 is in the fifth epoch
        expected = batch_indices(12 * step, 12, dataset.num_samples(20), 5)
        firsts: list[int] = []
        for rank in range(data_parallel_size):
            loader = BatchLoader(
                dataset,
                seed=5,
                seq_length=20,
                micro_batch_size=micro_batch_size,
                plan=BatchPlan(
                    num_microbatches=num_microbatches,
                    samples_per_microbatch=data_parallel_size * micro_batch_size,
                ),
                data_parallel_rank=rank,
                data_parallel_size=data_parallel_size,
            )
            batch = loader.batch(step)
            assert batch.num_valid_tokens == 12 * 20
            assert batch.num_samples == 12
            assert len(batch.tokens) == len(batch.targets) == num_microbatches
            for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
                assert tokens.shape == targets.shape == (micro_batch_size, 20)
                assert torch.equal(targets, tokens + 1)
                firsts += (tokens[:, 0] // 20).tolist()
        assert sorted(firsts) == sorted(expected.tolist())


def test_a_loader_has_no_state_but_the_step(dataset: TokenDataset) -> None:
    def loader() -> BatchLoader:
        return BatchLoader(
            dataset,
            seed=1,
            seq_length=10,
            micro_batch_size=2,
            plan=BatchPlan(num_microbatches=2, samples_per_microbatch=4),
            data_parallel_rank=1,
            data_parallel_size=2,
        )

    walked = loader()
    batches = [walked.batch(step) for step in range(6)]
    resumed = loader().batch(5)
    assert all(map(torch.equal, batches[5].tokens, resumed.tokens))


def test_a_growing_batch_reads_the_same_stream(dataset: TokenDataset) -> None:
    """Two layouts, a ramp and none: the samples come in one order, none twice in an epoch, none left out."""

    def stream(
        num_microbatches: int, data_parallel_size: int, ramp: BatchRampConfig, steps: int
    ) -> list[int]:
        firsts: list[int] = []
        for step in range(steps):
            rows = [
                BatchLoader(
                    dataset,
                    seed=2,
                    seq_length=20,
                    micro_batch_size=1,
                    plan=BatchPlan(
                        num_microbatches=num_microbatches,
                        samples_per_microbatch=data_parallel_size,
                        ramp=ramp,
                    ),
                    data_parallel_rank=rank,
                    data_parallel_size=data_parallel_size,
                ).batch(step)
                for rank in range(data_parallel_size)
            ]
            for microbatch in range(rows[0].num_microbatches):
                firsts += [int(row.tokens[microbatch][0, 0]) // 20 for row in rows]
            assert {row.num_valid_tokens for row in rows} == {rows[0].num_samples * 20}
        return firsts

    ramp = BatchRampConfig(start_num_microbatches=2, increment=2, ramp_samples=24)
    wide = BatchRampConfig(start_num_microbatches=1, increment=1, ramp_samples=24)
    growing, other, plain = (
        stream(8, 1, ramp, 12),
        stream(4, 2, wide, 12),
        stream(8, 1, BatchRampConfig(), 7),
    )
    assert growing == other
    assert growing[:49] == plain[:49]
    assert sorted(plain[:49]) == list(range(49))


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path / "store" / "s", vocab_size=1000, end_of_text_id=999)
    writer.append(np.arange(99))
    writer.finish()
    (tmp_path / "store" / "s" / "00000.bin").write_bytes(b"\0" * 10)
    with pytest.raises(ValueError, match=r"has 10 bytes, the index says 200 bytes; remove"):
        TokenDataset(tmp_path / "store" / "s")
