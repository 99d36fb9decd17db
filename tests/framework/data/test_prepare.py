"""Preparing a corpus: what comes out, the cache, damage, two launchers at once, and kills."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from counterflow.framework.data import corpus, identity, prepare
from counterflow.framework.data.config import DataConfig, TokenizerConfig
from counterflow.framework.data.files import SourceFile
from counterflow.framework.data.identity import ScanRecord, scan_corpus
from counterflow.framework.data.listing import list_files
from counterflow.framework.data.loader import TokenDataset
from counterflow.framework.data.prepare import PreparedData

TOKENIZER = TokenizerConfig(vocab_size=300)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    """Sixty small files below tmp_path/text: name -> text."""
    folder = tmp_path / "text"
    folder.mkdir()
    found: dict[str, str] = {}
    for number in range(60):
        text = f"file {number}\n" + "the quick brown fox jumps over the lazy dog\n" * (number % 5 + 1)
        (folder / f"{number:02d}.txt").write_text(text)
        found[f"text/{number:02d}.txt"] = text
    return found


def config(tmp_path: Path, **values: object) -> DataConfig:
    defaults = {
        "sources": (str(tmp_path / "text"),),
        "cache_dir": str(tmp_path / "cache"),
        "seq_length": 16,
        "validation_fraction": 0.2,
    }
    return DataConfig(**{**defaults, **values})  # type: ignore[arg-type]


def tokens_of(folder: Path) -> list[int]:
    index = TokenDataset(folder).index
    parts = [np.fromfile(folder / shard.file, index.storage_dtype) for shard in index.shards]
    return np.concatenate(parts).tolist()


def documents_of(folder: Path, prepared: PreparedData) -> list[str]:
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    documents: list[list[int]] = [[]]
    for token in tokens_of(folder):
        if token == prepared.end_of_text_id:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return [tokenizer.decode(document) for document in documents]


def no_child(*_: object) -> None:
    raise AssertionError("a child was started")


def test_both_splits_hold_the_documents_of_their_share(tmp_path: Path, texts: dict[str, str]) -> None:
    seen: list[tuple[str, float]] = []
    prepared = prepare.prepare(
        config(tmp_path),
        TOKENIZER,
        global_batch_size=2,
        progress=lambda what, share: seen.append((what, share)),
    )
    assert prepared.validation is not None
    held_out = [text for name, text in texts.items() if corpus.share_of(name) < 0.2]
    kept = [text for name, text in texts.items() if corpus.share_of(name) >= 0.2]
    assert documents_of(prepared.train, prepared) == kept
    assert documents_of(prepared.validation, prepared) == held_out
    assert held_out
    assert prepared.num_train_tokens == len(tokens_of(prepared.train))
    assert prepared.num_validation_tokens == len(tokens_of(prepared.validation))
    assert prepared.vocab_size <= 300
    assert {what for what, _ in seen} == {
        "reading the corpus",
        "training the tokenizer",
        "encoding the corpus",
    }
    assert seen[-1] == ("encoding the corpus", 1.0)
    assert all(0 <= share <= 1 for _, share in seen)


@pytest.mark.usefixtures("texts")
def test_the_second_time_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare.prepare(config(tmp_path), TOKENIZER)
    monkeypatch.setattr(prepare, "run_in_child", no_child)
    assert prepare.prepare(config(tmp_path), TOKENIZER) == first
    (tmp_path / "text" / "new.txt").write_text("new")
    with pytest.raises(AssertionError, match="a child was started"):
        prepare.prepare(config(tmp_path), TOKENIZER)


@pytest.mark.usefixtures("texts")
def test_the_result_depends_on_the_content_alone(tmp_path: Path) -> None:
    first = prepare.prepare(config(tmp_path), TOKENIZER)
    second = prepare.prepare(config(tmp_path, cache_dir=str(tmp_path / "other")), TOKENIZER, shard_tokens=100)
    assert len(TokenDataset(second.train).index.shards) > 3
    assert tokens_of(second.train) == tokens_of(first.train)
    assert second.tokenizer_path.read_bytes() == first.tokenizer_path.read_bytes()
    without = prepare.prepare(config(tmp_path, validation_fraction=0.0), TOKENIZER)
    assert without.validation is None
    assert without.num_train_tokens == first.num_train_tokens + first.num_validation_tokens


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("damage", ["short", "flipped", "index", "tokenizer"])
def test_a_damaged_cache_is_named_and_built_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = prepare.prepare(config(tmp_path), TOKENIZER)
    expected = tokens_of(first.train)
    shard = first.train / "00000.bin"
    if damage == "short":
        shard.write_bytes(shard.read_bytes()[:-2])
    elif damage == "flipped":
        data = bytearray(shard.read_bytes())
        data[10] ^= 1
        shard.write_bytes(data)
    elif damage == "index":
        (first.train / "index.json").write_text("{")
    else:
        first.tokenizer_path.write_text("{")
        shard.unlink()
    with caplog.at_level(logging.WARNING):
        again = prepare.prepare(config(tmp_path), TOKENIZER)
    assert again == first
    assert tokens_of(again.train) == expected
    Tokenizer.from_file(str(again.tokenizer_path))
    assert "the prepared tokens are built again: " in caplog.text
    assert str(first.train) in caplog.text


@pytest.mark.usefixtures("texts")
def test_a_tokenizer_file_is_taken_as_it_is(tmp_path: Path) -> None:
    trained = prepare.prepare(config(tmp_path), TOKENIZER)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(trained.tokenizer_path.read_bytes())
    prepared = prepare.prepare(config(tmp_path), TokenizerConfig(kind="file", path=str(path)))
    assert prepared.tokenizer_path == path
    assert tokens_of(prepared.train) == tokens_of(trained.train)
    with pytest.raises(ValueError, match=r"nothing\.json: no such file; give the path"):
        prepare.prepare(config(tmp_path), TokenizerConfig(kind="file", path=str(tmp_path / "nothing.json")))


def test_one_file_is_split_within_itself(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    text = "".join(f"sentence number {number} of the book\n" for number in range(12000))
    file.write_text(text)
    prepared = prepare.prepare(config(tmp_path, sources=(str(file),), validation_fraction=0.01), TOKENIZER)
    assert prepared.validation is not None
    (held_out,) = documents_of(prepared.validation, prepared)
    kept = documents_of(prepared.train, prepared)
    assert len(kept) <= 2  # separated only where the held-out piece was
    assert held_out.join(kept) == text or "".join(kept) + held_out == text or held_out + "".join(kept) == text


@pytest.mark.usefixtures("texts")
def test_no_thread_stays_behind_in_the_launcher(tmp_path: Path) -> None:
    """The launcher forks its ranks afterwards, which is safe from a process with one thread only."""
    before = len(os.listdir("/proc/self/task"))
    prepare.prepare(config(tmp_path), TOKENIZER)
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.parametrize(
    ("values", "files", "message"),
    [
        (
            {},
            {"a.txt": "word " * 40, "b.txt": "word " * 900},
            r"the \w+ split has \d+ tokens.*one global batch",
        ),
        ({}, {"a.jsonl": '{"text": "a"}\n{"text"'}, r"a\.jsonl:2 is not JSON"),
        (
            {},
            {"a.txt": " \n", "b.txt": ""},
            r"no usable text in 2 files, the first being .*a\.txt; give files that are not empty",
        ),
        ({"max_bytes": 3}, {"a.txt": "much more than that"}, r"within data\.max_bytes=3.*raise the limit"),
        ({}, {"a.txt": "only one"}, r"validation_fraction=0\.2: the corpus is a single document"),
        ({"cache_dir": "/dev/null/cache"}, {"a.txt": "a", "b.txt": "b"}, r"data\.cache_dir=/dev/null/cache"),
    ],
)
def test_refusals_reach_the_caller(
    tmp_path: Path, values: dict[str, object], files: dict[str, str], message: str
) -> None:
    (tmp_path / "text").mkdir()
    for name, text in files.items():
        (tmp_path / "text" / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        prepare.prepare(config(tmp_path, **values), TOKENIZER, global_batch_size=64)


def texts_of(prepared: PreparedData) -> list[str]:
    return documents_of(prepared.train, prepared)


def write_corpus(folder: Path, text: str, ns: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(text)
    if ns is not None:
        os.utime(folder / "a.txt", ns=(ns, ns))


def test_tokens_are_those_of_the_text_whatever_its_size_and_time(tmp_path: Path) -> None:
    """Text of one size and time, written over at once, in the same inode and in another."""
    values = {"validation_fraction": 0.0, "seq_length": 1, "sources": (str(tmp_path / "v1" / "corpus"),)}
    folder = tmp_path / "v1" / "corpus"
    for text in ("first text here\n", "other text here\n", "third text here\n"):
        write_corpus(folder, text, ns=315532800 * 10**9)
        assert texts_of(prepare.prepare(config(tmp_path, **values), TOKENIZER)) == [text]
    (tmp_path / "new").write_text("fourth text now\n")
    os.utime(tmp_path / "new", ns=(315532800 * 10**9, 315532800 * 10**9))
    (tmp_path / "new").replace(folder / "a.txt")
    assert texts_of(prepare.prepare(config(tmp_path, **values), TOKENIZER)) == ["fourth text now\n"]
    # Another folder of that name.
    write_corpus(tmp_path / "v2" / "corpus", "text of number 2\n", ns=315532800 * 10**9)
    values["sources"] = (str(tmp_path / "v2" / "corpus"),)
    assert texts_of(prepare.prepare(config(tmp_path, **values), TOKENIZER)) == ["text of number 2\n"]


@pytest.mark.usefixtures("texts")
def test_only_files_that_were_touched_are_read_and_equal_text_keeps_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare.prepare(config(tmp_path), TOKENIZER)
    monkeypatch.setattr(prepare, "encode_corpus", no_child)
    data = config(tmp_path)
    os.utime(tmp_path / "text" / "07.txt")
    read: list[str] = []

    def reads(file: SourceFile, *rest: Any) -> Any:
        read.append(file.path.name)
        return corpus.read_file(file, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(identity, "read_file", reads)
        scan_corpus(list_files(data), data, ScanRecord(tmp_path / "cache", data))
    assert read == ["07.txt"]
    monkeypatch.setattr(prepare, "run_in_child", no_child)
    assert prepare.prepare(data, TOKENIZER) == first
    # The same text in another place is the same corpus, once it has been read.
    monkeypatch.undo()
    shutil.copytree(tmp_path / "text", tmp_path / "moved" / "text")
    monkeypatch.setattr(prepare, "encode_corpus", no_child)
    assert prepare.prepare(config(tmp_path, sources=(str(tmp_path / "moved" / "text"),)), TOKENIZER) == first


def test_a_limit_reads_no_more_than_it_says_and_is_known_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "aaaa"}\n{"text": "bbbb"}\n{"text": "cccc"}\n')
    (folder / "b.jsonl").write_text("this is not JSON and is never read\n")
    data = config(tmp_path, validation_fraction=0.0, max_bytes=10, seq_length=1)
    first = prepare.prepare(data, TOKENIZER)
    assert texts_of(first) == ["aaaa", "bbbb"]
    monkeypatch.setattr(prepare, "run_in_child", no_child)
    assert prepare.prepare(data, TOKENIZER) == first
    (folder / "b.jsonl").write_text("neither is this\n")
    assert prepare.prepare(data, TOKENIZER) == first
    with pytest.raises(AssertionError, match="a child was started"):
        prepare.prepare(config(tmp_path, validation_fraction=0.0, max_bytes=12, seq_length=1), TOKENIZER)


def test_two_files_of_one_name_are_two_documents(tmp_path: Path) -> None:
    sources: list[str] = []
    for folder in ("s1", "s2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.txt").write_text(f"text of {folder} " * 20)
        sources.append(str(tmp_path / folder / "data.txt"))
    prepared = prepare.prepare(config(tmp_path, sources=tuple(sources)), TOKENIZER)
    assert prepared.validation is not None
    found = documents_of(prepared.train, prepared) + documents_of(prepared.validation, prepared)
    assert sorted(found) == ["text of s1 " * 20, "text of s2 " * 20]


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_no_split_is_empty(tmp_path: Path, fraction: float) -> None:
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / "text" / f"{name}.txt").write_text("some words " * 20)
    prepared = prepare.prepare(config(tmp_path, validation_fraction=fraction), TOKENIZER)
    assert min(prepared.num_train_tokens, prepared.num_validation_tokens) > 0


def test_one_text_given_twice_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 20)
    with pytest.raises(ValueError, match="the corpus is a single document"):
        prepare.prepare(config(tmp_path, sources=(str(tmp_path / "a.txt"),) * 2), TOKENIZER)


@pytest.mark.usefixtures("texts")
def test_text_that_changes_while_it_is_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reading that counts and the one that encodes; nothing is left, and the next start is right."""
    original = prepare._tokenizer

    def change(*args: Any) -> Any:
        found = original(*args)
        (tmp_path / "text" / "07.txt").write_text("changed\n")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_tokenizer", change)
        with pytest.raises(ValueError, match=r"text/07\.txt changed while it was read: .*start again"):
            prepare.prepare(config(tmp_path), TOKENIZER)
    assert [path.suffix for path in (tmp_path / "cache" / "tokens").iterdir()] == [".lock"]
    prepared = prepare.prepare(config(tmp_path, validation_fraction=0.0), TOKENIZER)
    assert texts_of(prepared)[7] == "changed\n"


