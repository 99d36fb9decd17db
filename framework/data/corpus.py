"""The documents of a corpus: the running Python's own sources and manual, or any text and JSONL.

Documents are read in a fixed order and have stable names, so a corpus gives the same tokens, the same held-out
split and the same sample order wherever it is read. Text is the same whatever file it comes from: a byte order mark
at its start is left out, lines end with a line feed, and half of a surrogate pair is U+FFFD.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from counterflow.framework.data.config import DataConfig
from counterflow.framework.data.files import TEXT_SUFFIXES, SourceFile, open_file, shown, unreadable

# A longer text is read in pieces of about this many characters: memory stays bounded and a corpus of one
# large file can still be split into train and validation.
PIECE_CHARS = 1 << 16
# A record of JSONL is held in memory as a whole.
MAX_LINE_BYTES = 1 << 28
_MARK = "\ufeff"
_SURROGATE = re.compile("[\ud800-\udfff]")
_SHOWN_FIELDS = 8
# How files begin that are often given for text, and what to do about it.
_NO_TEXT = (
    (b"\x1f\x8b", "compressed by gzip: decompress it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: decompress it"),
    (b"\xfd7zXZ\x00", "compressed by xz: decompress it"),
    (b"BZh91AY&SY", "compressed by bzip2: decompress it"),
    (b"PK\x03\x04", "a zip archive: unpack it"),
    (b"PAR1\x15", "a Parquet file: write its text as JSONL"),
    (b"\xff\xfe\x00\x00", "UTF-32: convert it to UTF-8"),
    (b"\xff\xfe", "UTF-16: convert it to UTF-8"),
    (b"\xfe\xff", "UTF-16: convert it to UTF-8"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A piece of text. `id` is stable; `continues`: it goes on directly after the document yielded before;
    `num_replaced`: characters of the whole text that were halves of a surrogate pair, told with its first piece."""

    id: str
    text: str
    continues: bool = False
    num_replaced: int = 0


def read_documents(files: Iterable[SourceFile], config: DataConfig) -> Iterator[Document]:
    """The documents of `files`, in order, up to `config.max_bytes` of UTF-8. Raises what `read_file` does."""
    left = config.max_bytes
    for file in files:
        reading = read_file(file, config, left)
        while True:
            try:
                document = next(reading)
            except StopIteration as end:
                if end.value:
                    return
                break
            if left is not None:
                left -= len(document.text.encode())
            yield document


def read_file(
    file: SourceFile, config: DataConfig, max_bytes: int | None = None
) -> Generator[Document, None, bool]:
    """The documents of one file, up to `max_bytes` of UTF-8; returns whether that left some out.

    A text file is one document, a JSONL line is one document; either is cut at line ends when it is long.
    Raises ValueError: naming the file, and the line in JSONL, for what is not UTF-8 text or cannot be read, a line
        that is not JSON, or a record without text in `config.text_field`.
    """
    left = max_bytes
    try:
        for document in _documents(file, config):
            if left is not None:
                left -= len(document.text.encode())
                if left < 0:
                    return True
            yield document
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.sources: {shown(file.path)} is not UTF-8 text (byte 0x{error.object[error.start]:02x}: "
            f"{error.reason}): convert it, or leave it out"
        ) from None
    except OSError as error:
        raise unreadable(file.path, error) from None
    return False


def share_of(document_id: str) -> float:
    """A number in [0, 1) that depends on the id alone: documents below a share belong to the held-out split."""
    # A file's name may have bytes that are no text.
    digest = hashlib.sha256(document_id.encode(errors="surrogateescape"))
    return int.from_bytes(digest.digest()[:6], "big") / 2**48


def _documents(file: SourceFile, config: DataConfig) -> Iterator[Document]:
    if file.builtin:
        yield from _builtin_documents(file)
        return
    with open_file(file.path) as stream:
        start = stream.peek(16) if isinstance(stream, io.BufferedReader) else b""
        for magic, what in _NO_TEXT:
            if start.startswith(magic):
                raise ValueError(f"data.sources: {shown(file.path)} is {what}, or leave it out")
        if _is_jsonl(file.path):
            yield from _jsonl_documents(file, stream, config.text_field)
            return
        for document in _pieces(file.name, io.TextIOWrapper(stream, encoding="utf-8-sig")):
            if "\0" in document.text:
                raise ValueError(
                    f"data.sources: {shown(file.path)} has bytes of value 0: it is binary data or UTF-16 rather than "
                    "UTF-8 text; convert it, or leave it out"
                )
            yield document


