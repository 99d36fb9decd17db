"""One micro-batch through every stage before the first step, for devices that do much at first use.

Why: Note [First uses] in parallel/pipeline/analysis/first_use.py.
"""

from __future__ import annotations

from counterflow.framework.experts import routing
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import step_undo
from counterflow.framework.trainer.step import TokenLoss


def is_due(assembly: Assembly) -> bool:
    """Whether a first kernel may wait for messages: there are some, and the device waits."""
    return assembly.device.type == "cuda" and assembly.schedule.num_ranks > 1


def rehearse(assembly: Assembly, step: int) -> None:
    """Run the first micro-batch of `step` in each direction; every rank calls it, before that step.

    It leaves no trace: what the run computes and records is what it would be without.
    """
    undo = step_undo(assembly.stages.values(), assembly.modules)
    undo.keep()
    batch, count = assembly.train.batch(step), assembly.schedule.num_directions
    routing.begin_step(assembly.modules, batch.num_valid_tokens)
    assembly.runtime.rehearse(
        [batch.tokens[index % len(batch.tokens)].to(assembly.device) for index in range(count)],
        [batch.targets[index % len(batch.targets)].to(assembly.device) for index in range(count)],
        TokenLoss(assembly, batch.num_valid_tokens),
    )
    undo.restore()
    assembly.axes.meter.reset()
