"""Secrets by their names, in URLs and from the environment."""

from __future__ import annotations

import pytest

from counterflow.framework.redaction import hidden_values, redacted, without_secrets


def test_secrets_are_recognised_by_name_and_in_urls() -> None:
    values = {
        "api_key": "a",
        "HF-TOKEN": "b",
        "nested": {"db_password": "c", "list": [{"secret": "d"}]},
        "store": "s3://user:e@host/path",
        "tokenizer": "bpe",
        "num_tokens": 5,
        "token": 7,
        "text_key": "body",
        "path": "/a:b@c",
    }
    assert without_secrets(values) == {
        "api_key": "***",
        "HF-TOKEN": "***",
        "nested": {"db_password": "***", "list": [{"secret": "***"}]},
        "store": "s3://user:***@host/path",
        "tokenizer": "bpe",
        "num_tokens": 5,
        "token": 7,
        "text_key": "body",
        "path": "/a:b@c",
    }


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("https://me:pa/ss@host/x", "https://me:pa/ss@host/x"),
        ("see s3://me:pass@host/x and http://:p@h", "see s3://me:***@host/x and http://:***@h"),
        ("https://me:p@ss@host/x", "https://me:***@host/x"),
        ("https://h/x?sig=abc&n=1", "https://h/x?sig=***&n=1"),
        (
            "https://h/x?X-Amz-Signature=abc&access_token=b",
            "https://h/x?X-Amz-Signature=***&access_token=***",
        ),
        ("12:30@noon", "12:30@noon"),
        ("https://ghp_abcdef@github.com/x", "https://***@github.com/x"),
        ("ssh://git@host/x", "ssh://git@host/x"),
    ],
)
def test_passwords_in_urls(text: str, written: str) -> None:
    assert redacted(text) == written


def test_keys_of_the_environment_never_appear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert redacted("401 for 0123456789abcdef") == "401 for ***"
    assert without_secrets({"project": "p-0123456789abcdef"}) == {"project": "p-***"}


def test_a_value_of_the_environment_is_its_interpolation() -> None:
    hidden = {"/secret": "${oc.env:A}", "/secret/more": "${oc.env:B}", "x": "${oc.env:C}"}
    assert redacted("x: /secret/more, /secret", hidden) == "x: ${oc.env:B}, ${oc.env:A}"


def test_values_that_are_written_otherwise_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPUS", "/vault/corpus")
    values = {
        "data": {"sources": ["/vault/corpus/a", "https://u:pass@h/x"], "seq_length": 16},
        "logger": {"name": "none", "api_key": "k123456"},
    }
    written = {
        "data": {"sources": ["${oc.env:CORPUS}/a", "https://u:***@h/x"], "seq_length": 16},
        # Another value is no secret: a command may have changed it.
        "logger": {"name": "wandb", "api_key": "***"},
    }
    assert hidden_values(values, written) == {
        "/vault/corpus/a": "${oc.env:CORPUS}/a",
        "/vault/corpus": "${oc.env:CORPUS}",
        "https://u:pass@h/x": "https://u:***@h/x",
        "k123456": "***",
    }
