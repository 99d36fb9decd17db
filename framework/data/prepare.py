"""From a corpus to token shards, once, before any rank starts.

The work runs in a child process: the tokenizer library starts threads, and a process that has them must not
fork ranks afterwards. Results are cached under a key of all that they depend on; each appears by one rename,
whole or not at all, and a file lock lets two launchers prepare at once.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from counterflow.framework.data import corpus
from counterflow.framework.data import tokenizer as bpe
from counterflow.framework.data.config import DataConfig, TokenizerConfig
from counterflow.framework.data.corpus import CorpusSummary, Document, SourceFile
from counterflow.framework.data.shards import (
    SHARD_TOKENS,
    SplitIndex,
    SplitWriter,
    check_hashes,
    dtype_for,
    read_index,
)

# (what is being done, share done in 0..1)
Progress = Callable[[str, float], None]

_log = logging.getLogger(__name__)
_TRAINING_BYTES = 1 << 28  # text the tokenizer learns from, drawn from the whole corpus
_BATCH_CHARS = 1 << 22
_CHECKED_BYTES = 1 << 28  # a cached split up to this size is hashed at every start, a larger one when written
_PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """What the ranks open. `train` and `validation` are folders for `TokenDataset`; validation is None where
    `validation_fraction` is 0. `content_hash` is equal on two machines when their tokens are."""

    train: Path
    validation: Path | None
    tokenizer_path: Path
    vocab_size: int
    end_of_text_id: int
    num_train_tokens: int
    num_validation_tokens: int
    content_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Where each result of a (data, tokenizer) pair is kept."""

    data: DataConfig
    tokenizer: TokenizerConfig
    files: tuple[SourceFile, ...]
    cache_dir: Path
    tokenizer_path: Path
    tokens_dir: Path


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    global_batch_size: int = 1,
    progress: Progress | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> PreparedData:
    """Train or load the tokenizer, encode the corpus, and return where the tokens are; quick when cached.

    A damaged cache is named in the log and built again.
    Raises ValueError: for a source that cannot be read (see `corpus`), a tokenizer that cannot be used, or a
    split with fewer samples than one batch of `global_batch_size`.
    Raises RuntimeError: where the preparing process died.
    """
    plan = _plan(data, tokenizer)
    prepared = _cached(plan)
    if prepared is None:
        _run_in_child(plan, progress, shard_tokens)
        prepared = _cached(plan)
        assert prepared is not None
    _check_enough(data, prepared, global_batch_size)
    return prepared


def _plan(data: DataConfig, tokenizer: TokenizerConfig) -> _Plan:
    files = corpus.list_files(data)
    corpus_key = corpus.fingerprint(files, data)
    cache_dir = Path(data.cache_dir or "~/.cache/counterflow").expanduser().absolute()
    if tokenizer.kind == "file":
        assert tokenizer.path is not None
        tokenizer_path = Path(tokenizer.path).expanduser().absolute()
        if not tokenizer_path.is_file():
            raise ValueError(
                f"tokenizer.path={tokenizer_path}: no such file; give the path of a tokenizer.json"
            )
        tokenizer_key = hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()
    else:
        tokenizer_key = hashlib.sha256(f"bpe\0{corpus_key}\0{tokenizer.vocab_size}".encode()).hexdigest()
        tokenizer_path = cache_dir / "tokenizers" / f"bpe-{tokenizer.vocab_size}-{tokenizer_key[:16]}.json"
    key = hashlib.sha256(f"{corpus_key}\0{tokenizer_key}\0{data.validation_fraction}".encode()).hexdigest()
    return _Plan(
        data=data,
        tokenizer=tokenizer,
        files=files,
        cache_dir=cache_dir,
        tokenizer_path=tokenizer_path,
        tokens_dir=cache_dir / "tokens" / key[:16],
    )


