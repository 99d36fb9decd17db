"""The tokenizer that a corpus trains, and the tokens that it makes of the corpus."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from counterflow.framework.data import tokenizer as bpe
from counterflow.framework.data.child import Progress
from counterflow.framework.data.corpus import Document, share_of
from counterflow.framework.data.identity import CorpusScan
from counterflow.framework.data.sealed import write_whole
from counterflow.framework.data.shards import SplitWriter, dtype_for

_log = logging.getLogger(__name__)
_TRAINING_BYTES = 1 << 28  # text the tokenizer learns from, drawn from the whole corpus
_BATCH_CHARS = 1 << 22


def trained_tokenizer(
    path: Path, size: int, scan: CorpusScan, documents: Callable[[], Iterator[Document]], report: Progress
) -> tuple[Tokenizer, str]:
    """The tokenizer that is cached at `path`, or one that is trained and kept there, and the hash of its file."""
    hash_path = path.with_suffix(".sha256")
    if path.is_file():
        try:
            data = bpe.read_tokenizer_file(path)
            digest = hashlib.sha256(data).hexdigest()
            if not hash_path.is_file() or hash_path.read_text(errors="replace") != digest:
                raise ValueError(f"{path} is damaged: its SHA-256 is not the one in {hash_path.name}")
            return bpe.parse_tokenizer(data, path), digest
        except ValueError as error:
            _log.warning("the cached tokenizer is trained again: %s", error)
    keep = min(1.0, _TRAINING_BYTES / max(1, scan.num_bytes))

    def texts() -> Iterator[str]:
        done = 0
        for document in documents():
            done += len(document.text)
            report("training the tokenizer", min(0.99, done / scan.num_bytes))
            # From the other end of the share, so that sampling does not favour the held-out documents.
            if 1 - share_of(document.id) <= keep:
                yield document.text

    # Another split of the corpus may train the same tokenizer at once: each file is written whole, and the hash, last.
    tokenizer = bpe.train_bpe(texts(), size)
    data = tokenizer.to_str(pretty=True).encode()
    digest = hashlib.sha256(data).hexdigest()
    write_whole(path, data)
    write_whole(hash_path, digest.encode())
    report("training the tokenizer", 1.0)
    return tokenizer, digest


def encode_corpus(
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    scan: CorpusScan,
    validation_fraction: float,
    writers: Sequence[SplitWriter],
    report: Progress,
) -> None:
    """Write the tokens of `documents`: to the first of `writers`, the held-out ones to the second."""
    dtype = np.dtype(dtype_for(bpe.vocab_size(tokenizer)))
    gaps = bpe.gaps_of(tokenizer)
    last_split = -1
    done = 0
    for batch in _batches(documents):
        encoded = bpe.encode(tokenizer, [document.text for document in batch], dtype, gaps)
        for document, found in zip(batch, encoded, strict=True):
            # The lowest document is always held out and the highest never, so that no split is empty.
            held_out = document.id == scan.lowest or (
                document.id != scan.highest and share_of(document.id) < validation_fraction
            )
            split = 1 if validation_fraction and held_out else 0
            writers[split].append(
                found.ids,
                continues=document.continues and split == last_split,
                num_unknown_tokens=found.num_unknown_tokens,
                num_dropped_characters=found.num_dropped_characters,
            )
            last_split = split
            done += len(document.text.encode())
        report("encoding the corpus", min(0.99, done / scan.num_bytes))
    for writer in writers:
        writer.finish()
    report("encoding the corpus", 1.0)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
