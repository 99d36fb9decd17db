"""How far a step may run on parameters that are not validated yet, and what to take back where they were wrong.

Note [Running ahead]
Post-validation (Qi et al., arXiv 2401.10241, section 4) updates a stage without waiting for the other stages, so
the next step starts on parameters that may have to be corrected. Forwards may be done on them: they change
nothing, and can be done again. The first action that is not part of a forward is where a rank must know. To wait
there costs next to nothing: a gradient can reach a rank only after its micro-batch has passed every stage, hence
after every rank of the pipeline has ended the step before.

If the parameters were corrected, all ranks throw the forwards away and start anew. What was sent and not yet
used is then received and dropped. Nothing else may be on its way: so a receive is part of what runs ahead only
where its send is, and ranks that gather a stage together run ahead over the same number of gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

from counterflow.parallel.pipeline.ir.action import Action, Kind, Schedule

_OF_A_FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD})


def forwards_ahead(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank, how many of its first actions may run on parameters that are not validated yet.

    schedule: lowered. See Note [Running ahead].
    """
    cuts = [
        next((index for index, each in enumerate(actions) if each.kind not in _OF_A_FORWARD), len(actions))
        for actions in schedule.actions
    ]
    while True:
        ahead = [actions[:cut] for actions, cut in zip(schedule.actions, cuts, strict=True)]
        sent = {(each.stage + 1, each.microbatch) for of in ahead for each in of if each.kind is Kind.SEND_F}
        gathers = [sum(each.kind is Kind.UNSHARD for each in of) for of in ahead]
        shorter = [
            _cut(of, sent, min(gathers[other] for other in _sharers(schedule, rank)))
            for rank, of in enumerate(ahead)
        ]
        if shorter == cuts:
            return tuple(cuts)
        cuts = shorter


def _cut(ahead: Sequence[Action], sent: set[tuple[int, int | None]], num_gathers: int) -> int:
    """Where `ahead` meets a receive of what is not sent, or one gather too many."""
    for index, action in enumerate(ahead):
        if action.kind is Kind.RECV_F and (action.stage, action.microbatch) not in sent:
            return index
        num_gathers -= action.kind is Kind.UNSHARD
        if num_gathers < 0:
            return index
    return len(ahead)


def _sharers(schedule: Schedule, rank: int) -> set[int]:
    """The ranks that hold a copy of one of its stages, itself among them."""
    return {rank, *(other for stage in schedule.stages_of(rank) for other in schedule.replicas_of(stage))}


def unused_receives(schedule: Schedule, ahead: Sequence[int], rank: int) -> list[Action]:
    """The receives of `rank` whose activations were sent to it, and not used, where all ranks stop after `ahead`.

    In the order in which each peer sent them.
    """
    used = {
        (each.stage, each.microbatch) for each in schedule.actions[rank][: ahead[rank]] if each.kind is Kind.F
    }
    return [
        Action(each.stage + 1, Kind.RECV_F, each.microbatch)
        for actions, cut in zip(schedule.actions, ahead, strict=True)
        for each in actions[:cut]
        if each.kind is Kind.SEND_F
        and each.microbatch is not None
        and schedule.rank_of(each.stage + 1, each.microbatch) == rank
        and (each.stage + 1, each.microbatch) not in used
    ]