def _is_jsonl(path: Path) -> bool:
    """By the name of the file, and by that of what a link without such a name leads to."""
    names = (path.name, os.path.basename(os.path.realpath(path)))
    suffixes = (Path(name.lower()).suffix for name in names)
    return next((suffix for suffix in suffixes if suffix in (*TEXT_SUFFIXES, ".jsonl")), "") == ".jsonl"


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


def _jsonl_documents(file: SourceFile, stream: BinaryIO, text_field: str) -> Iterator[Document]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{shown(file.path)}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"data.sources: {where} is longer than {MAX_LINE_BYTES} bytes: a .jsonl file has one JSON object a "
                "line; write longer texts as files of their own"
            )
        text, num_replaced = _without_surrogates(_text_of(line, where, text_field))
        for document in _pieces(f"{file.name}:{number}", io.StringIO(text.removeprefix(_MARK), newline=None)):
            yield document if document.continues else _counted(document, num_replaced)


def _counted(document: Document, num_replaced: int) -> Document:
    return Document(id=document.id, text=document.text, num_replaced=num_replaced)


def _text_of(line: bytes, where: str, text_field: str) -> str:
    """The text of one line of JSONL; none for a blank line."""
    try:
        written = line.decode("utf-8-sig")
        if not written.strip():
            return ""
        # Python does not read integers of any length, and none is needed here.
        record = json.loads(written, parse_int=float)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.sources: {where} is not UTF-8 text (byte 0x{error.object[error.start]:02x}: {error.reason}): "
            "convert it, or leave it out"
        ) from None
    except ValueError as error:
        raise ValueError(f"data.sources: {where} is not JSON ({error}): {_why_no_json(line)}") from None
    except RecursionError:
        raise ValueError(
            f"data.sources: {where} is nested too deeply to be read: a .jsonl file has one JSON object a line, with "
            f"its text in the field '{text_field}'"
        ) from None
    if not isinstance(record, Mapping):
        raise ValueError(
            f"data.sources: {where} is {_kind_of(record)}: a .jsonl file has one JSON object a line, with its text in "
            f"the field '{text_field}'"
        )
    fields = cast("Mapping[str, object]", record)
    text = fields.get(text_field)
    if isinstance(text, str):
        return text
    if text_field in fields:
        raise ValueError(
            f"data.sources: {where} has {_kind_of(text)} in field '{text_field}', where its text should be; set "
            "data.text_field to the field that holds the text, or leave the line out"
        )
    names = [shown(name.encode(errors="replace").decode()) for name in fields]
    found = ", ".join(names[:_SHOWN_FIELDS] + ["..."] * (len(names) > _SHOWN_FIELDS)) or "no fields"
    raise ValueError(
        f"data.sources: {where} has no text in field '{text_field}' (found: {found}); "
        "set data.text_field to the field that holds the text"
    )


def _why_no_json(line: bytes) -> str:
    if b"\0" in line:
        return "it has bytes of value 0, so it is binary data or UTF-16; convert it to UTF-8, or leave it out"
    if b"\r" in line.strip():
        return "it has carriage returns within; end the lines with line feeds"
    return "a .jsonl file has one JSON object a line"


def _kind_of(value: object) -> str:
    """What JSON calls a value that is no text where text should be."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = ((str, "a text"), (float, "a number"), (list, "a list"), (Mapping, "an object"))
    return next(kind for cls, kind in kinds if isinstance(value, cls))


def _without_surrogates(text: str) -> tuple[str, int]:
    """`text` with U+FFFD for each half of a surrogate pair, which JSON can write and UTF-8 cannot, and their number."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.subn("\ufffd", text)
    return text, 0


def _pieces(name: str, stream: io.TextIOBase) -> Iterator[Document]:
    index = 0
    while text := stream.read(PIECE_CHARS):
        text += stream.readline(PIECE_CHARS)
        if index or text.strip():
            yield Document(id=f"{name}#{index}" if index else name, text=text, continues=index > 0)
            index += 1
