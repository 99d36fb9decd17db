"""What a run must share with the one it goes on from: told before a rank starts, held again in each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from counterflow.framework.checkpoint.manifest import latest
from counterflow.framework.config.tree import TrainConfig


def checkpoints_of(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def checkpoint_to_resume(source: str) -> Path:
    """The newest whole checkpoint of the run in folder `source`.

    Raises ValueError: where it has none.
    """
    folder = latest(checkpoints_of(Path(source)))
    if folder is None:
        raise ValueError(
            f"checkpoint.resume={source}: there is no whole checkpoint under {checkpoints_of(Path(source))}; "
            "name the folder of a run that has saved one, or leave checkpoint.resume out to start anew"
        )
    return folder


def resume_problems(
    config: TrainConfig, folder: Path, metadata: Mapping[str, Any], data_hash: str | None = None
) -> list[str]:
    """Why a run of `config` cannot go on from the checkpoint `folder`; data_hash: None where it is not known yet."""
    # Their steps depend on the budget and the data alone.
    is_same_batching = metadata.get("batching", config.data.batching) == config.data.batching
    takes_documents = config.data.batching == "documents"
    problems = [
        f"checkpoint.resume={config.checkpoint.resume}: its {key} is {metadata[key]} and this run's is {mine}, so "
        f"samples would be repeated or left out; {remedy}"
        for key, mine, remedy in (
            ("data_hash", data_hash or metadata["data_hash"], "use the same data.* and tokenizer.* values"),
            ("seed", config.seed, "use the same seed"),
            (
                "seq_length",
                config.data.seq_length,
                "keep data.seq_length, by which the text is cut into samples",
            ),
            ("batching", config.data.batching, "keep data.batching as it was"),
            (
                "tokens_per_step",
                config.data.tokens_per_step if is_same_batching else metadata.get("tokens_per_step"),
                "keep data.tokens_per_step as it was",
            ),
            (
                "global_batch_size",
                metadata["global_batch_size"] if takes_documents else config.global_batch_size,
                "keep micro-batches x micro_batch_size x data_parallel_size as it was",
            ),
        )
        if metadata.get(key, mine) != mine
    ]
    num_steps, num_samples = metadata["num_steps"], metadata["num_samples"]
    expected = num_samples if takes_documents else config.batch_plan.samples_before(num_steps)
    if metadata["global_batch_size"] == config.global_batch_size and num_samples != expected:
        problems.append(
            f"checkpoint.resume={config.checkpoint.resume}: its {num_steps} steps read {num_samples} samples and this "
            f"run's would have read {expected}, so samples would be repeated or left out; keep training.batch_ramp as "
            "it was"
        )
    num_experts, saved_experts = config.model.moe.num_experts, metadata.get("num_experts", 0)
    if num_experts != saved_experts:
        problems.append(
            f"model.moe.num_experts={num_experts}: {folder} is of a model with {saved_experts} experts a layer, and "
            f"its weights are for that number; set model.moe.num_experts={saved_experts} (any "
            "parallel.expert_parallel_size goes on from it)"
        )
    if metadata["num_steps"] >= config.training.num_steps:
        problems.append(
            f"training.num_steps={config.training.num_steps}: {folder} has done {metadata['num_steps']} steps already; "
            "set training.num_steps higher to go on"
        )
    return problems
