"""Small JSON records that know whether they are whole: a hash of the rest stands in the field `sha256`."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def seal(record: Mapping[str, Any]) -> str:
    """The text of `record` with its hash."""
    return json.dumps({**record, "sha256": _digest(record)})


def opened(text: str | bytes) -> dict[str, Any]:
    """The record in `text`, without its hash.

    Raises ValueError: where it is not what was sealed.
    """
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError(f"it holds no record but {type(record).__name__}")
    if record.pop("sha256", None) != _digest(record):
        raise ValueError("its SHA-256 is another")
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


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
