"""The rules that cross the nodes of a config: what fits together, said before a process starts."""

from __future__ import annotations

from dataclasses import replace

from framework.compositions import refused
from framework.config import TrainConfig
from framework.errors import ConfigError
from framework.recompute import recompute_plan
from models.config import ModelConfig
from parallel.mesh import MeshConfig
from parallel.pipeline.action import Schedule
from parallel.pipeline.config import ScheduleConfig
from parallel.pipeline.costs import costs_from
from parallel.pipeline.source import schedule_from


def check(config: TrainConfig) -> None:
    """Hold `config` against the rules that cross its nodes.

    Raises ConfigError: naming every rule broken, with the values and a remedy.
    """
    problems = refused(config)
    problems += _tensor_problems(config)
    problems += _expert_problems(config)
    problems += _balance_problems(config)
    if not 0 <= config.seed < 1 << 63:
        problems.append(f"seed={config.seed}: a whole number from 0 to 2^63 - 1")
    try:
        schedule = build_schedule(config.schedule, config.parallel)
    except ValueError as error:
        problems.append(str(error))
    else:
        problems += _placement_problems(config, schedule)
        problems += _ramp_problems(config)
        if config.model.num_layers < schedule.num_stages:
            problems.append(
                f"model.num_layers={config.model.num_layers}: schedule={config.schedule.name} with "
                f"parallel.pipeline_parallel_size={config.parallel.pipeline_parallel_size} has "
                f"{schedule.num_stages} stages and each needs a layer; set model.num_layers to "
                f"{schedule.num_stages} or more, or lower parallel.pipeline_parallel_size"
            )
        else:
            problems += _recompute_problems(config, schedule)
    if config.model.position == "learned" and config.data.seq_length > config.model.max_seq_length:
        problems.append(
            f"data.seq_length={config.data.seq_length}: model.position=learned has a row for each of "
            f"model.max_seq_length={config.model.max_seq_length} positions; raise that, lower data.seq_length, or set "
            "model.position=rope"
        )
    vocab_size = config.model.vocab_size
    if vocab_size is not None and config.tokenizer.kind == "bpe" and vocab_size < config.tokenizer.vocab_size:
        problems.append(
            f"model.vocab_size={vocab_size}: smaller than tokenizer.vocab_size={config.tokenizer.vocab_size}, so "
            "some tokens would have no embedding; set model.vocab_size=null to take the tokenizer's size"
        )
    if problems:
        raise ConfigError(problems)


def _recompute_problems(config: TrainConfig, schedule: Schedule) -> list[str]:
    try:
        recompute_plan(config, schedule, vocab_size=config.expected_vocab_size)
    except ValueError as error:
        return [str(error)]
    return []


def _placement_problems(config: TrainConfig, schedule: Schedule) -> list[str]:
    """A user's own schedule may place stages where the mesh has no groups for them."""
    problems: list[str] = []
    try:
        costs_from(config.schedule.costs, schedule.num_stages)
    except ValueError as error:
        problems.append(str(error))
    last = schedule.num_ranks - 1
    if schedule.num_directions > 1 and any(
        schedule.replicas_of(stage) != tuple(sorted({rank, last - rank}))
        for stage, rank in enumerate(schedule.placement[0])
    ):
        problems.append(
            f"schedule.path={config.schedule.path}: the two copies of a stage must be on the ranks r and "
            f"{last} - r; reorder the rows of the file"
        )
    ends = (schedule.placement[0][0], schedule.placement[0][-1])
    if (
        (config.model.tie_embeddings or config.model.mtp.num_modules)
        and schedule.num_directions == 1
        and ends[0] != ends[1]
        and ends != (0, last)
    ):
        problems.append(
            f"{_tie_of(config.model)}: the first stage must be on pipeline rank 0 and the last on {last}, or both "
            f"on one, and schedule={config.schedule.name} has them on {ends[0]} and {ends[1]}; reorder the rows of "
            "the file, or set model.tie_embeddings=false and model.mtp.num_modules=0"
        )
    return problems


def _tie_of(model: ModelConfig) -> str:
    """What makes the last stage hold a copy of the first stage's embedding."""
    return (
        "model.tie_embeddings=true"
        if model.tie_embeddings
        else f"model.mtp.num_modules={model.mtp.num_modules}"
    )