@pytest.mark.usefixtures("texts")
def test_a_damaged_record_of_files_is_as_good_as_none(tmp_path: Path) -> None:
    first = prepare.prepare(config(tmp_path), TOKENIZER)
    (record,) = (tmp_path / "cache" / "corpora").iterdir()
    whole = record.read_text()
    digest = json.loads(whole)["files"][0][2][0]
    for damaged in (whole.replace(digest, digest[::-1]), whole[:100], "[]", "\0\xff"):
        record.write_text(damaged)
        assert prepare.prepare(config(tmp_path), TOKENIZER) == first
        assert record.read_text() == whole


@pytest.mark.usefixtures("texts")
def test_a_tokenizer_with_a_changed_byte_is_trained_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = prepare.prepare(config(tmp_path), TOKENIZER)
    whole = first.tokenizer_path.read_text()
    changed = whole.replace('"b": ', '"B": ', 1)
    assert changed != whole
    first.tokenizer_path.write_text(changed)
    assert prepare.prepare(config(tmp_path), TOKENIZER) == first
    assert "was made by another tokenizer than" in caplog.text
    assert first.tokenizer_path.read_text() == whole
    first.tokenizer_path.write_text(changed)
    prepare.prepare(config(tmp_path, validation_fraction=0.0), TOKENIZER)
    assert first.tokenizer_path.read_text() == whole


