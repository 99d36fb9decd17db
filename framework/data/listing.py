"""Which files a corpus has, and what they are called.

A folder is read with all that is below it; links are followed, and what links reach again is read once.
"""

from __future__ import annotations

import bisect
import errno
import logging
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from counterflow.framework.data.config import DataConfig
from counterflow.framework.data.files import (
    TEXT_SUFFIXES,
    SourceFile,
    Stamp,
    bad_link,
    require_regular,
    shown,
    stamp_of,
    unreadable,
)

# Directories of the standard library that hold packages of others, or test data rather than prose and code.
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A file below a source. `parts`: the path below it; `real`: the path without links."""

    parts: tuple[str, ...]
    path: Path
    real: str
    stamp: Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """A link to a folder. `inside`: the real folder that it is in; `target`: the real folder that it leads to."""

    parts: tuple[str, ...]
    path: str
    inside: str
    target: str


def list_files(config: DataConfig) -> tuple[SourceFile, ...]:
    """The files of the corpus, in reading order.

    A file is called by its path below its source, with the source's own name before it, so a name survives a move of
    the folder. Where that is one name for two files, as many folders of the path as given go before as tell them
    apart. A file that several sources reach has the name that the first one gives it.

    Raises ValueError: where a source does not exist, cannot be read or holds no text file; where a link leads
        nowhere or in a circle; where a file of the corpus is not a regular file.
    """
    if not config.sources:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = _Folder(root, (".py",), skipped=_SKIPPED, builtin=True).files()
        return tuple(
            SourceFile(name="/".join(("python", *file.parts)), path=file.path, stamp=file.stamp, builtin=True)
            for file in found
        )
    given = [_absolute(source) for source in config.sources]
    files = [_files_of(path) for path in given]
    names = _names(given, files)
    repeated = sum(map(len, files)) - len(names)
    if repeated:
        _log.warning(
            "data.sources: %d files are reached by more than one source and are read as often", repeated
        )
    return tuple(
        SourceFile(name=names[file.real], path=file.path, stamp=file.stamp) for part in files for file in part
    )


def _absolute(source: str) -> Path:
    if not source.strip() or "\0" in source:
        raise ValueError(
            f"data.sources: {source!r} is not a path: name a file or a folder; '.' is {Path.cwd()}"
        )
    try:
        return Path(os.path.abspath(Path(source).expanduser()))
    except RuntimeError as error:  # the home of a user that there is not
        raise ValueError(f"data.sources: {shown(source)}: {error}; give the whole path") from None


def _files_of(path: Path) -> tuple[_Found, ...]:
    try:
        status = path.stat()
    except OSError as error:
        if os.path.islink(path):
            raise bad_link(path, error) from None
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise ValueError(
                f"data.sources: {shown(path)} does not exist: a source is a file or a folder; relative paths start "
                f"at {Path.cwd()}"
            ) from None
        raise unreadable(path, error) from None
    if not stat.S_ISDIR(status.st_mode):
        require_regular(path, status)
        return (_Found(parts=(), path=path, real=os.path.realpath(path), stamp=stamp_of(status)),)
    found = _Folder(path, (*TEXT_SUFFIXES, ".jsonl")).files()
    if not found:
        raise ValueError(
            f"data.sources: no text in {shown(path)}: a folder is searched for "
            f"{', '.join(TEXT_SUFFIXES)} and .jsonl; name the files themselves or another folder"
        )
    return found


def _names(given: Sequence[Path], files: Sequence[Sequence[_Found]]) -> dict[str, str]:
    """The name of each real file: with the least folders before it that tell all files apart."""
    depth = [1] * len(given)
    while True:
        names: dict[str, str] = {}
        owners: dict[str, tuple[str, int]] = {}
        clashing: set[int] = set()
        for source, (path, part) in enumerate(zip(given, files, strict=True)):
            # The root has no name, so that what is below it is called by its path alone.
            before = tuple(each for each in path.parts if each != path.anchor)[-depth[source] :]
            for file in part:
                if file.real in names:
                    continue
                name = "/".join((*before, *file.parts))
                real, owner = owners.setdefault(name, (file.real, source))
                if real != file.real:
                    clashing |= {source, owner}
                names[file.real] = name
        if not clashing:
            return names
        for source in clashing:
            depth[source] += 1
        assert max(depth) <= max(len(path.parts) for path in given) + 1, "two files have one path"


class _Folder:
    """What is below one source.

    The folders themselves come first and then, in turn, what links lead to, so that a file keeps the name of the
    place where it is; every real folder and file is taken once. builtin: links to folders are not followed and
    what is not a regular file is passed over, since the corpus is the Python's own.
    """

    def __init__(
        self,
        root: Path,
        suffixes: tuple[str, ...],
        *,
        skipped: frozenset[str] = frozenset(),
        builtin: bool = False,
    ) -> None:
        self._root = root
        self._suffixes = suffixes
        self._skipped = skipped
        self._builtin = builtin
        self._found: list[_Found] = []
        self._linked: list[_Found] = []
        self._links: list[_Link] = []
        self._dangling: list[str] = []
        self._folders: set[str] = set()

    def files(self) -> tuple[_Found, ...]:
        """The files in reading order: those of a folder by name, then its folders by name."""
        again: list[str] = []
        self._walk((), str(self._root), os.path.realpath(self._root))
        done = 0
        while done < len(self._links):
            link = self._links[done]
            done += 1
            if link.target in self._folders:
                again.append(link.path)
            else:
                self._walk(link.parts, link.path, link.target)
        _refuse_loops(self._links)
        reals = {file.real for file in self._found}
        for file in self._linked:
            if file.real in reals:
                again.append(str(file.path))
            else:
                reals.add(file.real)
                self._found.append(file)
        self._say("lead to text that is read already, and it is read once", again)
        self._say("lead nowhere, and are passed over", self._dangling)
        return tuple(sorted(self._found, key=_reading_order))

    def _say(self, what: str, links: Sequence[str]) -> None:
        if links and not self._builtin:
            _log.warning(
                "data.sources: %d links below %s %s; the first is %s",
                len(links),
                shown(self._root),
                what,
                shown(links[0]),
            )

    def _walk(self, parts: tuple[str, ...], path: str, real: str) -> None:
        waiting = [(parts, path, real)]
        while waiting:
            parts, path, real = waiting.pop()
            if real in self._folders:  # a link led to it before
                continue
            self._folders.add(real)
            try:
                with os.scandir(path) as entries:
                    listed = sorted(entries, key=lambda entry: entry.name)
            except OSError as error:
                raise unreadable(path, error) from None
            for entry in listed:
                if entry.name.startswith("."):
                    continue
                below = (*parts, entry.name)
                if entry.is_symlink():
                    self._take_link(below, entry, real)
                elif entry.is_dir(follow_symlinks=False):
                    if entry.name not in self._skipped:
                        waiting.append((below, entry.path, f"{real.rstrip('/')}/{entry.name}"))
                elif entry.name.endswith(self._suffixes):
                    self._take_file(below, entry, f"{real.rstrip('/')}/{entry.name}", self._found)

    def _take_link(self, parts: tuple[str, ...], entry: os.DirEntry[str], inside: str) -> None:
        is_text = entry.name.endswith(self._suffixes)
        try:
            status = os.stat(entry.path)
        except OSError as error:
            if self._builtin:
                return
            if is_text or error.errno == errno.ELOOP:
                raise bad_link(Path(entry.path), error) from None
            self._dangling.append(entry.path)
            return
        target = os.path.realpath(entry.path)
        if stat.S_ISDIR(status.st_mode):
            if not self._builtin:
                self._links.append(_Link(parts=parts, path=entry.path, inside=inside, target=target))
        elif is_text:
            self._take_file(parts, entry, target, self._found if self._builtin else self._linked)

    def _take_file(
        self, parts: tuple[str, ...], entry: os.DirEntry[str], real: str, into: list[_Found]
    ) -> None:
        path = Path(entry.path)
        try:
            status = entry.stat()
        except OSError as error:
            raise unreadable(path, error) from None
        if self._builtin and not stat.S_ISREG(status.st_mode):
            return
        require_regular(path, status)
        into.append(_Found(parts=parts, path=path, real=real, stamp=stamp_of(status)))


def _reading_order(file: _Found) -> tuple[tuple[bool, str], ...]:
    *folders, name = file.parts
    return (*((True, folder) for folder in folders), (False, name))


def _refuse_loops(links: Sequence[_Link]) -> None:
    """Raises ValueError: where following links leads back to one of them."""
    order = sorted(range(len(links)), key=lambda each: links[each].inside + "/")
    inside = [links[each].inside + "/" for each in order]

    def below(link: _Link) -> Iterator[int]:
        """The links that are in the folder that `link` leads to, at any depth."""
        prefix = link.target.rstrip("/") + "/"
        for position in range(bisect.bisect_left(inside, prefix), len(inside)):
            if not inside[position].startswith(prefix):
                return
            yield order[position]

    done: set[int] = set()
    for start in range(len(links)):
        path = {start: below(links[start])}  # the links that were followed to come here
        while path:
            current = next(reversed(path))
            following = next(path[current], None)
            if following is None:
                done.add(current)
                del path[current]
            elif following in path:
                link = links[current]
                raise ValueError(
                    f"data.sources: the link {shown(link.path)} leads to {shown(link.target)} and so back to where it "
                    "is: links that go in a circle have no end; remove it, or name the folders below it instead"
                )
            elif following not in done:
                path[following] = below(links[following])
