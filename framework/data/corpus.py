"""The documents of a corpus: the running Python's own sources and manual, or any text and JSONL.

Documents are read in a fixed order and have stable names, so a corpus gives the same tokens, the same held-out
split and the same sample order wherever it is read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from counterflow.framework.data.config import DataConfig

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
# A longer text is read in pieces of about this many characters: memory stays bounded and a corpus of one
# large file can still be split into train and validation.
PIECE_CHARS = 1 << 16
# Directories of the standard library that hold packages of others, or test data rather than prose and code.
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A piece of text. `id` is stable; `continues`: it goes on directly after the document yielded before."""

    id: str
    text: str
    continues: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of the corpus. `name` is its id: the path below its source, so it survives a move of the folder."""

    name: str
    path: Path
    num_bytes: int
    modified_ns: int
    builtin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSummary:
    """What one pass over the documents finds. `first_ids`: the two ids with the smallest `share_of`."""

    num_documents: int
    num_bytes: int
    first_ids: tuple[str, ...]


def list_files(config: DataConfig) -> tuple[SourceFile, ...]:
    """The files of the corpus, in reading order.

    Raises ValueError: where a source does not exist or holds no text file.
    """
    if not config.sources:
        root = Path(sysconfig.get_paths()["stdlib"])
        return tuple(_walk(root, "python", (".py",), skipped=_SKIPPED, builtin=True))
    files: list[SourceFile] = []
    for source in config.sources:
        path = Path(source).expanduser()
        if path.is_dir():
            found = list(_walk(path, path.resolve().name, (*TEXT_SUFFIXES, ".jsonl")))
            if not found:
                raise ValueError(
                    f"data.sources: no text in {path}: a folder is searched for "
                    f"{', '.join(TEXT_SUFFIXES)} and .jsonl; name the files themselves or another folder"
                )
            files += found
        elif path.is_file():
            files.append(_source_file(path, path.name))
        else:
            raise ValueError(
                f"data.sources: {path} does not exist: a source is a file or a folder; relative paths start "
                f"at {Path.cwd()}"
            )
    return tuple(files)


def fingerprint(files: Iterable[SourceFile], config: DataConfig) -> str:
    """A hash of what `read_documents` would give, from names, sizes and times only, so it costs no reading."""
    digest = hashlib.sha256(f"1\0{config.text_field}\0{config.max_bytes}\0{PIECE_CHARS}".encode())
    for file in files:
        if file.builtin:
            # The standard library belongs to one version; its installation times say nothing.
            entry = f"{file.name}\0{file.num_bytes}\0{platform.python_version()}\0"
        else:
            entry = f"{file.name}\0{file.num_bytes}\0{file.modified_ns}\0"
        digest.update(entry.encode())
    return digest.hexdigest()


def read_documents(files: Iterable[SourceFile], config: DataConfig) -> Iterator[Document]:
    """The documents of `files`, in order, up to `config.max_bytes` of UTF-8.

    A text file is one document, a JSONL line is one document; either is cut at line ends when it is long.
    Raises ValueError: naming file and line, for text that is not UTF-8, a line that is not JSON, or a record
    without text in `config.text_field`.
    """
    left = config.max_bytes
    for document in _all_documents(files, config):
        if left is not None:
            left -= len(document.text.encode())
            if left < 0:
                return
        yield document


def scan(documents: Iterable[Document]) -> CorpusSummary:
    """Count the documents and find those that are first by `share_of`; reads everything once."""
    num_documents = num_bytes = 0
    first: list[tuple[float, str]] = []
    for document in documents:
        num_documents += 1
        num_bytes += len(document.text.encode())
        first = sorted([*first, (share_of(document.id), document.id)])[:2]
    return CorpusSummary(
        num_documents=num_documents, num_bytes=num_bytes, first_ids=tuple(name for _, name in first)
    )


def share_of(document_id: str) -> float:
    """A number in [0, 1) that depends on the id alone: documents below a share belong to the held-out split."""
    return int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:6], "big") / 2**48


def _source_file(path: Path, name: str, *, builtin: bool = False) -> SourceFile:
    stat = path.stat()
    return SourceFile(
        name=name, path=path, num_bytes=stat.st_size, modified_ns=stat.st_mtime_ns, builtin=builtin
    )


def _walk(
    root: Path,
    name: str,
    suffixes: tuple[str, ...],
    *,
    skipped: frozenset[str] = frozenset(),
    builtin: bool = False,
) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if each not in skipped and not each.startswith("."))
        relative = Path(folder).relative_to(root)
        for file_name in sorted(names):
            if file_name.endswith(suffixes) and not file_name.startswith("."):
                file_id = (name / relative / file_name).as_posix()
                yield _source_file(Path(folder) / file_name, file_id, builtin=builtin)


def _all_documents(files: Iterable[SourceFile], config: DataConfig) -> Iterator[Document]:
    for file in files:
        if file.builtin:
            yield from _builtin_documents(file)
        elif file.path.suffix == ".jsonl":
            yield from _jsonl_documents(file, config.text_field)
        else:
            try:
                with file.path.open(encoding="utf-8") as stream:
                    yield from _pieces(file.name, stream)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"data.sources: {file.path} is not UTF-8 text (byte 0x{error.object[error.start]:02x}: "
                    f"{error.reason}): convert it, or leave it out"
                ) from None


def _builtin_documents(file: SourceFile) -> Iterator[Document]:
    if file.name == "python/pydoc_data/topics.py":
        # The manual's text, rather than the escaped literals it is stored in.
        from pydoc_data.topics import topics

        for topic, text in sorted(topics.items()):
            yield from _pieces(f"python/topics/{topic}", io.StringIO(text))
        return
    try:
        text = file.path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    yield from _pieces(file.name, io.StringIO(text))


def _jsonl_documents(file: SourceFile, text_field: str) -> Iterator[Document]:
    with file.path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{file.path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"data.sources: {where} is not JSON ({error}): a .jsonl file has one JSON object a line"
                ) from None
            text = record.get(text_field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                fields = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
                raise ValueError(
                    f"data.sources: {where} has no text in field '{text_field}' (found: {fields}); "
                    "set data.text_field to the field that holds the text"
                )
            yield from _pieces(f"{file.name}:{number}", io.StringIO(text))


def _pieces(name: str, stream: io.TextIOBase) -> Iterator[Document]:
    index = 0
    while text := stream.read(PIECE_CHARS):
        text += stream.readline(PIECE_CHARS)
        if index or text.strip():
            yield Document(id=f"{name}#{index}" if index else name, text=text, continues=index > 0)
            index += 1
