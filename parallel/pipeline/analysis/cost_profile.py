"""CostProfile: measured costs of a model's stages on a machine, as a JSON file.

`counterflow profile` writes it; simulate, `schedule=auto` and plan read it. Times are seconds.

    {"format": "counterflow cost profile", "version": 1,
     "provenance": {"model": "...", "machine": "...", "date": "...", ...},
     "stages": [{"forward_s": ..., "input_gradient_s": ..., "weight_gradient_s": ..., "backward_s": ...,
                 "recompute_s": 0.0, "parameter_bytes": ...}, ...],
     "activation_bytes": [...],                                  one per boundary
     "link": {"latency_s": ..., "bandwidth_bytes_per_s": ...},   between any two ranks, but for
     "links": [{"source": 3, "target": 4, "latency_s": ..., "bandwidth_bytes_per_s": ...}]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

FORMAT = "counterflow cost profile"
VERSION = 1

T = TypeVar("T")

_REMEDY = "`counterflow profile` writes such a file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """From one rank to another. bandwidth_bytes_per_s: None is no limit."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of one stage's actions on one micro-batch.

    backward_s: of a full B, which need not be I + W. recompute_s: run again ahead of I or B. parameter_bytes: of
    the stage's parameters on one tensor-parallel rank.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    backward_s: float
    recompute_s: float = 0.0
    parameter_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """What was measured, and on what.

    activation_bytes: of the message between each stage and the next. link: between any two ranks, but for those in
    `links` (source, target, link). provenance: model, machine, date and the settings that shape the times.
    """

    stages: tuple[StageCost, ...]
    activation_bytes: tuple[int, ...]
    link: Link
    links: tuple[tuple[int, int, Link], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def merged(self) -> CostProfile:
        """The profile of half as many stages, each of two neighbours: exact but for what a boundary costs.

        Links between ranks stay as they are.
        """
        assert self.num_stages % 2 == 0, "an odd number of stages has no pairs"
        pairs = zip(self.stages[::2], self.stages[1::2], strict=True)
        return CostProfile(
            stages=tuple(
                StageCost(**{name: value + asdict(second)[name] for name, value in asdict(first).items()})
                for first, second in pairs
            ),
            activation_bytes=self.activation_bytes[1::2],
            link=self.link,
            links=self.links,
            provenance=self.provenance,
        )


def save_profile(profile: CostProfile, path: Path) -> None:
    """Write `profile` to `path`, whole or not at all."""
    links = [{"source": source, "target": target, **asdict(link)} for source, target, link in profile.links]
    content = {
        "format": FORMAT,
        "version": VERSION,
        "provenance": dict(profile.provenance),
        "stages": [asdict(stage) for stage in profile.stages],
        "activation_bytes": list(profile.activation_bytes),
        "link": asdict(profile.link),
        "links": links,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def load_profile(path: str | Path) -> CostProfile:
    """Read the profile at `path`.

    Raises ValueError: where there is no such file, or it is not a profile of this version; naming the field.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cost profile {path}: cannot be read ({error.strerror}); {_REMEDY}") from None
    except ValueError as error:
        raise ValueError(f"cost profile {path}: is not JSON ({error}); {_REMEDY}") from None
    try:
        return _parse(content)
    except ValueError as error:
        raise ValueError(f"cost profile {path}: {error}; {_REMEDY}") from None


def _parse(content: object) -> CostProfile:
    top = _mapping(content, "the file")
    if top.get("format") != FORMAT or top.get("version") != VERSION:
        raise ValueError(
            f"format {top.get('format')!r}, version {top.get('version')!r}: must be {FORMAT!r}, version {VERSION}"
        )
    stages = tuple(
        _record(StageCost, entry, f"stages[{index}]") for index, entry in enumerate(_list(top, "stages"))
    )
    sizes = tuple(
        int(_number(size, f"activation_bytes[{index}]"))
        for index, size in enumerate(_list(top, "activation_bytes"))
    )
    if not stages or len(sizes) != len(stages) - 1:
        raise ValueError(
            f"{len(stages)} stages and {len(sizes)} activation_bytes: n stages have n - 1 boundaries"
        )
    links: list[tuple[int, int, Link]] = []
    for index, entry in enumerate(_list(top, "links")):
        ends = dict(_mapping(entry, f"links[{index}]"))
        source, target = (
            int(_number(ends.pop(name, None), f"links[{index}].{name}")) for name in ("source", "target")
        )
        links.append((source, target, _record(Link, ends, f"links[{index}]")))
    return CostProfile(
        stages=stages,
        activation_bytes=sizes,
        link=_record(Link, top.get("link"), "link"),
        links=tuple(links),
        provenance=_mapping(top.get("provenance", {}), "provenance"),
    )


def _record(cls: type[T], entry: object, where: str) -> T:
    """`entry` as a dataclass of numbers."""
    values = dict(_mapping(entry, where))
    known = {item.name: item for item in fields(cast(Any, cls))}
    for name in values:
        if name not in known:
            raise ValueError(f"{where}.{name}: there is no such field; {where} has {', '.join(known)}")
    for name, item in known.items():
        if name not in values and item.default is MISSING:
            raise ValueError(f"{where}.{name} is missing")
        if name in values and not (values[name] is None and item.default is None):
            number = _number(values[name], f"{where}.{name}")
            values[name] = int(number) if name.endswith("_bytes") else number
    return cls(**values)


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_kind(value)}, not an object")
    return cast("dict[str, Any]", value)


def _list(top: Mapping[str, Any], name: str) -> list[Any]:
    value = top.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_kind(value)}, not a list")
    return cast("list[Any]", value)


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{where}={value!r}: must be a number, 0 or above")
    return float(value)


def _kind(value: object) -> str:
    return "missing" if value is None else type(value).__name__
