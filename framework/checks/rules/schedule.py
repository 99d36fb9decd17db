"""Rules of schedules. What a schedule needs (an even number of ranks, enough micro-batches, a file) its definition in
parallel/pipeline/schedules says, and FITS asks it of every schedule alike."""

from __future__ import annotations

from collections.abc import Iterator

from counterflow.framework.checks.rules.rule import Asked, Finding, Rule
from counterflow.framework.planning.workload import Workload
from counterflow.models.config import ModelConfig
from counterflow.parallel.pipeline.analysis.costs import costs_from


def _fits(workload: Workload) -> Iterator[Finding]:
    try:
        workload.named(workload.full_size)
    except ValueError as error:
        yield Finding.of(error)


def _costs(workload: Workload) -> Iterator[Finding]:
    try:
        costs_from(workload.config.schedule.costs, workload.named(workload.full_size).num_stages)
    except ValueError as error:
        yield Finding.of(error)


def _mirrored(workload: Workload) -> Iterator[Finding]:
    """The mesh has groups for the ranks r and p-1-r; a user's own schedule may place copies elsewhere."""
    schedule = workload.named(workload.full_size)
    last = schedule.num_ranks - 1
    if schedule.num_directions > 1 and any(
        schedule.replicas_of(stage) != tuple(sorted({rank, last - rank}))
        for stage, rank in enumerate(schedule.placement[0])
    ):
        yield Finding(
            value=f"schedule.path={workload.config.schedule.path}",
            reason=f"the two copies of a stage must be on the ranks r and {last} - r",
            remedy="reorder the rows of the file",
        )


def _tied(workload: Workload) -> Iterator[Finding]:
    """The embedding group is of the ranks at both ends of the pipeline, where generated schedules have the stages."""
    config, schedule = workload.config, workload.named(workload.full_size)
    last = schedule.num_ranks - 1
    ends = (schedule.placement[0][0], schedule.placement[0][-1])
    if (
        (config.model.tie_embeddings or config.model.mtp.num_modules)
        and schedule.num_directions == 1
        and ends[0] != ends[1]
        and ends != (0, last)
    ):
        yield Finding(
            value=_tie_of(config.model),
            reason=f"the first stage must be on pipeline rank 0 and the last on {last}, or both on one, and "
            f"schedule={config.schedule.name} has them on {ends[0]} and {ends[1]}",
            remedy="reorder the rows of the file, or set model.tie_embeddings=false and model.mtp.num_modules=0",
        )


def _tie_of(model: ModelConfig) -> str:
    """What makes the last stage hold a copy of the first stage's embedding."""
    return (
        "model.tie_embeddings=true"
        if model.tie_embeddings
        else f"model.mtp.num_modules={model.mtp.num_modules}"
    )


def _ramp(workload: Workload) -> Iterator[Finding]:
    """Every size of the batch within the run must be one that the schedule takes."""
    config = workload.config
    try:
        plan = config.batch_plan
    except ValueError as error:
        yield Finding.of(error)
        return
    for phase in plan.phases[:-1]:
        if phase.first_step >= config.training.num_steps:
            return
        try:
            workload.named(phase.num_microbatches)
        except ValueError as error:
            ramp = config.training.batch_ramp
            rule = str(error).partition(";")[0]  # its remedy is for the number of all steps
            yield Finding(
                value=f"training.batch_ramp.start_num_microbatches={ramp.start_num_microbatches}",
                reason=f"with increment={ramp.increment} step {phase.first_step} has {phase.num_microbatches} "
                f"micro-batches, and schedule={config.schedule.name} does not take them: {rule} (steps count from 0)",
                remedy="choose start_num_microbatches and increment so that it takes every size",
            )
            return


def _steps(workload: Workload) -> Iterator[Finding]:
    """What a step of the run, of whatever size, could not execute within the budgets."""
    try:
        workload.check()
    except ValueError as error:
        yield Finding.of(error)


FITS = Rule(
    name="the schedule fits its sizes",
    find=_fits,
    example={"parallel": {"pipeline_parallel_size": 3}, "schedule": {"name": "dualpipe"}},
)

RULES = (
    FITS,
    Rule(
        name="costs are of the schedule's stages",
        find=_costs,
        example={"schedule": {"costs": {"forward": [1.0, 2.0, 3.0]}}},
        asked=Asked.WITH_SCHEDULE,
    ),
    Rule(
        name="copies of a stage are on mirrored ranks",
        find=_mirrored,
        example={
            "schedule": {"name": "csv", "num_microbatches": 2},
            "parallel": {"pipeline_parallel_size": 4},
        },
        schedule_file="0F0,1F1,0B0,1B1\n1F0,0F1,1B0,0B1\n2F0,3F1,2B0,3B1\n3F0,2F1,3B0,2B1\n",
        asked=Asked.WITH_SCHEDULE,
    ),
    Rule(
        name="tied stages are at the ends of the pipeline",
        find=_tied,
        example={
            "schedule": {"name": "csv", "num_microbatches": 1},
            "parallel": {"pipeline_parallel_size": 2},
            "model": {"tie_embeddings": True},
        },
        schedule_file="1F0,1B0\n0F0,0B0\n",
        asked=Asked.WITH_SCHEDULE,
    ),
    Rule(
        name="the schedule takes every size of a ramp",
        find=_ramp,
        example={
            "schedule": {"name": "dualpipe"},
            "parallel": {"pipeline_parallel_size": 2},
            "training": {"batch_ramp": {"start_num_microbatches": 5, "ramp_samples": 100}},
        },
        asked=Asked.WITH_SCHEDULE,
    ),
    Rule(
        name="every step is within its budgets",
        find=_steps,
        example={"offload": {"policy": "schedule", "budget_bytes": 1000}},
        asked=Asked.LAST,
    ),
)
