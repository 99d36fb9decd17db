"""What a corpus is: a hash of its documents, kept for files that have not changed since they were read.

The identity of a corpus is that of its content, so tokens are never taken from other text, and equal text is tokenized
once wherever it lies. To know it every file is read once; what was found is kept with the file's inode, size and
times, and taken from there as long as these are the same. Where any of them differs the file is read again, and only
another content makes another corpus.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from counterflow.framework.data import sealed
from counterflow.framework.data.config import DataConfig
from counterflow.framework.data.corpus import PIECE_CHARS, Document, read_file, share_of
from counterflow.framework.data.files import SourceFile, Stamp, shown, stamp_of

# Counts how documents are cut and hashed.
_VERSION = 3
# Times of files go by the kernel's clock, which stands still for up to 10 ms, or by whole seconds on some file systems.
_TICK_NS = 20_000_000
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FileScan:
    """What one file holds.

    digest: a hash of its documents. lowest, highest: the ids with the smallest and largest `share_of`; None where
    there is no document. num_replaced: characters that UTF-8 does not have; first_replaced: the document of the first.
    limit: the bytes of text after which reading stopped; None where the whole file was read.
    """

    digest: str
    num_documents: int
    num_bytes: int
    lowest: str | None
    highest: str | None
    num_replaced: int = 0
    first_replaced: str | None = None
    limit: int | None = None

    def holds_for(self, limit: int | None) -> bool:
        """Whether reading up to `limit` bytes gives the same."""
        if self.limit is not None:
            return self.limit == limit
        return limit is None or self.num_bytes <= limit


_FIELDS = tuple(each.name for each in dataclasses.fields(FileScan))
_values = operator.attrgetter(*_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusScan:
    """What all files hold, in order and as far as they are read.

    digest: the identity of the corpus: of the names and texts of its documents. lowest: the document that is the
    first to be held out; highest: the last. num_replaced, first_replaced: as of a file.
    """

    files: tuple[FileScan, ...]
    digest: str = field(init=False)
    num_documents: int = field(init=False)
    num_bytes: int = field(init=False)
    lowest: str | None = field(init=False)
    highest: str | None = field(init=False)
    num_replaced: int = field(init=False)
    first_replaced: str | None = field(init=False)

    def __post_init__(self) -> None:
        digests = "".join(file.digest for file in self.files)
        lows = [file.lowest for file in self.files if file.lowest is not None]
        highs = [file.highest for file in self.files if file.highest is not None]
        values = {
            "digest": hashlib.sha256(f"{_VERSION}\0{PIECE_CHARS}\0{digests}".encode()).hexdigest(),
            "num_documents": sum(file.num_documents for file in self.files),
            "num_bytes": sum(file.num_bytes for file in self.files),
            "lowest": min(lows, key=_rank, default=None),
            "highest": max(highs, key=_rank, default=None),
            "num_replaced": sum(file.num_replaced for file in self.files),
            "first_replaced": next(filter(None, (file.first_replaced for file in self.files)), None),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


class ScanRecord:
    """What was found in the files of one corpus, in a file of its own. A damaged one is as good as none."""

    def __init__(self, cache_dir: Path, config: DataConfig) -> None:
        sources = "\0".join(str(Path(source).expanduser().absolute()) for source in config.sources)
        key = hashlib.sha256(
            f"{sources}\0\0{config.text_field}\0{config.max_bytes}".encode(errors="surrogateescape")
        )
        self._path = cache_dir / "corpora" / f"{key.hexdigest()[:16]}.json"
        self._known: dict[str, tuple[Stamp, FileScan]] = {}
        try:
            record = sealed.opened(self._path.read_bytes())
            if (record["version"], record["piece_chars"]) == (_VERSION, PIECE_CHARS):
                self._known = {
                    path: (Stamp(*stamp), FileScan(**dict(zip(_FIELDS, values, strict=True))))
                    for path, stamp, values in record["files"]
                }
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def get(self, file: SourceFile, limit: int | None) -> FileScan | None:
        """What reading `file` up to `limit` would give, or None where it has to be read."""
        stamp, scan = self._known.get(_place(file), (None, None))
        if scan is None or stamp != file.stamp or not scan.holds_for(limit):
            return None
        return scan

    def write(self, found: Mapping[str, tuple[Stamp, FileScan]]) -> None:
        """Keep what was found instead of what was known."""
        record = {
            "version": _VERSION,
            "piece_chars": PIECE_CHARS,
            "files": [(path, stamp, _values(scan)) for path, (stamp, scan) in found.items()],
        }
        sealed.write_whole(self._path, sealed.seal(record))

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)


def recall(files: Iterable[SourceFile], config: DataConfig, record: ScanRecord) -> CorpusScan | None:
    """The scan of a corpus of which no file has changed, without reading any; else None."""
    found: list[FileScan] = []
    left = config.max_bytes
    for file in files:
        if (scan := record.get(file, left)) is None:
            return None
        found.append(scan)
        if scan.limit is not None:
            break
        if left is not None:
            left -= scan.num_bytes
    return CorpusScan(files=tuple(found))


def scan_corpus(
    files: Iterable[SourceFile],
    config: DataConfig,
    record: ScanRecord,
    seen: Callable[[SourceFile, int], None] = lambda file, num_chars: None,
) -> CorpusScan:
    """Read the files that have changed since `record` was written, and write it anew.

    seen: is told how many characters of a file have been read, a document at a time.
    Raises ValueError: what `read_file` does.
    """
    found: list[FileScan] = []
    kept: dict[str, tuple[Stamp, FileScan]] = {}
    left = config.max_bytes
    for file in files:
        scan = record.get(file, left)
        settled = scan is not None
        if scan is None:
            settled = _wait_until_settled(file.stamp)
            scan = _scan_file(file, config, left, seen)
            settled = settled and _still(file)
        if settled:
            kept[_place(file)] = (file.stamp, scan)
        found.append(scan)
        if scan.limit is not None:
            break
        if left is not None:
            left -= scan.num_bytes
    record.write(kept)
    return CorpusScan(files=tuple(found))


def read_again(
    files: Iterable[SourceFile], config: DataConfig, scan: CorpusScan, record: ScanRecord
) -> Iterator[Document]:
    """The documents that `scan` counted.

    Raises ValueError: naming a file that holds other text than it did then.
    """
    for file, expected in zip(files, scan.files, strict=False):
        hashing = _Hashing()
        for document in read_file(file, config, expected.limit):
            hashing.add(document)
            yield document
        if hashing.hexdigest() != expected.digest:
            # Times of files cannot be trusted here.
            record.forget()
            raise ValueError(
                f"data.sources: {shown(file.path)} changed while it was read: a corpus is read several times and must "
                "stay as it is; start again when nothing writes to it"
            )


class _Hashing:
    """A hash of documents in their order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, document: Document) -> int:
        """Take `document` in and return its bytes of UTF-8."""
        text = document.text.encode()
        head = f"{document.id}\0{document.continues:d}\0{len(text)}\0"
        self._hash.update(head.encode(errors="surrogateescape"))
        self._hash.update(text)
        return len(text)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _scan_file(
    file: SourceFile, config: DataConfig, limit: int | None, seen: Callable[[SourceFile, int], None]
) -> FileScan:
    hashing = _Hashing()
    num_documents = num_bytes = num_replaced = 0
    first_replaced: str | None = None
    lowest: tuple[float, str] | None = None
    highest: tuple[float, str] | None = None
    reading = read_file(file, config, limit)
    while True:
        try:
            document = next(reading)
        except StopIteration as end:
            is_cut = end.value
            break
        rank = _rank(document.id)
        lowest = rank if lowest is None else min(lowest, rank)
        highest = rank if highest is None else max(highest, rank)
        num_documents += 1
        num_bytes += hashing.add(document)
        if document.num_replaced:
            num_replaced += document.num_replaced
            first_replaced = first_replaced or document.id
        seen(file, len(document.text))
    return FileScan(
        digest=hashing.hexdigest(),
        num_documents=num_documents,
        num_bytes=num_bytes,
        lowest=None if lowest is None else lowest[1],
        highest=None if highest is None else highest[1],
        num_replaced=num_replaced,
        first_replaced=first_replaced,
        limit=limit if is_cut else None,
    )


def _wait_until_settled(stamp: Stamp) -> bool:
    """Wait until a later change of the file would give it another time; False where its clock is ahead of ours."""
    tick = 2 * _SECOND_NS if stamp.changed_ns % _SECOND_NS == 0 else _TICK_NS
    age = time.time_ns() - stamp.changed_ns
    if 0 <= age < tick:
        time.sleep((tick - age) / _SECOND_NS)
    return age >= 0


def _still(file: SourceFile) -> bool:
    try:
        return stamp_of(file.path.stat()) == file.stamp
    except OSError:
        return False


def _rank(document_id: str) -> tuple[float, str]:
    return share_of(document_id), document_id


def _place(file: SourceFile) -> str:
    """What a scan is kept under: the ids of the documents have the name in them, so it belongs to it."""
    return f"{file.path}\0{file.name}"