@pytest.mark.usefixtures("texts")
def test_the_tokenizer_file_is_known_by_its_content(tmp_path: Path) -> None:
    trained = prepare.prepare(config(tmp_path), TOKENIZER)
    path = tmp_path / "tokenizer.json"
    given = TokenizerConfig(kind="file", path=str(path))
    path.write_bytes(trained.tokenizer_path.read_bytes())
    assert tokens_of(prepare.prepare(config(tmp_path), given).train) == tokens_of(trained.train)
    other = prepare.prepare(config(tmp_path), TokenizerConfig(vocab_size=290))
    stat = path.stat()
    path.write_bytes(other.tokenizer_path.read_bytes())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert tokens_of(prepare.prepare(config(tmp_path), given).train) == tokens_of(other.train)


def test_what_does_not_reach_the_model_is_said_at_every_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text('{"text": "a b"}\n{"text": "a \\ud83d"}\n')
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    for _ in range(2):
        caplog.clear()
        prepare.prepare(
            config(tmp_path, validation_fraction=0.0, seq_length=1),
            TokenizerConfig(kind="file", path=str(tmp_path / "t.json")),
        )
        assert "are read as U+FFFD: 1, the first in text/a.jsonl:2" in caplog.text
        # a ? </s> a ? </s>
        assert "33.3 % of the tokens (2 of 6) are its unknown token" in caplog.text


