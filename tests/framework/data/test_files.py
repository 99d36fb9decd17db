"""Which files a corpus has, what they are called, and what is refused instead of waited for."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from counterflow.framework.data import files
from counterflow.framework.data.config import DataConfig
from counterflow.framework.data.listing import list_files


def tree(root: Path, texts: Mapping[str, str]) -> None:
    """Files with their text; a text that starts with -> is a link."""
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("->"):
            path.symlink_to(text[2:])
        else:
            path.write_text(text)


def listed(*sources: Path | str) -> list[tuple[str, str]]:
    """(name, text) of each file."""
    return [
        (file.name, file.path.read_text())
        for file in list_files(DataConfig(sources=tuple(map(str, sources))))
    ]


def test_links_are_followed_and_text_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree(tmp_path, {"out/b.txt": "b", "out/deep/c.md": "c", "single": "s"})
    tree(
        tmp_path / "in",
        {
            "a.txt": "a",
            "again.txt": "->a.txt",  # read under its own name
            "folder": "->../out",
            "one.txt": "->../single",
            "part/more": "->../../out/deep",  # reached by `folder` first
            "z": "->part",  # a folder of the source itself
            "gone": "->nowhere",
            ".hidden": "->../out",
        },
    )
    with caplog.at_level(logging.WARNING):
        found = listed(tmp_path / "in")
    assert found == [
        ("in/a.txt", "a"),
        ("in/one.txt", "s"),
        ("in/folder/b.txt", "b"),
        ("in/folder/deep/c.md", "c"),
    ]
    assert "3 links below" in caplog.text
    assert "read once" in caplog.text
    assert "1 links below" in caplog.text
    assert "in/gone" in caplog.text


@pytest.mark.parametrize(
    "texts",
    [
        {"in/self": "->."},
        {"in/a/up": "->../.."},
        {"in/a/b/x": "->../../c", "in/c/d/y": "->../../a"},
        {"in/x": "->../out", "out/y": "->deep", "out/deep/z": "->../../in"},
    ],
    ids=["self", "above", "each_other", "by_another"],
)
@pytest.mark.timeout(20)
def test_a_loop_of_links_is_refused_by_name(tmp_path: Path, texts: Mapping[str, str]) -> None:
    tree(tmp_path, {"in/text.txt": "text", **texts})
    with pytest.raises(ValueError, match=r"the link .*/in.* leads to .*so back to where it is: .*remove it"):
        listed(tmp_path / "in")


@pytest.mark.timeout(20)
def test_many_ways_to_one_folder_are_no_loop(tmp_path: Path) -> None:
    """Two links at each of 40 levels are 2**40 ways."""
    for level in range(40):
        folder = tmp_path / str(level)
        folder.mkdir()
        for name in ("left", "right"):
            (folder / name).symlink_to(tmp_path / str(level + 1))
    (tmp_path / "40").mkdir()
    (tmp_path / "40" / "a.txt").write_text("a")
    assert [text for _, text in listed(tmp_path / "0")] == ["a"]


def test_names_have_the_folders_that_tell_files_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("v1/corpus", "v2/corpus", "v2/other"):
        tree(tmp_path / folder, {"a.txt": folder, "sub/b.txt": folder})
    assert [name for name, _ in listed(tmp_path / "v1" / "corpus")] == ["corpus/a.txt", "corpus/sub/b.txt"]
    sources = [tmp_path / folder for folder in ("v1/corpus", "v2/corpus", "v2/other")]
    names = [name for name, _ in listed(*sources)]
    assert names[::2] == ["v1/corpus/a.txt", "v2/corpus/a.txt", "other/a.txt"]
    # A longer name may be another's short one.
    tree(tmp_path, {"x/v1/corpus/a.txt": "x"})
    names = [name for name, _ in listed(*sources, tmp_path / "x" / "v1")]
    assert len(set(names)) == 7
    assert names[-1] == "x/v1/corpus/a.txt"
    # One file is one name, however often and by whichever way it is reached.
    assert not caplog.records
    names = [name for name, _ in listed(tmp_path / "v1" / "corpus", tmp_path / "v1" / "corpus" / "a.txt")]
    assert names == ["corpus/a.txt", "corpus/sub/b.txt", "corpus/a.txt"]
    assert "1 files are reached by more than one source" in caplog.text


def test_a_name_survives_a_move_and_is_the_one_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path / "first" / "corpus", {"a.txt": "a"})
    before = listed(tmp_path / "first" / "corpus")
    shutil.move(tmp_path / "first", tmp_path / "second")
    assert listed(tmp_path / "second" / "corpus") == before
    monkeypatch.chdir(tmp_path / "second")
    assert listed("corpus") == listed("./corpus/") == listed("../second/corpus") == before
    (tmp_path / "latest").symlink_to(tmp_path / "second" / "corpus")
    assert listed(tmp_path / "latest") == [("latest/a.txt", "a")]


def test_what_is_no_text_file_is_refused_by_its_path(tmp_path: Path) -> None:
    """Each is tried as a source, and in a folder that is one; none is opened, which would wait."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    bad = folder / "bad.txt"

    def refused(message: str) -> None:
        for source in (bad, folder):
            with pytest.raises(ValueError, match=message):
                listed(source)
        bad.unlink()

    os.mkfifo(bad)
    refused(r"data\.sources: .*bad\.txt is a named pipe: .*or leave it out")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(folder, os.O_RDONLY)  # the name of a socket may only be short
        server.bind(f"/proc/self/fd/{here}/bad.txt")
        os.close(here)
        refused(r"bad\.txt is a socket")
    bad.symlink_to("/dev/zero")
    refused(r"bad\.txt is a character device")
    bad.symlink_to("nowhere")
    refused(r"the link .*bad\.txt leads to nowhere, which does not exist; mend the link")
    bad.symlink_to("bad.txt")
    refused(r"the link .*bad\.txt leads to itself")


