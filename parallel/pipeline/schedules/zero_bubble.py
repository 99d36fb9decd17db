"""ZB-H1 and ZB-H2: 1F1B with the weight gradients moved into its bubbles (Qi et al., arXiv 2401.10241, section 2).

Both run F, I and the W of an earlier micro-batch in turn. They differ in how many forwards a rank runs ahead, and
in how many weight gradients it owes: each rank owes what the first rank's forwards run ahead of its own.
"""

from __future__ import annotations

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule


def zero_bubble_1f1b(name: str, num_ranks: int, num_microbatches: int, *, steps: int) -> Schedule:
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
