"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

from parallel.pipeline.action import Action, Kind, Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order; every micro-batch's activation is alive at once."""
    return Schedule(
        name="gpipe",
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=(tuple(range(num_ranks)),),
        actions=tuple(
            tuple(
                Action(stage, kind, microbatch)
                for kind in (Kind.F, Kind.B)
                for microbatch in range(num_microbatches)
            )
            for stage in range(num_ranks)
        ),
    )