def test_a_pipe_in_the_place_of_a_listed_file_does_not_hold_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"a\.txt is a named pipe"):
        files.open_file(tmp_path / "a.txt")


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal of the system is put in."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(
            ValueError, match=r"a\.txt cannot be read \(Permission denied\): make it readable"
        ):
            files.open_file(tmp_path / "sub" / "a.txt")
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(ValueError, match=r"data\.sources: .* cannot be read \(Permission denied\)"):
            listed(tmp_path)


def test_a_source_in_a_folder_that_may_not_be_entered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        patch.setattr(os, "lstat", refuse)
        with pytest.raises(
            ValueError, match=r"closed/a cannot be read \(Permission denied\): make it readable"
        ):
            list_files(DataConfig(sources=(str(tmp_path / "closed" / "a"),)))


def test_a_hard_link_is_a_file_of_its_own_as_a_copy_is(tmp_path: Path) -> None:
    """Copying a folder makes copies of hard links, and the corpus is to stay the same."""
    for folder, second in (("linked", os.link), ("copied", shutil.copy)):
        tree(tmp_path / folder / "corpus", {"a.txt": "a"})
        second(tmp_path / folder / "corpus" / "a.txt", tmp_path / folder / "corpus" / "b.txt")
    assert listed(tmp_path / "linked" / "corpus") == listed(tmp_path / "copied" / "corpus")


def test_deep_folders_are_walked_or_named(tmp_path: Path) -> None:
    """Deeper than Python recurses, and then longer than a path may be."""
    here = os.open(tmp_path, os.O_RDONLY)
    try:
        for level in range(2200):
            if level == 1500:
                descriptor = os.open("a.txt", os.O_WRONLY | os.O_CREAT, dir_fd=here)
                os.close(descriptor)
                (deep,) = listed(tmp_path)
                assert deep[0].count("/d") == 1500
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        with pytest.raises(ValueError, match=r"/d/d.*\.\.\..*/d/d cannot be read \(File name too long\)"):
            listed(tmp_path)
    finally:  # from below, since what clears up after tests recurses
        while not os.path.samestat(os.fstat(here), tmp_path.stat()):
            above = os.open("..", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = above
            if "a.txt" in os.listdir(below := os.open("d", os.O_RDONLY, dir_fd=here)):
                os.unlink("a.txt", dir_fd=below)
            os.close(below)
            os.rmdir("d", dir_fd=here)
        os.close(here)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "'' is not a path: name a file or a folder"),
        ("a\0b", "is not a path"),
        ("~nobody-of-this-name/x", "give the whole path"),
        ("nowhere", "nowhere does not exist: a source is a file or a folder"),
        (".", r"no text in .*: a folder is searched for \.txt"),
    ],
)
def test_bad_sources_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        listed(source)
