"""Config of the corpus and its tokenizer (config groups `data` and `tokenizer`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """kind `bpe` trains a byte-level BPE of `vocab_size` on the corpus and caches it; `file` loads `path`."""

    kind: Literal["bpe", "file"] = "bpe"
    vocab_size: int = 4096
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind == "file" and not self.path:
            raise ValueError(
                "tokenizer.path is empty: tokenizer.kind=file needs the path of a tokenizer.json"
            )
        if self.kind == "bpe" and self.vocab_size < 260:
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size}: a byte-level BPE needs at least 260 entries "
                "(256 bytes and the special tokens)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The corpus and how it becomes batches.

    sources: files or folders of text (.txt, .md, .py, .rst, .jsonl with `text_field`); empty takes the
        sources and documentation of the Python that runs this.
    seq_length: tokens of one sample. micro_batch_size: samples of one micro-batch on one data-parallel rank.
    batching: `windows` cuts the stream of all documents into samples of seq_length; `documents` takes each document
        by itself, in pieces of at most seq_length, as many as fit tokens_per_step (over all ranks), in as many
        micro-batches of at most micro_batch_size * seq_length positions as they need. Validation takes windows.
    validation_fraction: share of the documents held out; validation_batches: global batches evaluated.
    max_bytes: read no more text than this, in the order of the sources; null reads all of it.
    cache_dir: where tokenizer and token shards are kept; null is ~/.cache/counterflow.
    """

    sources: tuple[str, ...] = ()
    text_field: str = "text"
    seq_length: int = 128
    micro_batch_size: int = 2
    batching: Literal["windows", "documents"] = "windows"
    tokens_per_step: int | None = None
    validation_fraction: float = 0.02
    validation_batches: int = 4
    max_bytes: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("seq_length", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)}: must be at least 1")
        if self.batching == "windows" and self.tokens_per_step is not None:
            raise ValueError(
                f"data.tokens_per_step={self.tokens_per_step}: with data.batching=windows a step has micro-batches x "
                "micro_batch_size x data_parallel_size samples of data.seq_length; set data.batching=documents, or "
                "data.tokens_per_step=null"
            )
        if self.batching == "documents" and (self.tokens_per_step or 0) < self.seq_length:
            raise ValueError(
                f"data.tokens_per_step={'null' if self.tokens_per_step is None else self.tokens_per_step}: with "
                f"data.batching=documents a step takes at most so many tokens, and a sample may have data.seq_length="
                f"{self.seq_length}; set it to that or more, as in data.tokens_per_step={16 * self.seq_length}"
            )
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction}: a share of the documents, from 0 up to 1"
            )
        if self.validation_batches < 0:
            raise ValueError(
                f"data.validation_batches={self.validation_batches}: a number of batches; 0 evaluates none"
            )
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(
                f"data.max_bytes={self.max_bytes}: must be at least 1; leave it null to read the whole corpus"
            )
