"""One file of a corpus: what it is known by, opening it without ever waiting, and what to say where that fails.

Whatever is not a readable regular file is refused by its path before it is opened, because opening a pipe would wait
for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
_SHOWN_CHARS = 300
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


class Stamp(NamedTuple):
    """What changes when a file is written or replaced. Only `changed_ns` cannot be set back by a program."""

    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of the corpus. `name` is its id, see `listing`; builtin: it belongs to the running Python."""

    name: str
    path: Path
    stamp: Stamp
    builtin: bool = False


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes; what turned into a pipe since it was listed does not hold us up.

    Raises ValueError: where it is no regular file, or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        require_regular(path, os.fstat(descriptor))
    except ValueError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def shown(path: Path | str) -> str:
    """`path` as a message can carry it: bytes that are no text are escaped, a very long path is cut in the middle."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    if len(text) <= _SHOWN_CHARS:
        return text
    return f"{text[: _SHOWN_CHARS // 2]}...{text[-_SHOWN_CHARS // 2 :]}"


def unreadable(path: Path | str, error: OSError) -> ValueError:
    """What to raise for a file or folder of the corpus that the system does not let us read."""
    reason = error.strerror or str(error)
    return ValueError(
        f"data.sources: {shown(path)} cannot be read ({reason}): make it readable, or leave it out"
    )


def bad_link(path: Path, error: OSError) -> ValueError:
    if error.errno == errno.ELOOP:
        return ValueError(
            f"data.sources: the link {shown(path)} leads to itself: links that go in a circle have no end; remove it"
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return ValueError(
            f"data.sources: the link {shown(path)} leads to {shown(os.readlink(path))}, which does not exist; "
            "mend the link, or leave it out"
        )
    return unreadable(path, error)


def require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = next((kind for check, kind in _KINDS if check(status.st_mode)), "no regular file")
    raise ValueError(
        f"data.sources: {shown(path)} is {kind}: text is read from regular files, several times; write it to a file, "
        "or leave it out"
    )
