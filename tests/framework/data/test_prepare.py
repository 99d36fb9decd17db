"""Preparing a corpus: what comes out, the cache, damage, two launchers at once, and kills."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from counterflow.framework.data import corpus, prepare
from counterflow.framework.data.config import DataConfig, TokenizerConfig
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
    monkeypatch.setattr(prepare, "_run_in_child", no_child)
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
        ({}, {"a.txt": " \n", "b.txt": ""}, r"no usable text in 2 files; give files that are not empty"),
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
    DataConfig(cache_dir=sys.argv[1], max_bytes=4_000_000), TokenizerConfig(vocab_size=1000),
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
