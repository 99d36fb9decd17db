"""Documents of the default corpus and of a user's files, and what is refused."""

from __future__ import annotations

import inspect
import json
import os
import textwrap
from pathlib import Path

import pytest

from counterflow.framework.data import corpus
from counterflow.framework.data.config import DataConfig


def documents(config: DataConfig) -> list[corpus.Document]:
    return list(corpus.read_documents(list_files(config), config))


def test_the_default_corpus_is_the_running_python() -> None:
    config = DataConfig()
    found = {document.id: document.text for document in documents(config)}
    assert sum(map(len, found.values())) > 5e6
    assert found["python/textwrap.py"] == inspect.getsource(textwrap)
    assert not any("site-packages" in name or "/test/" in name for name in found)
    assert "conditional execution" in found["python/topics/if"]
    assert "python/pydoc_data/topics.py" not in found


def test_the_order_and_the_names_are_stable(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.py", ".hidden.txt", "skip.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\n")
    (tmp_path / "empty.txt").write_text("\n")
    found = documents(DataConfig(sources=(str(tmp_path),)))
    base = tmp_path.name
    assert [document.id for document in found] == [f"{base}/a.md", f"{base}/b.txt", f"{base}/sub/c.py"]
    assert found[1].text == "text of b.txt\n"


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines = [json.dumps({"body": text}, ensure_ascii=False) for text in ("one", "zwölf\nlines", "three")]
    file.write_text("\n".join([*lines[:2], "", lines[2]]), encoding="utf-8")
    found = documents(DataConfig(sources=(str(file),), text_field="body"))
    assert [(document.id, document.text) for document in found] == [
        ("data.jsonl:1", "one"),
        ("data.jsonl:2", "zwölf\nlines"),
        ("data.jsonl:4", "three"),
    ]


def test_a_long_text_is_cut_at_line_ends_and_loses_nothing(tmp_path: Path) -> None:
    text = "".join(f"line {number}: {'é' * (number % 90)}\n" for number in range(4000))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    found = documents(DataConfig(sources=(str(tmp_path),)))
    assert len(found) > 2
    assert "".join(document.text for document in found) == text
    assert all(document.text.endswith("\n") for document in found)
    assert [document.continues for document in found] == [False] + [True] * (len(found) - 1)
    assert len({document.id for document in found}) == len(found)


def test_max_bytes_counts_utf8(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("é" * 10, encoding="utf-8")
    assert len(documents(DataConfig(sources=(str(tmp_path),), max_bytes=40))) == 2
    assert len(documents(DataConfig(sources=(str(tmp_path),), max_bytes=39))) == 1


def test_the_fingerprint_follows_the_files_and_the_config(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    config = DataConfig(sources=(str(tmp_path),))

    def key(config: DataConfig) -> str:
        return corpus.fingerprint(corpus.list_files(config), config)

    before = key(config)
    assert key(config) == before
    assert key(DataConfig(sources=(str(tmp_path),), text_field="other")) != before
    os.utime(file, ns=(1, 1))
    touched = key(config)
    assert touched != before
    (tmp_path / "b.txt").write_text("two")
    assert key(config) != touched


def test_share_of_is_uniform_and_fixed() -> None:
    shares = [corpus.share_of(f"file-{number}") for number in range(4000)]
    for tenth in range(10):
        inside = sum(tenth / 10 <= share < (tenth + 1) / 10 for share in shares)
        assert 330 < inside < 470
    # Held-out documents stay held out across versions: sha256("a")[:6] / 2**48.
    assert corpus.share_of("a") == 0xCA978112CA1B / 2**48


def test_scan_counts() -> None:
    found = corpus.scan(corpus.Document(id=name, text="é") for name in ("a", "b", "c"))
    assert (found.num_documents, found.num_bytes) == (3, 6)
    assert found.first_ids == tuple(sorted("abc", key=corpus.share_of)[:2])


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"text": "a"}\n{"text": \n', r"x\.jsonl:2 is not JSON .*one JSON object a line"),
        (
            "x.jsonl",
            '{"text": "a"}\n{"body": "b", "n": 1}\n',
            r"x\.jsonl:2 has no text in field 'text' .*body, n",
        ),
        ("x.jsonl", '{"text": 3}\n', r"x\.jsonl:1 has no text in field 'text'.*set data\.text_field"),
        ("x.jsonl", '["a"]\n', r"x\.jsonl:1 has no text .*found: list"),
        ("x.txt", b"caf\xe9\n", r"x\.txt is not UTF-8 text \(byte 0xe9.*convert it"),
    ],
)
def test_bad_content_names_the_place(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    config = DataConfig(sources=(write(tmp_path / name, content),))
    with pytest.raises(ValueError, match=message):
        documents(config)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist: a source is a file or a folder"):
        corpus.list_files(DataConfig(sources=(str(tmp_path / "nowhere"),)))
    with pytest.raises(ValueError, match=r"no text in .*: a folder is searched for \.txt"):
        corpus.list_files(DataConfig(sources=(str(tmp_path),)))
