"""Batches of tokens: which samples a step takes, and reading them from the shards.

Everything is a pure function of the step: position k of the endless sequence of epochs is sample
`permutation(epoch, k mod num_samples)`, and the batch plan says which positions a step takes. The layout only
decides which rank reads which of them, so a run resumes at any step, in any layout, without repeating or losing
a sample.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterflow.framework.data.batch_plan import BatchPlan, StepBatch
from counterflow.framework.data.shards import SplitIndex, read_index

_ROUNDS = 6
_U64 = (1 << 64) - 1


class TokenDataset:
    """The tokens of one split, memory-mapped.

    Sample i of length S is tokens [i*S, i*S+S) with targets one to the right: every token but the first is a
    target at most once, and samples run across documents.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises ValueError: where `path` holds no split, or a shard is missing or short."""
        folder = Path(path)
        self.index: SplitIndex = read_index(folder)
        self._shards = [
            np.memmap(
                folder / shard.file, dtype=self.index.storage_dtype, mode="r", shape=(shard.num_tokens,)
            )
            for shard in self.index.shards
        ]
        self._ends = list(accumulate(len(shard) for shard in self._shards))

    @property
    def num_tokens(self) -> int:
        return self.index.num_tokens

    def num_samples(self, seq_length: int) -> int:
        return max(0, self.num_tokens - 1) // seq_length

    def sample(self, index: int, seq_length: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of sample `index`, int64 of shape [seq_length]."""
        if not 0 <= index < self.num_samples(seq_length):
            raise IndexError(f"sample {index} of {self.num_samples(seq_length)}")
        window = torch.from_numpy(self.read(index * seq_length, seq_length + 1))
        return window[:-1], window[1:]

    def positions_of(self, token: int) -> NDArray[np.int64]:
        """Where `token` stands, ascending. Reads the whole split."""
        found = [
            np.flatnonzero(shard == token) + end - len(shard)
            for shard, end in zip(self._shards, self._ends, strict=True)
        ]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count), which the split must have."""
        out = np.empty(count, dtype=np.int64)
        filled = 0
        shard = bisect.bisect_right(self._ends, start)
        while filled < count:
            tokens = self._shards[shard]
            begin = start + filled - (self._ends[shard] - len(tokens))
            part = tokens[begin : begin + count - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return out


def permute(positions: NDArray[np.int64], num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where a pseudo-random permutation of range(num_samples) sends `positions`; memory of `positions` only.

    A Feistel network over the next power of four, walked until it falls into the range (format-preserving
    encryption; Black and Rogaway, CT-RSA 2002), so billions of samples are shuffled without a table.
    """
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    base = _mix_int(_mix_int(seed & _U64) ^ (epoch & _U64))
    keys = [np.uint64(_mix_int(base + number)) for number in range(_ROUNDS)]
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> shift, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        values[outside] = (left << shift) | right
        outside = values >= num_samples
    return values.astype(np.int64)


def sample_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The whole order of one epoch: a permutation of range(num_samples)."""
    return permute(np.arange(num_samples), num_samples, seed, epoch)


def batch_indices(first_sample: int, size: int, num_samples: int, seed: int) -> NDArray[np.int64]:
    """The samples at positions [first_sample, first_sample + size), in order.

    Each sample comes once an epoch, every epoch in another order.

    Raises ValueError: where an epoch is smaller than one batch.
    """
    if num_samples < size:
        raise ValueError(
            f"{num_samples} samples are fewer than one global batch of {size}; give more text or "
            "lower data.seq_length, data.micro_batch_size or the micro-batches"
        )
    positions = np.arange(first_sample, first_sample + size)
    epochs, within = np.divmod(positions, num_samples)
    parts = [permute(within[epochs == epoch], num_samples, seed, int(epoch)) for epoch in np.unique(epochs)]
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One data-parallel rank's part of a global batch, one entry for each micro-batch.

    tokens, targets: int64 of shape [micro_batch_size, seq_length].
    num_valid_tokens: targets of the *whole* global batch, by which the loss divides.
    num_samples: of the whole global batch.
    """

    tokens: list[Tensor]
    targets: list[Tensor]
    num_valid_tokens: int
    num_samples: int

    @property
    def num_microbatches(self) -> int:
        return len(self.tokens)


class StepData(Protocol):
    """What the training loop asks of its batches, however they are put together. Steps count from 0."""

    @property
    def num_samples(self) -> int:
        """Samples of the whole split."""
        ...

    def at(self, step: int) -> StepBatch:
        """What the whole of `step` reads."""
        ...

    def samples_before(self, step: int) -> int:
        """Where `step` starts in the stream of samples."""
        ...

    def num_tokens(self, step: int) -> int:
        """Tokens of the whole step, without padding."""
        ...

    def mean_context(self, step: int) -> float:
        """The length of the sample that a token of the step is in, on average."""
        ...

    def padding_share(self, step: int) -> float:
        """The share of the positions that are computed without being a token."""
        ...

    def batch(self, step: int) -> Batch:
        """This rank's part of `step`.

        Raises ValueError: where the data has too few samples.
        """
        ...


class BatchLoader:
    """Windows of one length. Its only state is the step it is asked for.

    plan: which samples a step takes. Of a global batch, micro-batch m of data-parallel rank d takes samples
    [(m * data_parallel_size + d) * micro_batch_size, ...).
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seed: int,
        seq_length: int,
        micro_batch_size: int,
        plan: BatchPlan,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size
        self._dataset = dataset
        self._seed = seed
        self._seq_length = seq_length
        self._plan = plan
        self._shape = (-1, data_parallel_size, micro_batch_size)
        assert plan.samples_per_microbatch == data_parallel_size * micro_batch_size
        self._data_parallel_rank = data_parallel_rank
        self._num_samples = dataset.num_samples(seq_length)

    @property
    def num_samples(self) -> int:
        """Samples of the whole split."""
        return self._num_samples

    def at(self, step: int) -> StepBatch:
        return self._plan.at(step)

    def samples_before(self, step: int) -> int:
        return self._plan.samples_before(step)

    def num_tokens(self, step: int) -> int:
        return self.at(step).num_samples * self._seq_length

    def mean_context(self, step: int) -> float:
        return float(self._seq_length)

    def padding_share(self, step: int) -> float:
        return 0.0

    def indices(self, step: int) -> NDArray[np.int64]:
        """Samples of this rank at `step`, [num_microbatches, micro_batch_size]."""
        batch = self.at(step)
        chosen = batch_indices(batch.first_sample, batch.num_samples, self._num_samples, self._seed)
        return chosen.reshape(self._shape)[:, self._data_parallel_rank]

    def batch(self, step: int) -> Batch:
        """This rank's part of the global batch of `step` (from 0).

        Raises ValueError: where the data has fewer samples than one global batch.
        """
        tokens: list[Tensor] = []
        targets: list[Tensor] = []
        for row in self.indices(step):
            samples = [self._dataset.sample(int(index), self._seq_length) for index in row]
            tokens.append(torch.stack([sample[0] for sample in samples]))
            targets.append(torch.stack([sample[1] for sample in samples]))
        num_samples = self.at(step).num_samples
        return Batch(
            tokens=tokens,
            targets=targets,
            num_valid_tokens=self.num_tokens(step),
            num_samples=num_samples,
        )


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _U64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _U64
    return value ^ (value >> 31)
