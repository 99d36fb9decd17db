"""Rules of what is cut over ranks: the tensor axis, positions, the vocabulary, and what may be changed on resuming."""

from __future__ import annotations

from collections.abc import Iterator

from counterflow.framework.checks.rules.rule import Asked, Finding, Rule, largest_divisor
from counterflow.framework.config.mapping import dotted_names, unknown_key
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.planning.workload import Workload


def _tensor(workload: Workload) -> Iterator[Finding]:
    config = workload.config
    size, model = config.parallel.tensor_parallel_size, config.model
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
    for name, (value, why) in divisible.items():
        if value % size:
            is_sequence = name == "data.seq_length" and size > 1 and not model.moe.num_experts
            yield Finding(
                value=f"{name}={value}",
                reason=f"must be a multiple of parallel.tensor_parallel_size={size}, over which {why}",
                remedy=f"try {name}={-(-value // size) * size}, or parallel.tensor_parallel_size="
                f"{largest_divisor(value, size)}"
                + (", or parallel.sequence_parallel=false" if is_sequence else ""),
            )


def _layers(workload: Workload) -> Iterator[Finding]:
    config = workload.config
    num_stages = workload.named(workload.full_size).num_stages
    if config.model.num_layers < num_stages:
        yield Finding(
            value=f"model.num_layers={config.model.num_layers}",
            reason=f"schedule={config.schedule.name} with parallel.pipeline_parallel_size="
            f"{config.parallel.pipeline_parallel_size} has {num_stages} stages and each needs a layer",
            remedy=f"set model.num_layers to {num_stages} or more, or lower parallel.pipeline_parallel_size",
        )


def _positions(workload: Workload) -> Iterator[Finding]:
    model, seq_length = workload.config.model, workload.config.data.seq_length
    if model.position == "learned" and seq_length > model.max_seq_length:
        yield Finding(
            value=f"data.seq_length={seq_length}",
            reason="model.position=learned has a row for each of model.max_seq_length="
            f"{model.max_seq_length} positions",
            remedy="raise that, lower data.seq_length, or set model.position=rope",
        )


def _further_tokens(workload: Workload) -> Iterator[Finding]:
    num_modules, seq_length = workload.config.model.mtp.num_modules, workload.config.data.seq_length
    if num_modules >= seq_length:
        yield Finding(
            value=f"model.mtp.num_modules={num_modules}",
            reason=f"predicts so many tokens further, and a sample has data.seq_length={seq_length}",
            remedy="lower it below that",
        )


def _vocabulary(workload: Workload) -> Iterator[Finding]:
    model, tokenizer = workload.config.model, workload.config.tokenizer
    if model.vocab_size is not None and tokenizer.kind == "bpe" and model.vocab_size < tokenizer.vocab_size:
        yield Finding(
            value=f"model.vocab_size={model.vocab_size}",
            reason=f"smaller than tokenizer.vocab_size={tokenizer.vocab_size}, so some tokens would have no embedding",
            remedy="set model.vocab_size=null to take the tokenizer's size",
        )


def _changes(workload: Workload) -> Iterator[Finding]:
    known = dotted_names(TrainConfig)
    for name in workload.config.checkpoint.allow_changes:
        if name not in known:
            key, _, rest = unknown_key(name, known).partition(": ")
            reason, _, remedy = rest.partition("; ")
            yield Finding(value=f"checkpoint.allow_changes: {key}", reason=reason, remedy=remedy)


RULES = (
    Rule(
        name="the tensor axis divides what it cuts",
        find=_tensor,
        example={"parallel": {"tensor_parallel_size": 4}},
    ),
    Rule(
        name="every stage has a layer",
        find=_layers,
        example={"model": {"num_layers": 2}, "parallel": {"pipeline_parallel_size": 3}},
        asked=Asked.WITH_SCHEDULE,
    ),
    Rule(
        name="learned positions reach the end of a sample",
        find=_positions,
        example={"model": {"position": "learned", "max_seq_length": 100}},
    ),
    Rule(
        name="further tokens are within a sample",
        find=_further_tokens,
        example={"model": {"mtp": {"num_modules": 4}}, "data": {"seq_length": 4}},
    ),
    Rule(
        name="the embedding has a row for each token",
        find=_vocabulary,
        example={"model": {"vocab_size": 300}},
    ),
    Rule(
        name="what may change is a setting",
        find=_changes,
        example={"checkpoint": {"allow_changes": ["model.num_layer"]}},
    ),
)