def _cached(plan: _Plan, *, report: bool = True) -> PreparedData | None:
    """The result of `plan`, or None where it is not there or damaged; damage is logged unless told not to."""
    if not (plan.tokens_dir.is_dir() and plan.tokenizer_path.is_file()):
        return None
    folders = [plan.tokens_dir / "train"]
    if plan.data.validation_fraction:
        folders.append(plan.tokens_dir / "validation")
    indices: list[SplitIndex] = []
    try:
        for folder in folders:
            indices.append(read_index(folder))
            if indices[-1].num_bytes <= _CHECKED_BYTES:
                check_hashes(folder, indices[-1])
    except ValueError as error:
        if report:
            _log.warning("the prepared tokens are built again: %s", error)
        return None
    train = indices[0]
    return PreparedData(
        train=folders[0],
        validation=folders[1] if len(folders) > 1 else None,
        tokenizer_path=plan.tokenizer_path,
        vocab_size=train.vocab_size,
        end_of_text_id=train.end_of_text_id,
        num_train_tokens=train.num_tokens,
        num_validation_tokens=sum(index.num_tokens for index in indices[1:]),
        content_hash=hashlib.sha256("".join(index.content_hash for index in indices).encode()).hexdigest(),
    )


def _check_enough(data: DataConfig, prepared: PreparedData, global_batch_size: int) -> None:
    splits = [("train", prepared.num_train_tokens)]
    if prepared.validation is not None and data.validation_batches:
        splits.append(("validation", prepared.num_validation_tokens))
    for split, num_tokens in splits:
        samples = max(0, num_tokens - 1) // data.seq_length
        if samples < global_batch_size:
            remedy = "give more text or lower data.seq_length, data.micro_batch_size or the micro-batches"
            if split == "validation":
                remedy = f"raise data.validation_fraction={data.validation_fraction}, or {remedy}"
            raise ValueError(
                f"the {split} split has {num_tokens} tokens, that is {samples} samples of data.seq_length="
                f"{data.seq_length}, but one global batch takes {global_batch_size}: a batch never repeats a "
                f"sample; {remedy}"
            )


def _run_in_child(plan: _Plan, progress: Progress | None, shard_tokens: int) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(plan, ours, theirs, shard_tokens), daemon=True)
    child.start()
    theirs.close()
    try:
        while True:
            try:
                kind, *rest = ours.recv()
            except EOFError:
                child.join()
                raise RuntimeError(
                    f"the process that prepares the data died (exit code {child.exitcode}); if memory ran "
                    "out, set data.max_bytes"
                ) from None
            if kind == "progress":
                if progress is not None:
                    progress(rest[0], rest[1])
            elif kind == "invalid":
                raise ValueError(rest[0])
            elif kind == "error":
                raise RuntimeError(f"preparing the data failed:\n{rest[0]}")
            else:
                return
    finally:
        child.kill()
        child.join()
        ours.close()


def _child(plan: _Plan, parents: Connection, connection: Connection, shard_tokens: int) -> None:
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def leave_with_parent() -> None:
        try:
            connection.recv()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    last_report = [0.0]

    def report(what: str, share: float) -> None:
        if share >= 1 or time.monotonic() - last_report[0] >= _PROGRESS_INTERVAL_S:
            last_report[0] = time.monotonic()
            connection.send(("progress", what, share))

    try:
        _build(plan, report, shard_tokens)
        connection.send(("done",))
    except ValueError as error:
        connection.send(("invalid", str(error)))
    except OSError as error:
        rule = f"data.sources must be readable, and data.cache_dir={plan.cache_dir} writable and not full"
        connection.send(("invalid", f"{error}: {rule}; free it, or set data.cache_dir to another folder"))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    os._exit(0)  # no exit handlers and no flushing: the buffers belong to the parent


