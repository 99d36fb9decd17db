"""How the output head and the loss are computed: whole, or in chunks of tokens; and what a chunk takes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# Less would leave small products only: 16 MiB of fp32.
_LEAST_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """chunk_tokens: head and loss are computed of at most so many tokens at once, forward and backward in one pass,
    and no more logits are ever there; null: logits of a whole micro-batch are kept between the two.

    It is fewer tokens where the logits of so many would be more numbers than the hidden states of the micro-batch.
    """

    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(
                f"loss.chunk_tokens={self.chunk_tokens}: a number of tokens; set it to 1 or more (1024 is usual), or "
                "to null for the logits of whole micro-batches"
            )


def tokens_at_once(chunk_tokens: int, *, num_tokens: int, hidden_size: int, num_columns: int) -> int:
    """The tokens of a chunk: the chunks are as few as the bounds of `LossConfig` allow, and as long as each other.

    num_columns: of the logits on one tensor-parallel rank, padding counted, so that it is the same on each.
    """
    most = max(num_tokens * hidden_size, _LEAST_ELEMENTS) // max(1, num_columns)
    bound = max(1, min(chunk_tokens, most))
    num_chunks = max(1, -(-num_tokens // bound))
    return -(-num_tokens // num_chunks)


def chunk_bytes(num_tokens: int, num_columns: int, bytes_per_element: int) -> int:
    """What the logits of a chunk take: in fp32, and once more as they are multiplied where that is in 16 bits."""
    return num_tokens * num_columns * (4 if bytes_per_element == 4 else 4 + bytes_per_element)
