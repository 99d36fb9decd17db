"""Documents of the default corpus and of a user's files, and what is refused."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import textwrap
from pathlib import Path

import pytest

from counterflow.framework.data import corpus
from counterflow.framework.data.config import DataConfig
from counterflow.framework.data.listing import list_files


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


def test_other_fields_of_a_record_may_hold_any_number(tmp_path: Path) -> None:
    """Python's own limit on the digits of an integer is not one of JSON."""
    file = tmp_path / "data.jsonl"
    file.write_text('{"n": ' + "9" * 5000 + ', "text": "one"}\n')
    assert [document.text for document in documents(DataConfig(sources=(str(file),)))] == ["one"]


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


def test_share_of_is_uniform_and_fixed() -> None:
    shares = [corpus.share_of(f"file-{number}") for number in range(4000)]
    for tenth in range(10):
        inside = sum(tenth / 10 <= share < (tenth + 1) / 10 for share in shares)
        assert 330 < inside < 470
    # Held-out documents stay held out across versions: sha256("a")[:6] / 2**48.
    assert corpus.share_of("a") == 0xCA978112CA1B / 2**48


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
        (
            "x.jsonl",
            '{"text": 3}\n',
            r"x\.jsonl:1 has a number in field 'text', where its text .*leave the line out",
        ),
        ("x.jsonl", '{"text": null}\n', r"x\.jsonl:1 has null in field 'text', where"),
        ("x.jsonl", '{"text": {"a": "b"}}\n', r"x\.jsonl:1 has an object in field 'text', where"),
        (
            "x.jsonl",
            '["a"]\n',
            r"x\.jsonl:1 is a list: a \.jsonl file has one JSON object a line, with its text",
        ),
        ("x.jsonl", "true\n", r"x\.jsonl:1 is true: a \.jsonl file has one JSON object a line"),
        ("x.jsonl", "{}\n", r"x\.jsonl:1 has no text in field 'text' \(found: no fields\)"),
        (
            "x.jsonl",
            '{"text": "a"}\r{"text": "b"}\r',
            r"x\.jsonl:1 is not JSON .*carriage returns within; end the",
        ),
        ("x.jsonl", '{"text": "a"}\n'.encode("utf-16-le"), r"x\.jsonl:1 is not JSON .*binary data or UTF-16"),
        ("x.txt", "text".encode("utf-32"), r"x\.txt is UTF-32: convert it to UTF-8"),
        ("x.txt", b"caf\xe9\n", r"x\.txt is not UTF-8 text \(byte 0xe9.*convert it"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"x\.jsonl:2 is not UTF-8 text \(byte 0xe9"),
        ("x.jsonl", b'\xef\xbb\xbf{"text": "\xe9"}\n', r"x\.jsonl:1 is not UTF-8 text \(byte 0xe9"),
        ("x.jsonl", b'{"text": "\xed\xa0\xbd"}\n', r"x\.jsonl:1 is not UTF-8 text \(byte 0xed"),
        ("x.jsonl", "[" * 200_000, r"x\.jsonl:1 is nested too deeply"),
        ("x.jsonl", json.dumps(dict.fromkeys(map(str, range(999)))), r"found: 0, 1, .*7, \.\.\.\);"),
        (
            "x.txt",
            gzip.compress(b"text", mtime=0),
            r"x\.txt is compressed by gzip: decompress it, or leave it out",
        ),
        ("x.jsonl", gzip.compress(b"{}", mtime=0), r"x\.jsonl is compressed by gzip: decompress it"),
        ("x.txt", "text".encode("utf-16"), r"x\.txt is UTF-16: convert it to UTF-8"),
        ("x.txt", "text".encode("utf-16-le"), r"x\.txt has bytes of value 0: .*convert it, or leave it out"),
    ],
)
def test_bad_content_names_the_place(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    config = DataConfig(sources=(write(tmp_path / name, content),))
    with pytest.raises(ValueError, match=message):
        documents(config)


BODY = "first line\nsecond line\n\nfourth line\n"


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "field.jsonl"])
def test_text_is_the_same_whatever_file_it_comes_from(tmp_path: Path, name: str, end: str, mark: str) -> None:
    """Marks and line ends are a file's, not the text's; in JSON they may stand around the record or in its field."""
    text = BODY.replace("\n", end)
    if name == "a.jsonl":
        content = mark + json.dumps({"text": text}) + "\r\n"
    elif name == "field.jsonl":
        content = json.dumps({"text": mark + text}) + "\n"
    else:
        content = mark + text
    (found,) = documents(DataConfig(sources=(write(tmp_path / name, content),)))
    assert found.text == BODY


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "latest", "latest.2024"])
def test_records_are_read_as_records_whatever_leads_to_them(tmp_path: Path, name: str) -> None:
    """A link without a suffix that says what it is leads to a file with one."""
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": "one"}\n')
    (tmp_path / name).symlink_to(file)
    (found,) = documents(DataConfig(sources=(str(tmp_path / name),)))
    assert found.text == "one"


def test_separators_of_other_kinds_stay(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0bd \ufeff inside\n"
    sources = (write(tmp_path / "a.txt", text), write(tmp_path / "b.jsonl", json.dumps({"text": text})))
    assert [document.text for document in documents(DataConfig(sources=sources))] == [text, text]


def test_half_a_surrogate_pair_is_replaced_and_counted(tmp_path: Path) -> None:
    """A whole pair is the character that it encodes; the halves have no UTF-8."""
    lines = [r'{"text": "low \udc00, high \ud83d"}', r'{"text": "whole \ud83d\ude00"}', r'{"text": "\ud800"}']
    found = documents(DataConfig(sources=(write(tmp_path / "a.jsonl", "\n".join(lines)),)))
    assert [document.text for document in found] == ["low \ufffd, high \ufffd", "whole \U0001f600", "\ufffd"]
    assert [document.num_replaced for document in found] == [2, 0, 1]


def test_a_name_that_is_no_text_is_a_name(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("one\n")
    (found,) = documents(DataConfig(sources=(str(tmp_path),)))
    assert os.fsencode(found.id).endswith(b"/caf\xe9.txt")
    assert 0 <= corpus.share_of(found.id) < 1


def test_an_endless_line_is_refused_without_reading_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 1000)
    file = tmp_path / "a.jsonl"
    with file.open("wb") as stream:
        stream.write(b'{"text": "a"}\n')
        stream.truncate(1 << 40)  # a terabyte of zeros that takes no room
    with pytest.raises(ValueError, match=r"a\.jsonl:2 is longer than 1000 bytes: .*one JSON object a line"):
        documents(DataConfig(sources=(str(file),)))
