"""How many micro-batches a step of a run may have: every number that it can ask its schedule for, before it starts.

Note [Numbers of micro-batches of documents]
With data.batching=documents a step takes samples as long as they fit data.tokens_per_step, so it has more tokens than
that less one sample: micro-batches hold that many at the least. At the most there are as many as the costliest samples
make: `pack` goes by length, longest first, and closes a micro-batch that begins with a sample of L tokens once it has
floor(C / L) of them, C being the most that it holds. So it is followed by one that begins with L' <= L, and the two
have floor(C / L) samples of L' tokens or more between their first ones. The least tokens that make G micro-batches are
found by trying every L and L'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from counterflow.framework.config.tree import TrainConfig
from counterflow.parallel.mesh import MeshConfig
from counterflow.parallel.pipeline.config import ScheduleConfig
from counterflow.parallel.pipeline.ir.action import Schedule
from counterflow.parallel.pipeline.schedules.registry import schedule_from

# Micro-batches of all steps that are checked before a run of documents, together.
MAX_CHECKED = 5_000


def build_schedule(schedule: ScheduleConfig, parallel: MeshConfig) -> Schedule:
    """The schedule that `schedule` names, for this many pipeline ranks.

    Raises ValueError: for a name that there is none of, or (ranks, micro-batches, costs, file) that its rule refuses.
    """
    return schedule_from(schedule, parallel.pipeline_parallel_size).schedule


def next_num_microbatches(config: TrainConfig, at_least: int) -> int:
    """The least number of micro-batches, `at_least` or more, that the schedule takes.

    Raises ValueError: where it takes none of the next ones.
    """
    reason = ""
    # What schedules ask for repeats with the ranks and the stages of each: a multiple of them, or an even number.
    first = max(at_least, 1)
    for count in range(
        first, first + 2 * config.model.num_layers + 2 * config.parallel.pipeline_parallel_size + 1
    ):
        try:
            build_schedule(replace(config.schedule, num_microbatches=count), config.parallel)
        except ValueError as error:
            reason = reason or str(error)
        else:
            return count
    raise ValueError(
        f"data.batching=documents: a step needs {at_least} micro-batches or a few more, and "
        f"schedule={config.schedule.name} takes none of these numbers: {reason}"
    )


def step_sizes(config: TrainConfig, next_count: Callable[[int], int] | None = None) -> tuple[int, ...]:
    """The numbers of micro-batches, of one data-parallel rank, that a step or an evaluation of the run may have.

    Ascending. Evaluation takes schedule.num_microbatches, and so do all steps after a ramp of the batch. Of documents
    all numbers between the least and the most or, where they are more than MAX_CHECKED together, both ends and as many
    evenly between: what a step works on at once does not depend on their number, beyond the smallest. next_count: see
    `next_num_microbatches`, which it is by default.

    Raises ValueError: where the ramp, or the schedule for documents, has no such number.
    """
    full = config.schedule.num_microbatches
    if config.data.batching == "windows":
        phases = config.batch_plan.phases
        counts = {phase.num_microbatches for phase in phases if phase.first_step < config.training.num_steps}
        return tuple(sorted(counts | {full}))
    assert config.data.tokens_per_step is not None
    take = next_count or partial(next_num_microbatches, config)
    num_ranks = config.parallel.data_parallel_size
    fewest, most = filled_microbatches(
        tokens_per_step=config.data.tokens_per_step,
        seq_length=config.data.seq_length,
        micro_batch_tokens=config.data.micro_batch_size * config.data.seq_length,
        pad_multiple=config.parallel.tensor_parallel_size if config.parallel.sequence_parallel else 1,
    )
    first, last = -(-fewest // num_ranks), -(-most // num_ranks)
    return tuple(sorted({full} | {take(count) for count in _spread(first, last)}))


def _spread(first: int, last: int) -> Sequence[int]:
    """The numbers from `first` to `last`, or as many evenly between as are MAX_CHECKED together."""
    count = last - first + 1
    total = count * (first + last) // 2
    if total <= MAX_CHECKED or count <= 3:
        return range(first, last + 1)
    chosen = max(3, count * MAX_CHECKED // total)
    return [first + place * (count - 1) // (chosen - 1) for place in range(chosen)]


def filled_microbatches(
    *, tokens_per_step: int, seq_length: int, micro_batch_tokens: int, pad_multiple: int
) -> tuple[int, int]:
    """The fewest and the most micro-batches, over all data-parallel ranks, that the documents of a step can fill.

    See Note [Numbers of micro-batches of documents]. Lengths are rounded up to multiples of `pad_multiple`.
    """
    import numpy as np  # here, for what only looks at a config starts without

    fewest = max(1, -(-(tokens_per_step - seq_length + 1) // micro_batch_tokens))
    rounded = np.arange(1, -(-seq_length // pad_multiple) + 1, dtype=np.int64) * pad_multiple
    tokens = rounded - pad_multiple + 1  # the least that is rounded up to it
    members = micro_batch_tokens // rounded
    # The last length of each number of members: a micro-batch that begins with one of these lets the next be any of
    # the lengths up to it.
    lasts = np.flatnonzero(np.diff(members, append=-1))
    # By the length that a micro-batch begins with: the least tokens behind that sample that fill `most` in all.
    behind, most = np.zeros(len(rounded), dtype=np.int64), 1
    while True:
        further = np.empty_like(behind)
        first = 0
        for last in lasts:
            best = np.minimum.accumulate(members[last] * tokens[: last + 1] + behind[: last + 1])
            further[first : last + 1] = best[first:]
            first = last + 1
        if int((tokens + further).min()) > tokens_per_step:
            return fewest, most
        behind, most = further, most + 1
