"""Batches of whole documents under a budget of tokens: as many micro-batches a step as they need.

A sample is a document, or a piece of one that is longer than a sample may be. A step takes the next samples of the
shuffled stream as long as their tokens fit the budget, whatever the layout; only how they are put into micro-batches
depends on it. Samples of like length go together, padded to the longest, so lengths and number of the micro-batches
differ from step to step.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from counterflow.framework.data.batch_plan import StepBatch
from counterflow.framework.data.loader import Batch, TokenDataset, permute

# What cross-entropy gives no loss: targets of padding.
IGNORED = -100


def document_spans(dataset: TokenDataset, seq_length: int) -> NDArray[np.int64]:
    """[num_samples, 2], the first token of each sample and the one after its last; targets are one to the right.

    A document of n tokens and its end-of-text token makes n positions, cut into pieces of at most `seq_length`:
    every token but the first of a document is a target exactly once.
    """
    ends = dataset.positions_of(dataset.index.end_of_text_id)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])
    num_pieces = -(-(ends - starts) // seq_length)
    document = np.repeat(np.arange(len(ends)), num_pieces)
    piece = np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    first = starts[document] + piece * seq_length
    return np.stack([first, np.minimum(first + seq_length, ends[document])], axis=1)


class BudgetPlan:
    """The samples of every step: those at its positions of the endless sequence of epochs.

    lengths: tokens of each sample. budget: tokens of a step at most; the next sample begins the next step.

    Raises ValueError: where there are no samples, or one is longer than the budget.
    """

    def __init__(self, lengths: NDArray[np.int64], *, budget: int, seed: int) -> None:
        if not len(lengths):
            raise ValueError(
                "data.batching=documents: the split has no document with a token; give more text"
            )
        if int(lengths.max()) > budget:
            raise ValueError(
                f"data.tokens_per_step={budget}: a sample has {int(lengths.max())} tokens; raise it to data.seq_length "
                "at least"
            )
        self._lengths, self._budget, self._seed = lengths, budget, seed
        self._first_samples = [0]  # of each step so far
        self._epoch, self._ends = -1, np.zeros(0, dtype=np.int64)

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """The samples at positions [first, first + count), in order."""
        epochs, within = np.divmod(np.arange(first, first + count), len(self._lengths))
        parts = [
            permute(within[epochs == epoch], len(self._lengths), self._seed, int(epoch))
            for epoch in np.unique(epochs)
        ]
        return np.concatenate(parts)

    def range_of(self, step: int) -> tuple[int, int]:
        """The positions [first, end) that `step` takes."""
        while len(self._first_samples) < step + 2:
            self._first_samples.append(self._end_of(self._first_samples[-1]))
        return self._first_samples[step], self._first_samples[step + 1]

    def _end_of(self, first: int) -> int:
        """The first position that does not fit a step which begins at `first`; it may be in a later epoch."""
        left, position = self._budget, first
        while True:
            epoch, within = divmod(position, len(self._lengths))
            ends = self._ends_of(epoch)
            before = int(ends[within - 1]) if within else 0
            end = bisect.bisect_right(ends, before + left)  # type: ignore[arg-type]
            if end < len(ends):
                return epoch * len(ends) + end
            left -= int(ends[-1]) - before
            position = (epoch + 1) * len(ends)

    def _ends_of(self, epoch: int) -> NDArray[np.int64]:
        """Tokens of `epoch` up to and with each of its samples, in its order."""
        if epoch != self._epoch:
            order = permute(np.arange(len(self._lengths)), len(self._lengths), self._seed, epoch)
            self._epoch, self._ends = epoch, np.cumsum(self._lengths[order])
        return self._ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """rows[microbatch][rank]: indices of the samples there; none where it only fills."""

    rows: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_microbatches(self) -> int:
        return len(self.rows)


def pack(
    lengths: Sequence[int], *, max_tokens: int, num_ranks: int, next_count: Callable[[int], int]
) -> Packing:
    """Put samples of `lengths` into micro-batches of at most `max_tokens` with their padding.

    next_count: the least number of micro-batches, of each rank, that the schedule takes from a number on. Samples
    go by length, longest first, so that little is padded, and micro-batches at one place on all ranks are of like
    size. Those that are too few are had by halving the largest; where each has one sample only, some stay empty.

    Raises ValueError: where a sample has more than `max_tokens`.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if order and lengths[order[0]] > max_tokens:
        raise ValueError(f"a sample of {lengths[order[0]]} tokens does not fit a micro-batch of {max_tokens}")
    groups: list[list[int]] = []
    for index in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    count = next_count(-(-len(groups) // num_ranks)) * num_ranks
    while len(groups) < count:
        largest = max(
            range(len(groups)),
            key=lambda place: (len(groups[place]) > 1) * lengths[groups[place][0]] * len(groups[place]),
        )
        members = groups[largest]
        if len(members) < 2:
            groups += [[] for _ in range(count - len(groups))]
            break
        half = (len(members) + 1) // 2
        groups[largest : largest + 1] = [members[:half], members[half:]]
    groups.sort(key=lambda group: -len(group) * lengths[group[0]] if group else 0)
    rows = (groups[first : first + num_ranks] for first in range(0, count, num_ranks))
    return Packing(rows=tuple(tuple(tuple(group) for group in row) for row in rows))


class DocumentLoader:
    """Reads this rank's part of any step.

    seq_length: tokens of a sample at most. micro_batch_tokens: positions of a micro-batch at most, padding and all.
    pad_multiple: padded lengths are multiples of it. next_count: see `pack`.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seed: int,
        seq_length: int,
        tokens_per_step: int,
        micro_batch_tokens: int,
        pad_multiple: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        next_count: Callable[[int], int],
    ) -> None:
        """Raises ValueError: where the split has no documents, or the budget is smaller than one."""
        self._dataset = dataset
        self._spans = document_spans(dataset, seq_length)
        self._lengths: NDArray[np.int64] = self._spans[:, 1] - self._spans[:, 0]
        self._plan = BudgetPlan(self._lengths, budget=tokens_per_step, seed=seed)
        self._micro_batch_tokens, self._pad_multiple = micro_batch_tokens, pad_multiple
        self._rank, self._size = data_parallel_rank, data_parallel_size
        self._next_count = next_count
        self._packed: dict[int, tuple[NDArray[np.int64], Packing]] = {}

    @property
    def num_samples(self) -> int:
        """Samples of the whole split."""
        return len(self._lengths)

    def at(self, step: int) -> StepBatch:
        """What the whole of `step` reads."""
        first, end = self._plan.range_of(step)
        _, packing = self._packing(step)
        return StepBatch(packing.num_microbatches, first, end - first)

    def samples_before(self, step: int) -> int:
        return self._plan.range_of(step)[0]

    def num_tokens(self, step: int) -> int:
        """Tokens of the whole step, without padding."""
        return int(self._lengths[self._packing(step)[0]].sum())

    def mean_context(self, step: int) -> float:
        """The length of the sample that a token of the step is in, on average."""
        lengths = self._lengths[self._packing(step)[0]].astype(np.float64)
        return float(np.square(lengths).sum() / lengths.sum())

    def padding_share(self, step: int) -> float:
        """The share of the positions that are computed without being a token."""
        chosen, packing = self._packing(step)
        computed = sum(
            max(len(group), 1) * self._padded(self._lengths[chosen[list(group)]])
            for row in packing.rows
            for group in row
        )
        return 1 - self.num_tokens(step) / computed

    def batch(self, step: int) -> Batch:
        """This rank's part of the global batch of `step` (from 0); tokens and targets [samples, longest] each."""
        chosen, packing = self._packing(step)
        pairs = [self._read(chosen[list(row[self._rank])]) for row in packing.rows]
        return Batch(
            tokens=[tokens for tokens, _ in pairs],
            targets=[targets for _, targets in pairs],
            num_valid_tokens=self.num_tokens(step),
            num_samples=len(chosen),
        )

    def _packing(self, step: int) -> tuple[NDArray[np.int64], Packing]:
        """The samples of the whole step, and where in them each micro-batch's are."""
        if step not in self._packed:
            first, end = self._plan.range_of(step)
            chosen = self._plan.samples(first, end - first)
            packing = pack(
                self._rounded(self._lengths[chosen]).tolist(),
                max_tokens=self._micro_batch_tokens,
                num_ranks=self._size,
                next_count=self._next_count,
            )
            # A step is asked about again after the next one has begun, where its norm was not waited for.
            self._packed = {near: kept for near, kept in self._packed.items() if near == step - 1}
            self._packed[step] = (chosen, packing)
        return self._packed[step]

    def _padded(self, lengths: NDArray[np.int64]) -> int:
        """The longest of `lengths`, rounded up; of none, the shortest there can be."""
        return int(self._rounded(lengths).max()) if len(lengths) else self._pad_multiple

    def _rounded(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-lengths // self._pad_multiple) * self._pad_multiple

    def _read(self, chosen: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        length = self._padded(self._lengths[chosen])
        padding = self._dataset.index.end_of_text_id
        tokens = torch.full((max(len(chosen), 1), length), padding, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        for row, index in enumerate(chosen):
            start, end = (int(position) for position in self._spans[index])
            window = torch.from_numpy(self._dataset.read(start, end + 1 - start))
            tokens[row, : end - start] = window[:-1]
            targets[row, : end - start] = window[1:]
        return tokens, targets