FULL = """
import resource, sys
from counterflow.framework.data import prepare
from counterflow.framework.data.config import DataConfig, TokenizerConfig
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
data = DataConfig(cache_dir=sys.argv[1], sources=(sys.argv[2],), validation_fraction=0.0)
try:
    prepare.prepare(data, TokenizerConfig(vocab_size=300))
except ValueError as error:
    print(error)
"""


def test_a_cache_without_room_is_named_and_nothing_half_written_stays(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: writing fails in the middle of a shard."""
    file = tmp_path / "a.txt"
    file.write_text("".join(f"number {number * number} of the text\n" for number in range(3000)))
    output = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "cache"), str(file)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.search(r"File too large.*data\.cache_dir=.* must be writable and not full; free it", output)
    assert [path.suffix for path in (tmp_path / "cache" / "tokens").iterdir()] == [".lock"]
    prepared = prepare.prepare(config(tmp_path, sources=(str(file),), validation_fraction=0.0), TOKENIZER)
    assert texts_of(prepared) == [file.read_text()]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: object) -> None:
    raise KeyError("a defect")


@pytest.mark.usefixtures("texts")
def test_a_child_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(multiprocessing.active_children())  # the session's pool of ranks, where it has started
    monkeypatch.setattr(prepare, "_build", die)
    with pytest.raises(RuntimeError, match=r"prepares the data died \(exit code -9\).*data\.max_bytes"):
        prepare.prepare(config(tmp_path), TOKENIZER)
    monkeypatch.setattr(prepare, "_build", fail)
    with pytest.raises(RuntimeError, match=r"(?s)preparing the data failed:.*KeyError: 'a defect'"):
        prepare.prepare(config(tmp_path), TOKENIZER)
    assert set(multiprocessing.active_children()) == before


BOTH = """
import sys
from counterflow.framework.data import prepare
from counterflow.framework.data.config import DataConfig, TokenizerConfig
seen = []
prepared = prepare.prepare(
    DataConfig(cache_dir=sys.argv[1], max_bytes=1_000_000), TokenizerConfig(vocab_size=500),
    progress=lambda what, share: seen.append(what),
)
print("built" if "encoding the corpus" in seen else "waited", prepared.content_hash)
"""


STUCK = "import time; from counterflow.framework.data import prepare; prepare._build = lambda *_: time.sleep(60)\n"


def start(cache_dir: Path, script: str = BOTH) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(cache_dir)],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_launchers_at_once_prepare_once(tmp_path: Path) -> None:
    processes = [start(tmp_path / "cache") for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].split() for process in processes]
    assert sorted(words[0] for words in outputs) == ["built", "waited"]
    assert outputs[0][1] == outputs[1][1]
    (store,) = [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]
    assert sorted(path.name for path in store.iterdir()) == ["train", "validation"]


@pytest.mark.parametrize("script", [BOTH, STUCK + BOTH], ids=["working", "stuck"])
def test_a_killed_launcher_leaves_no_process_and_the_next_one_succeeds(tmp_path: Path, script: str) -> None:
    process = start(tmp_path / "cache", script)
    children: list[str] = []
    while not children:
        assert process.poll() is None
        time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()  # its output stays open as long as the child lives
    deadline = time.monotonic() + 10
    while any(alive(int(child)) for child in children):
        assert time.monotonic() < deadline, "the preparing process outlived its launcher"
        time.sleep(0.05)
    output, _ = (again := start(tmp_path / "cache")).communicate(timeout=120)
    assert again.returncode == 0
    assert output.startswith("built")


def alive(pid: int) -> bool:
    """Whether `pid` runs; a process that has ended but is not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
