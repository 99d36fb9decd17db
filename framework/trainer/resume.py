"""What a run must share with the one it goes on from: told before a rank starts, held again in each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.trainer.resume_settings import compare, is_allowed, settings_of

# What the tokens are made by; whichever of them the user names, other tokens are what is allowed.
_TOKEN_KEYS = (
    "data.sources",
    "data.text_field",
    "data.max_bytes",
    "data.validation_fraction",
    "tokenizer.kind",
    "tokenizer.vocab_size",
    "tokenizer.path",
)
_BATCH_KEYS = ("data.micro_batch_size", "schedule.num_microbatches", "parallel.data_parallel_size")


def resume_problems(
    config: TrainConfig, folder: Path, metadata: Mapping[str, Any], data_hash: str | None = None
) -> list[str]:
    """Why a run of `config` cannot go on from the checkpoint `folder`; data_hash: None where it is not known yet."""
    given, allowed = f"checkpoint.resume={config.checkpoint.resume}", config.checkpoint.allow_changes
    absent = [
        key for key in ("num_steps", "num_samples", "global_batch_size") if type(metadata.get(key)) is not int
    ]
    if absent:
        return [
            f"{given}: {folder} is no checkpoint of a run, for it does not say {', '.join(absent)}; name the folder of "
            "a run of `counterflow train`"
        ]
    # Their steps depend on the budget and the data alone.
    is_same_batching = metadata.get("batching", config.data.batching) == config.data.batching
    takes_documents = config.data.batching == "documents"
    problems = [
        f"{given}: its {key} is {metadata[key]} and this run's is {mine}, so samples would be repeated or left out; "
        f"{remedy}, or allow that with checkpoint.allow_changes=[{keys[0]}]"
        for key, mine, remedy, keys in (
            (
                "data_hash",
                data_hash or metadata.get("data_hash"),
                "use the same data.* and tokenizer.* values",
                _TOKEN_KEYS,
            ),
            ("seed", config.seed, "use the same seed", ("seed",)),
            (
                "seq_length",
                config.data.seq_length,
                "keep data.seq_length, by which the text is cut into samples",
                ("data.seq_length",),
            ),
            ("batching", config.data.batching, "keep data.batching as it was", ("data.batching",)),
            (
                "tokens_per_step",
                config.data.tokens_per_step if is_same_batching else metadata.get("tokens_per_step"),
                "keep data.tokens_per_step as it was",
                ("data.tokens_per_step",),
            ),
            (
                "global_batch_size",
                metadata["global_batch_size"] if takes_documents else config.global_batch_size,
                "keep micro-batches x micro_batch_size x data_parallel_size as it was",
                _BATCH_KEYS,
            ),
        )
        if metadata.get(key, mine) != mine and not is_allowed(allowed, *keys)
    ]
    num_steps, num_samples = metadata["num_steps"], metadata["num_samples"]
    expected = num_samples if takes_documents else config.batch_plan.samples_before(num_steps)
    if (
        metadata["global_batch_size"] == config.global_batch_size
        and num_samples != expected
        and is_same_batching
        and not is_allowed(allowed, "training.batch_ramp")
    ):
        problems.append(
            f"{given}: its {num_steps} steps read {num_samples} samples and this run's would have read {expected}, so "
            "samples would be repeated or left out; keep training.batch_ramp as it was, or allow that with "
            "checkpoint.allow_changes=[training.batch_ramp]"
        )
    num_experts, saved_experts = config.model.moe.num_experts, metadata.get("num_experts", 0)
    if num_experts != saved_experts:
        problems.append(
            f"model.moe.num_experts={num_experts}: {folder} is of a model with {saved_experts} experts a layer, and "
            f"its weights are for that number; set model.moe.num_experts={saved_experts} (any "
            "parallel.expert_parallel_size goes on from it)"
        )
    problems += _model_problems(config, folder, metadata)
    if metadata["num_steps"] >= config.training.num_steps:
        problems.append(
            f"training.num_steps={config.training.num_steps}: {folder} has done {metadata['num_steps']} steps already; "
            "set training.num_steps higher to go on"
        )
    return problems


def resume_notes(config: TrainConfig, folder: Path, metadata: Mapping[str, Any]) -> list[str]:
    """What to tell of a run that goes on: settings that are not what they were, and those nothing is known of."""
    found = compare(_settings(metadata), settings_of(config))
    notes: list[str] = []
    changes = [*found.model, *found.trains]
    if changes:
        notes.append(f"{folder} goes on with other settings: {', '.join(map(str, changes))}")
    if found.not_compared:
        notes.append(
            f"{folder} does not say what it was trained with in {', '.join(found.not_compared)}: these could not be "
            "compared; see that they are what they were"
        )
    return notes


def _model_problems(config: TrainConfig, folder: Path, metadata: Mapping[str, Any]) -> list[str]:
    found = compare(_settings(metadata), settings_of(config))
    problems = [
        f"{change.key}={_text(change.new)}: {folder} was trained with {_text(change.old)}, and its weights would mean "
        f"something else; set {change.key}={_text(change.old)}, or, to go on with another function of the same "
        f"weights, checkpoint.allow_changes=[{change.key}]"
        for change in found.model
        if change.key != "model.moe.num_experts"
        and not is_allowed(config.checkpoint.allow_changes, change.key)
    ]
    if found.unknown:
        problems.append(
            f"checkpoint.resume={config.checkpoint.resume}: {folder} was trained with {', '.join(found.unknown)}, "
            "which this program does not have; go on with the program that wrote it"
        )
    return problems


def _settings(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = metadata.get("settings")
    return settings if isinstance(settings, Mapping) else {}


def _text(value: Any) -> str:
    # By identity: 1.0 equals True, and 0 False.
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
