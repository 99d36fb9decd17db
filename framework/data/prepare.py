"""From a corpus to token shards, once, before any rank starts.

The work runs in a child process: the tokenizer library starts threads, and a process that has them must not
fork ranks afterwards. Results are cached under a key of all that they depend on, the text itself rather than its
place and time (see `identity`); each appears by one rename, whole or not at all, and a file lock lets two launchers
prepare at once.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from counterflow.framework.data import tokenizer as bpe
from counterflow.framework.data.child import Progress, run_in_child
from counterflow.framework.data.config import DataConfig, TokenizerConfig
from counterflow.framework.data.corpus import Document
from counterflow.framework.data.encoding import encode_corpus, trained_tokenizer
from counterflow.framework.data.files import SourceFile, shown
from counterflow.framework.data.identity import CorpusScan, ScanRecord, read_again, recall, scan_corpus
from counterflow.framework.data.listing import list_files
from counterflow.framework.data.shards import (
    FORMAT_VERSION,
    SHARD_TOKENS,
    SplitIndex,
    SplitWriter,
    check_hashes,
    read_index,
)

_log = logging.getLogger(__name__)
_CHECKED_BYTES = 1 << 28  # a cached split up to this size is hashed at every start, a larger one when written


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
    """What is asked for. tokenizer_file: the content of the given tokenizer.json, None where one is trained."""

    data: DataConfig
    tokenizer: TokenizerConfig
    files: tuple[SourceFile, ...]
    cache_dir: Path
    tokenizer_file: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where each result is kept, which follows from what the corpus holds."""

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

    A damaged cache is named in the log and built again; text that was changed or cannot be expressed is counted there.
    Raises ValueError: for a source that cannot be read (see `files` and `corpus`), a tokenizer that cannot be used,
    or a split with fewer samples than one batch of `global_batch_size`.
    Raises RuntimeError: where the preparing process died.
    """
    plan = _plan(data, tokenizer)
    scan = recall(plan.files, data, ScanRecord(plan.cache_dir, data))
    splits = None if scan is None else _cached(plan, _places(plan, scan))
    if scan is None or splits is None:
        scan = run_in_child(lambda report: _build(plan, report, shard_tokens), progress)
        splits = _cached(plan, _places(plan, scan))
    if splits is None:
        raise RuntimeError(
            f"the tokens below {plan.cache_dir}, or the tokenizer, changed right after they were made: start again "
            "when nothing else writes there"
        )
    _warn(plan, scan, splits)
    prepared = _prepared(_places(plan, scan), splits)
    _check_enough(data, prepared, global_batch_size)
    return prepared


def _plan(data: DataConfig, tokenizer: TokenizerConfig) -> _Plan:
    content: bytes | None = None
    if tokenizer.kind == "file":
        content = bpe.read_tokenizer_file(_given_tokenizer(tokenizer))
    return _Plan(
        data=data,
        tokenizer=tokenizer,
        files=list_files(data),
        cache_dir=Path(data.cache_dir or "~/.cache/counterflow").expanduser().absolute(),
        tokenizer_file=content,
    )


def _given_tokenizer(tokenizer: TokenizerConfig) -> Path:
    assert tokenizer.path is not None
    return Path(tokenizer.path).expanduser().absolute()


def _places(plan: _Plan, scan: CorpusScan) -> _Places:
    if plan.tokenizer_file is not None:
        tokenizer_path = _given_tokenizer(plan.tokenizer)
        tokenizer_key = hashlib.sha256(plan.tokenizer_file).hexdigest()
    else:
        size = plan.tokenizer.vocab_size
        tokenizer_key = hashlib.sha256(f"bpe\0{scan.digest}\0{size}".encode()).hexdigest()
        tokenizer_path = plan.cache_dir / "tokenizers" / f"bpe-{size}-{tokenizer_key[:16]}.json"
    key = hashlib.sha256(
        f"{FORMAT_VERSION}\0{scan.digest}\0{tokenizer_key}\0{plan.data.validation_fraction}".encode()
    ).hexdigest()
    return _Places(tokenizer_path=tokenizer_path, tokens_dir=plan.cache_dir / "tokens" / key[:16])


def _splits(plan: _Plan) -> tuple[str, ...]:
    return ("train", "validation") if plan.data.validation_fraction else ("train",)


def _cached(plan: _Plan, places: _Places, *, report: bool = True) -> tuple[SplitIndex, ...] | None:
    """The indices of the splits, or None where they are not there or damaged; damage is logged unless told not to."""
    if not (places.tokens_dir.is_dir() and places.tokenizer_path.is_file()):
        return None
    indices: list[SplitIndex] = []
    try:
        tokenizer_sha256 = hashlib.sha256(bpe.read_tokenizer_file(places.tokenizer_path)).hexdigest()
        for split in _splits(plan):
            folder = places.tokens_dir / split
            indices.append(read_index(folder))
            if indices[-1].num_bytes <= _CHECKED_BYTES:
                check_hashes(folder, indices[-1])
            if indices[-1].tokenizer_sha256 != tokenizer_sha256:
                raise ValueError(f"{folder} was made by another tokenizer than {places.tokenizer_path}")
    except ValueError as error:
        if report:
            _log.warning("the prepared tokens are built again: %s", error)
        return None
    return tuple(indices)


def _prepared(places: _Places, splits: tuple[SplitIndex, ...]) -> PreparedData:
    train = splits[0]
    return PreparedData(
        train=places.tokens_dir / "train",
        validation=places.tokens_dir / "validation" if len(splits) > 1 else None,
        tokenizer_path=places.tokenizer_path,
        vocab_size=train.vocab_size,
        end_of_text_id=train.end_of_text_id,
        num_train_tokens=train.num_tokens,
        num_validation_tokens=sum(index.num_tokens for index in splits[1:]),
        content_hash=hashlib.sha256("".join(index.content_hash for index in splits).encode()).hexdigest(),
    )


def _warn(plan: _Plan, scan: CorpusScan, splits: tuple[SplitIndex, ...]) -> None:
    """Say what of the text does not reach the model."""
    if scan.num_replaced:
        _log.warning(
            "data.sources: halves of surrogate pairs, which are no text, are read as U+FFFD: %d, the first in %s",
            scan.num_replaced,
            shown(scan.first_replaced or ""),
        )
    num_tokens = sum(index.num_tokens for index in splits) or 1
    num_unknown = sum(index.num_unknown_tokens for index in splits)
    num_dropped = sum(index.num_dropped_characters for index in splits)
    if num_unknown or num_dropped:
        _log.warning(
            "tokenizer.path=%s cannot express all of the text: %.3g %% of the tokens (%d of %d) are its unknown token, "
            "and %d characters are left out; take a tokenizer that works on bytes, or one made for this text",
            plan.tokenizer.path,
            100 * num_unknown / num_tokens,
            num_unknown,
            num_tokens,
            num_dropped,
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


def _build(plan: _Plan, report: Progress, shard_tokens: int) -> CorpusScan:
    try:
        return _build_in(plan, report, shard_tokens)
    except OSError as error:
        raise ValueError(
            f"{error}: data.cache_dir={plan.cache_dir} must be writable and not full; free it, or set "
            "data.cache_dir to another folder"
        ) from None


def _build_in(plan: _Plan, report: Progress, shard_tokens: int) -> CorpusScan:
    record = ScanRecord(plan.cache_dir, plan.data)
    scan = _scan(plan, record, report)
    places = _places(plan, scan)
    places.tokens_dir.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(places.tokens_dir.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process that prepares the same data", 0.0)
        lock.acquire()
    with lock:
        if _cached(plan, places, report=False) is not None:
            return scan

        def documents() -> Iterator[Document]:
            return read_again(plan.files, plan.data, scan, record)

        if places.tokens_dir.exists():
            shutil.rmtree(places.tokens_dir)
        tokenizer, tokenizer_sha256 = _tokenizer(plan, places.tokenizer_path, scan, documents, report)
        building = places.tokens_dir.with_suffix(".building")
        shutil.rmtree(building, ignore_errors=True)
        writers = [
            SplitWriter(
                building / split,
                vocab_size=bpe.vocab_size(tokenizer),
                end_of_text_id=bpe.end_of_text_id(tokenizer),
                shard_tokens=shard_tokens,
                tokenizer_sha256=tokenizer_sha256,
            )
            for split in _splits(plan)
        ]
        try:
            encode_corpus(documents(), tokenizer, scan, plan.data.validation_fraction, writers, report)
            building.rename(places.tokens_dir)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return scan


def _scan(plan: _Plan, record: ScanRecord, report: Progress) -> CorpusScan:
    total = sum(file.stamp.num_bytes for file in plan.files) or 1
    seen = 0

    def count(file: SourceFile, num_chars: int) -> None:
        nonlocal seen
        seen += num_chars
        report("reading the corpus", min(1.0, seen / total))

    scan = scan_corpus(plan.files, plan.data, record, count)
    fraction = plan.data.validation_fraction
    if not scan.num_documents:
        cap = plan.data.max_bytes
        reason = "" if cap is None else f" within data.max_bytes={cap}"
        raise ValueError(
            f"data.sources: no usable text in {len(plan.files)} files, the first being {shown(plan.files[0].path)}"
            f"{reason}; give files that are not empty" + ("" if cap is None else ", or raise the limit")
        )
    if fraction and scan.lowest == scan.highest:
        raise ValueError(
            f"data.validation_fraction={fraction}: the corpus is a single document of {scan.num_bytes} "
            "bytes, too short to hold a part of it out; give more text, or set it to 0"
        )
    return scan


def _tokenizer(
    plan: _Plan, path: Path, scan: CorpusScan, documents: Callable[[], Iterator[Document]], report: Progress
) -> tuple[Tokenizer, str]:
    """The given tokenizer or the corpus's own, and the hash of its file."""
    if plan.tokenizer_file is not None:
        return bpe.parse_tokenizer(plan.tokenizer_file, path), hashlib.sha256(plan.tokenizer_file).hexdigest()
    return trained_tokenizer(path, plan.tokenizer.vocab_size, scan, documents, report)
