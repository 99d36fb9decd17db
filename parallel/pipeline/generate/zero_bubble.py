"""ZB-H1 and ZB-H2: 1F1B with the weight gradients moved into its bubbles (Qi et al., arXiv 2401.10241, section 2).

Both run F, I and the W of an earlier micro-batch in turn. They differ in how many forwards a rank runs ahead, and
in how many weight gradients it owes: each rank owes what the first rank's forwards run ahead of its own.
"""

from __future__ import annotations

from parallel.pipeline.action import Action, Kind, Schedule


def zb1p(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1, the zero-bubble schedule with the memory of 1F1B; a third of its bubble at F = I = W.

    Rank r holds at most p-r activations and what r+1 weight gradients need, at most p of both together. Idle time
    for equal stages without communication: (p-1)(F+I-W).
    """
    return _schedule("zb1p", num_ranks, num_microbatches, steps=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: forwards fill the time before the first backward as well; no bubble within a rank's span at F = I = W.

    Rank r holds at most 2(p-r)-1 activations and what 2r+1 weight gradients need, at most 2p-1 of both together.
    Idle time within a rank's span for equal stages without communication: (p-1)(F+I-2W), from 2p-1 micro-batches
    on.
    """
    return _schedule("zb_h2", num_ranks, num_microbatches, steps=2)


def _schedule(name: str, num_ranks: int, num_microbatches: int, *, steps: int) -> Schedule:
    """steps: forwards that a rank runs further ahead than the next one, and the weight gradients it owes less."""
    return Schedule(
        name=name,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=(tuple(range(num_ranks)),),
        actions=tuple(
            _of_stage(stage, num_microbatches, ahead=steps * (num_ranks - 1 - stage), owed=steps * stage)
            for stage in range(num_ranks)
        ),
    )


def _of_stage(stage: int, num_microbatches: int, *, ahead: int, owed: int) -> tuple[Action, ...]:
    ahead, owed = min(ahead, num_microbatches), min(owed, num_microbatches)
    actions = [Action(stage, Kind.F, microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        if microbatch + ahead < num_microbatches:
            actions.append(Action(stage, Kind.F, microbatch + ahead))
        actions.append(Action(stage, Kind.I, microbatch))
        if microbatch >= owed:
            actions.append(Action(stage, Kind.W, microbatch - owed))
    actions += [Action(stage, Kind.W, index) for index in range(num_microbatches - owed, num_microbatches)]
    return tuple(actions)