def _build(plan: _Plan, report: Progress, shard_tokens: int) -> None:
    plan.tokens_dir.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(plan.tokens_dir.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process that prepares the same data", 0.0)
        lock.acquire()
    with lock:
        if _cached(plan, report=False) is not None:
            return
        if plan.tokens_dir.exists():
            shutil.rmtree(plan.tokens_dir)
        summary = _scan(plan, report)
        tokenizer = _tokenizer(plan, summary, report)
        building = plan.tokens_dir.with_suffix(".building")
        shutil.rmtree(building, ignore_errors=True)
        _encode(plan, tokenizer, summary, building, report, shard_tokens)
        building.rename(plan.tokens_dir)


def _scan(plan: _Plan, report: Progress) -> CorpusSummary:
    total = sum(file.num_bytes for file in plan.files) or 1
    seen = 0

    def counted() -> Iterator[Document]:
        nonlocal seen
        for document in corpus.read_documents(plan.files, plan.data):
            seen += len(document.text)
            report("reading the corpus", min(1.0, seen / total))
            yield document

    summary = corpus.scan(counted())
    fraction = plan.data.validation_fraction
    if not summary.num_documents:
        cap = plan.data.max_bytes
        reason = "" if cap is None else f" within data.max_bytes={cap}"
        raise ValueError(
            f"data.sources: no usable text in {len(plan.files)} files{reason}; give files that are not empty"
            + ("" if cap is None else ", or raise the limit")
        )
    if fraction and summary.num_documents < 2:
        raise ValueError(
            f"data.validation_fraction={fraction}: the corpus is a single document of {summary.num_bytes} "
            "bytes, too short to hold a part of it out; give more text, or set it to 0"
        )
    return summary


def _tokenizer(plan: _Plan, summary: CorpusSummary, report: Progress) -> Tokenizer:
    path = plan.tokenizer_path
    if plan.tokenizer.kind == "file":
        return bpe.load_tokenizer(path)
    if path.is_file():
        try:
            return bpe.load_tokenizer(path)
        except ValueError as error:
            _log.warning("the cached tokenizer is trained again: %s", error)
    path.parent.mkdir(parents=True, exist_ok=True)
    keep = min(1.0, _TRAINING_BYTES / max(1, summary.num_bytes))

    def texts() -> Iterator[str]:
        done = 0
        for document in corpus.read_documents(plan.files, plan.data):
            done += len(document.text)
            report("training the tokenizer", min(0.99, done / summary.num_bytes))
            # From the other end of the share, so that sampling does not favour the held-out documents.
            if 1 - corpus.share_of(document.id) <= keep:
                yield document.text

    # Another corpus split may train the same tokenizer at once: each writes its own file, the rename decides.
    tokenizer = bpe.train_bpe(texts(), plan.tokenizer.vocab_size)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    tokenizer.save(str(partial))
    partial.replace(path)
    report("training the tokenizer", 1.0)
    return tokenizer


def _encode(
    plan: _Plan,
    tokenizer: Tokenizer,
    summary: CorpusSummary,
    folder: Path,
    report: Progress,
    shard_tokens: int,
) -> None:
    fraction = plan.data.validation_fraction
    vocab_size, end_of_text_id = bpe.vocab_size(tokenizer), bpe.end_of_text_id(tokenizer)
    writers = [
        SplitWriter(
            folder / split, vocab_size=vocab_size, end_of_text_id=end_of_text_id, shard_tokens=shard_tokens
        )
        for split in (("train", "validation") if fraction else ("train",))
    ]
    # The lowest document is always held out and the second never, so that no split of a small corpus is empty.
    lowest = summary.first_ids[0]
    second = summary.first_ids[1] if summary.num_documents == 2 else None
    last_split = -1
    done = 0
    for batch in _batches(corpus.read_documents(plan.files, plan.data)):
        encoded = bpe.encode(
            tokenizer, [document.text for document in batch], np.dtype(dtype_for(vocab_size))
        )
        for document, tokens in zip(batch, encoded, strict=True):
            held_out = document.id == lowest or (
                document.id != second and corpus.share_of(document.id) < fraction
            )
            split = 1 if fraction and held_out else 0
            writers[split].append(tokens, continues=document.continues and split == last_split)
            last_split = split
            done += len(document.text.encode())
        report("encoding the corpus", min(0.99, done / summary.num_bytes))
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