def _ramp_problems(config: TrainConfig) -> list[str]:
    """Every size of the batch within the run must be one that the schedule takes."""
    try:
        plan = config.batch_plan
    except ValueError as error:
        return [str(error)]
    for phase in plan.phases[:-1]:
        try:
            if phase.first_step < config.training.num_steps:
                counted = replace(config.schedule, num_microbatches=phase.num_microbatches)
                build_schedule(counted, config.parallel)
        except ValueError as error:
            ramp = config.training.batch_ramp
            rule = str(error).partition(";")[0]  # its remedy is for the number of all steps
            return [
                f"training.batch_ramp.start_num_microbatches={ramp.start_num_microbatches}: with increment="
                f"{ramp.increment} step {phase.first_step} has {phase.num_microbatches} micro-batches, and "
                f"schedule={config.schedule.name} does not take them: {rule} (steps count from 0); choose "
                "start_num_microbatches and increment so that it takes every size"
            ]
    return []


def build_schedule(schedule: ScheduleConfig, parallel: MeshConfig) -> Schedule:
    """The schedule that `schedule` names, for this many pipeline ranks.

    Raises ValueError: for a name that there is none of, or (ranks, micro-batches, costs, file) that its rule refuses.
    """
    return schedule_from(schedule, parallel.pipeline_parallel_size).schedule


def _tensor_problems(config: TrainConfig) -> list[str]:
    tensor_parallel_size, model = config.parallel.tensor_parallel_size, config.model
    divisible = {"model.num_heads": (model.num_heads, "attention heads are shared out")}
    if not model.uses_mla:
        divisible["model.num_kv_heads"] = (model.num_kv_heads, "key/value heads are shared out")
    if not model.is_moe_layer(0):
        divisible["model.intermediate_size"] = (model.intermediate_size, "the MLP's columns are shared out")
    if model.moe.num_experts and model.moe.num_shared_experts:
        divisible["model.moe.expert_intermediate_size"] = (
            model.expert_intermediate_size,
            "the columns of shared experts are shared out",
        )
    if config.parallel.sequence_parallel:
        divisible["data.seq_length"] = (
            config.data.seq_length,
            "sequence parallelism cuts each sample into equal parts",
        )
    elif model.moe.num_experts:
        divisible["data.seq_length"] = (
            config.data.seq_length,
            "each sample's tokens are shared out before they go to experts, so that none goes twice",
        )
    problems: list[str] = []
    for name, (value, why) in divisible.items():
        if value % tensor_parallel_size:
            multiple = -(-value // tensor_parallel_size) * tensor_parallel_size
            problems.append(
                f"{name}={value}: must be a multiple of parallel.tensor_parallel_size={tensor_parallel_size}, over "
                f"which {why}; try {name}={multiple}, or parallel.tensor_parallel_size="
                f"{_largest_divisor(value, tensor_parallel_size)}"
                + (
                    ", or parallel.sequence_parallel=false"
                    if name == "data.seq_length" and tensor_parallel_size > 1 and not model.moe.num_experts
                    else ""
                )
            )
    return problems


def _balance_problems(config: TrainConfig) -> list[str]:
    interval_steps, num_nodes = config.balance.interval_steps, config.balance.num_nodes
    size = config.parallel.expert_parallel_size
    if interval_steps == 0:
        return []
    if size == 1:
        return [
            f"balance.interval_steps={interval_steps}: experts move between the ranks of the expert axis, and "
            "parallel.expert_parallel_size=1; set that to 2 or more, or balance.interval_steps=0"
        ]
    if size % num_nodes:
        return [
            f"balance.num_nodes={num_nodes}: must divide parallel.expert_parallel_size={size}, whose ranks are shared "
            f"out to nodes; try balance.num_nodes={_largest_divisor(size, num_nodes)}"
        ]
    return []


def _expert_problems(config: TrainConfig) -> list[str]:
    size, num_experts = config.parallel.expert_parallel_size, config.model.moe.num_experts
    problems: list[str] = []
    if size > 1 and num_experts == 0:
        problems.append(
            f"parallel.expert_parallel_size={size}: the model has no experts to share out "
            "(model.moe.num_experts=0); set parallel.expert_parallel_size=1, or choose a model that has"
        )
    elif num_experts % size:
        problems.append(
            f"model.moe.num_experts={num_experts}: must be a multiple of parallel.expert_parallel_size={size}, over "
            f"which experts are shared out; try parallel.expert_parallel_size={_largest_divisor(num_experts, size)}"
        )
    if config.model.mtp.num_modules >= config.data.seq_length:
        problems.append(
            f"model.mtp.num_modules={config.model.mtp.num_modules}: predicts so many tokens further, and a sample "
            f"has data.seq_length={config.data.seq_length}; lower it below that"
        )
    return problems


def _largest_divisor(value: int, at_most: int) -> int:
    return next(size for size in range(at_most, 0, -1) if value % size == 0)
