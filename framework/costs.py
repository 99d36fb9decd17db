"""The bytes of a configured run that its schedule moves: messages between stages, parameters and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from framework.config import TrainConfig
from models.cost import stage_parameters
from models.partition import partition

BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2}
_GRADIENT_BYTES = 4  # gradients are accumulated and reduced in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Whole sizes on one tensor-parallel rank, by stage: parameters as they are gathered, gradients as reduced."""

    parameters: tuple[float, ...]
    gradients: tuple[float, ...]


def message_bytes(config: TrainConfig) -> int:
    """Of the activation of one micro-batch between two stages, [B, S, H], or [B, S/tp, H] with sequence parallelism."""
    elements = config.data.micro_batch_size * config.data.seq_length * config.model.hidden_size
    if config.parallel.sequence_parallel:
        elements //= config.parallel.tensor_parallel_size
    return elements * BYTES_PER_ELEMENT[config.precision.compute]


def stage_bytes(config: TrainConfig, num_stages: int) -> StageBytes | None:
    """None where the model has fewer layers than it has to have for so many stages.

    The vocabulary is the model's or, before the data is prepared, what the tokenizer is asked for. Parameters that
    every tensor-parallel rank has whole (norms) are counted as cut.
    """
    vocab_size = config.model.vocab_size or config.tokenizer.vocab_size
    try:
        slices = partition(config.model, num_stages, seq_length=config.data.seq_length, vocab_size=vocab_size)
    except ValueError:
        return None
    counts = [
        stage_parameters(config.model, len(cut.layers), first=cut.first, last=cut.last, vocab_size=vocab_size)
        / config.parallel.tensor_parallel_size
        for cut in slices
    ]
    size = BYTES_PER_ELEMENT[config.precision.compute]
    return StageBytes(
        parameters=tuple(count * size for count in counts),
        gradients=tuple(count * _GRADIENT_BYTES for count in counts),
    )
