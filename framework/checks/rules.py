"""The rules that cross the nodes of a config: what fits together, said before a process starts."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from counterflow.framework.config.compositions import refused
from counterflow.framework.config.mapping import dotted_names, unknown_key
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError
from counterflow.framework.planning.step_sizes import build_schedule
from counterflow.framework.planning.workload import Workload
from counterflow.models.config import ModelConfig
from counterflow.models.fp8 import fp8_problems
from counterflow.parallel.pipeline.analysis.costs import costs_from
from counterflow.parallel.pipeline.ir.action import Schedule


def check(config: TrainConfig) -> None:
    """Hold `config` against the rules that cross its nodes.

    Raises ConfigError: naming every rule broken, with the values and a remedy.
    """
    problems = refused(config)
    problems += _tensor_problems(config)
    problems += _expert_problems(config)
    problems += _balance_problems(config)
    problems += _precision_problems(config)
    problems += _engine_problems(config)
    problems += _optimizer_offload_problems(config)
    problems += _compression_problems(config)
    problems += [
        f"checkpoint.allow_changes: {unknown_key(name, dotted_names(TrainConfig))}"
        for name in config.checkpoint.allow_changes
        if name not in dotted_names(TrainConfig)
    ]
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
        elif not problems:
            problems += _workload_problems(Workload(config))
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


def _engine_problems(config: TrainConfig) -> list[str]:
    """What zero.engine=deepspeed cannot do, beside the rows of the composition table."""
    zero = config.zero
    if zero.engine == "native":
        return []
    problems: list[str] = []
    if zero.stage == 0 and config.precision.compute == "bf16":
        problems.append(
            "precision.compute=bf16 with zero.engine=deepspeed and zero.stage=0: there it wraps the optimizer in a "
            "loss scaler, and gradients are added up in bf16; set zero.stage=1, or precision=fp32"
        )
    if zero.reshard_after != "use":
        problems.append(
            f"zero.reshard_after={zero.reshard_after} with zero.engine=deepspeed: it decides itself when parameters "
            "are freed; set zero.reshard_after=use"
        )
    if config.optimizer.kernel == "apex":
        problems.append(
            "optimizer.kernel=apex with zero.engine=deepspeed: it is given torch's AdamW; set optimizer.kernel=auto"
        )
    return problems


def _optimizer_offload_problems(config: TrainConfig) -> list[str]:
    """Updates happen where the masters are."""
    zero, optimizer = config.zero, config.optimizer
    tier = optimizer.offload.tier
    problems: list[str] = []
    if zero.offload_parameters and zero.stage != 3:
        problems.append(
            f"zero.offload_parameters=true with zero.stage={zero.stage}: only stage 3 has shards of parameters; set "
            "zero.stage=3"
        )
    if zero.offload_parameters and tier != "host":
        problems.append(
            f"zero.offload_parameters=true with optimizer.offload.tier={tier}: the shards that stay on the host are "
            "the masters, which are updated where they are; set optimizer.offload.tier=host"
        )
    if optimizer.kernel == "cpu_adam" and tier != "host":
        problems.append(
            f"optimizer.kernel=cpu_adam with optimizer.offload.tier={tier}: it updates on the host; set "
            "optimizer.offload.tier=host (optimizer=cpu_adam is both)"
        )
    if optimizer.kernel == "apex" and tier == "host":
        problems.append(
            "optimizer.kernel=apex with optimizer.offload.tier=host: it updates on a GPU; set optimizer.kernel=auto or "
            "cpu_adam"
        )
    return problems


def check_workload(config: TrainConfig, vocab_size: int) -> None:
    """Hold the steps of a run against its budgets once more, with the vocabulary of its data.

    Raises ConfigError: where a step of whatever size does not keep within them.
    """
    if problems := _workload_problems(Workload(config, vocab_size=config.model.vocab_size or vocab_size)):
        raise ConfigError(problems)


def _workload_problems(workload: Workload) -> list[str]:
    """What a step of the run, of whatever size, could not execute."""
    try:
        workload.check()
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
    size, spare = config.parallel.expert_parallel_size, config.balance.num_redundant_experts
    if spare and size == 1:
        return [
            f"balance.num_redundant_experts={spare}: they hold copies of other ranks' experts, and "
            "parallel.expert_parallel_size=1; set that to 2 or more, or balance.num_redundant_experts=0"
        ]
    if interval_steps and size == 1:
        return [
            f"balance.interval_steps={interval_steps}: experts move between the ranks of the expert axis, and "
            "parallel.expert_parallel_size=1; set that to 2 or more, or balance.interval_steps=0"
        ]
    if size % num_nodes:
        return [
            f"balance.num_nodes={num_nodes}: must divide parallel.expert_parallel_size={size}, whose ranks are shared "
            f"out to nodes; try balance.num_nodes={_largest_divisor(size, num_nodes)}"
        ]
    others = config.model.moe.num_experts - config.model.moe.num_experts // size
    if spare > others:
        return [
            f"balance.num_redundant_experts={spare}: each of parallel.expert_parallel_size={size} ranks has "
            f"{others} of model.moe.num_experts={config.model.moe.num_experts} still to hold a copy of; set it to "
            f"{others} or less"
        ]
    return []


def _compression_problems(config: TrainConfig) -> list[str]:
    weights = config.compression.weights
    if weights != "none" and config.zero.stage == 0:
        return [
            f"compression.weights={weights}: with zero.stage=0 every rank updates all parameters and gathers none; set "
            "zero.stage to 1, 2 or 3, or compression.weights=none"
        ]
    return []


def _precision_problems(config: TrainConfig) -> list[str]:
    precision, problems = config.precision, list[str]()
    if precision.linear == "fp8":
        problems += fp8_problems(config.model, config.parallel.tensor_parallel_size)
    kernel = config.optimizer.kernel
    if precision.optimizer_states == "bf16" and kernel not in ("auto", "torch"):
        problems.append(
            f"optimizer.kernel={kernel}: it keeps fp32 moments, and precision.optimizer_states=bf16; set that to fp32, "
            "or optimizer.kernel=auto"
        )
    return problems


def _expert_problems(config: TrainConfig) -> list[str]:
    size, num_experts = config.parallel.expert_parallel_size, config.model.moe.num_experts
    problems: list[str] = []
    if size > 1 and num_experts == 0:
        problems.append(
            f"parallel.expert_parallel_size={size}: the model has no experts to share out "
            "(model.moe.num_experts=0); set parallel.expert_parallel_size=1, or choose a model that has"
        )
    elif num_experts % size:
        # It divides the ranks of a stage too, which the size at hand does.
        fitting = _largest_divisor(gcd(num_experts, config.parallel.ranks_per_stage), size)
        problems.append(
            f"model.moe.num_experts={num_experts}: must be a multiple of parallel.expert_parallel_size={size}, over "
            f"which experts are shared out; try parallel.expert_parallel_size={fitting}"
        )
    if config.model.mtp.num_modules >= config.data.seq_length:
        problems.append(
            f"model.mtp.num_modules={config.model.mtp.num_modules}: predicts so many tokens further, and a sample "
            f"has data.seq_length={config.data.seq_length}; lower it below that"
        )
    return problems


def _largest_divisor(value: int, at_most: int) -> int:
    return next(size for size in range(at_most, 0, -1) if value % size == 0)
