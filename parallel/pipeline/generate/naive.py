"""One micro-batch in the pipeline at a time."""

from __future__ import annotations

from parallel.pipeline.action import Action, Kind, Schedule


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each micro-batch goes forward through every stage and back before the next one enters.

    The baseline that pipelining improves on: one rank works at a time, one activation is alive per rank.
    """
    return Schedule(
        name="naive",
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=(tuple(range(num_ranks)),),
        actions=tuple(
            tuple(
                Action(stage, kind, microbatch)
                for microbatch in range(num_microbatches)
                for kind in (Kind.F, Kind.B)
            )
            for stage in range(num_ranks)
        ),
    )
