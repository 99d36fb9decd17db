"""Small JSON records that know whether they are whole: a hash of the rest stands in the field `sha256`."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def seal(record: Mapping[str, Any]) -> bytes:
    """The text of `record` with the hash of that text before it."""
    rest = json.dumps(record)[1:].encode()
    return _head(rest) + rest


def opened(text: bytes) -> dict[str, Any]:
    """The record in `text`, without its hash.

    Raises ValueError: where it is not what was sealed.
    """
    rest = text[len(_head(b"")) :]
    record = json.loads(text)
    if not text.startswith(_head(rest)):
        raise ValueError("its SHA-256 is another")
    del record["sha256"]
    return record


def write_whole(path: Path, data: bytes) -> None:
    """Write `path` so that it is there whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _head(rest: bytes) -> bytes:
    return f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}", '.encode()
