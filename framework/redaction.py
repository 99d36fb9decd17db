"""What must not be written down: passwords and keys, and values that a config took from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET_WORDS = frozenset(
    {
        "secret",
        "password",
        "passwd",
        "passphrase",
        "token",
        "credential",
        "credentials",
        "apikey",
        "pwd",
        "auth",
    }
)
_URL_PASSWORD = re.compile(r"(\w+://[^/\s:@]*):[^/\s]+@")
# A user without a password is a token more often than a name.
_URL_TOKEN = re.compile(r"(\w+://)[^/\s:@]{8,}@")
# What a URL carries in its query instead.
_URL_QUERY = re.compile(
    r"([?&](?:[\w-]*(?:token|signature|password|secret|api_?key|access_?key)[\w-]*|sig)=)[^&\s'\"\]]+",
    re.IGNORECASE,
)
_SECRET_VARIABLES = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# Shorter values stand in a text by chance.
_MIN_CHARS = 4


def redacted(text: str, interpolations: Mapping[str, str] | None = None) -> str:
    """`text` without passwords of URLs, keys of the environment, and the values of `interpolations`.

    interpolations: what to write for a value, as in {"/secret/path": "${oc.env:TEXTS}"}.
    """
    by_length = sorted((interpolations or {}).items(), key=lambda item: -len(item[0]))
    for value, written in by_length:
        if len(value) >= _MIN_CHARS:
            text = text.replace(value, written)
    for name in _SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= _MIN_CHARS:
            text = text.replace(value, HIDDEN)
    text = _URL_TOKEN.sub(rf"\1{HIDDEN}@", _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text))
    return _URL_QUERY.sub(rf"\1{HIDDEN}", text)


def hidden_values(values: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, str]:
    """What a config says and must not be written down, and what is written for it: `interpolations` of `redacted`.

    values: nested plain values as they are. written: the same as they may be written down.
    """
    found: dict[str, str] = {}
    _collect_hidden(values, written, found)
    return found


def _collect_hidden(value: Any, written: Any, found: dict[str, str]) -> None:
    if isinstance(value, Mapping) and isinstance(written, Mapping):
        for key, inner in value.items():
            _collect_hidden(inner, written.get(key, inner), found)
    elif isinstance(value, (list, tuple)) and isinstance(written, (list, tuple)):
        for inner, text in zip(value, written, strict=False):
            _collect_hidden(inner, text, found)
    elif isinstance(written, str) and value != written and ("${" in written or HIDDEN in written):
        for each in value if isinstance(value, (list, tuple)) else [value]:
            # A number or a switch stands in a text by chance.
            if isinstance(each, str):
                found[each] = written
        for variable in re.findall(r"\$\{oc\.env:\s*([^,}\s]+)", written):
            if os.environ.get(variable):
                found[os.environ[variable]] = f"${{oc.env:{variable}}}"


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `values` in which whatever looks like a secret is `***`.

    That is a text under a name such as `api_key`, `hub_token` or `password`, and what `redacted` takes out of texts.
    """
    return {str(key): _redact(str(key), value) for key, value in values.items()}


def _redact(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, (list, tuple)):
        return [_redact(name, each) for each in value]
    if isinstance(value, str):
        words = set(name.lower().replace("-", "_").split("_"))
        if words & _SECRET_WORDS or {"api", "key"} <= words or {"access", "key"} <= words:
            return HIDDEN
        return redacted(value)
    return value
