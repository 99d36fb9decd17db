"""Config dataclasses from plain mappings and back: names, types and the nearest right name for a wrong one."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from counterflow.framework.errors import ConfigError

T = TypeVar("T")

logger = logging.getLogger(__name__)
# Keys that had another name, by the old one. Both are read for one release, the old one with a warning.
RENAMED = {"brakes": "skip_step", "balance.spare_slots": "balance.num_redundant_experts"}


def current_key(dotted: str) -> str:
    """`dotted` under the name that it has now; a key that was not renamed as it is."""
    for old, new in RENAMED.items():
        if dotted == old or dotted.startswith(f"{old}."):
            logger.warning("%s is called %s now; the old name goes with the next release", old, new)
            return new + dotted[len(old) :]
    return dotted


def from_mapping(cls: type[T], mapping: Mapping[str, Any]) -> T:
    """`mapping` (nested, plain values, lists for tuples) as the dataclass `cls`; missing keys keep their defaults.

    Raises ConfigError: naming every unknown key, wrong type and broken rule of a node, by its full dotted name.
    """
    problems: list[str] = []
    known = dotted_names(cls)
    result = _read(cls, _with_current_keys(mapping, "", known), "", known, problems)
    if problems:
        raise ConfigError(problems)
    return cast(T, result)


def _with_current_keys(mapping: Mapping[str, Any], prefix: str, known: Sequence[str]) -> Mapping[str, Any]:
    """`mapping` with keys that were renamed under the names they have now."""
    result: dict[str, Any] = {}
    for key, value in mapping.items():
        dotted = f"{prefix}{key}"
        name = key if dotted in known else current_key(dotted).removeprefix(prefix)
        if isinstance(value, Mapping):
            value = _with_current_keys(cast(Mapping[str, Any], value), f"{prefix}{name}.", known)
        result[name] = value
    return result


def to_mapping(config: Any) -> dict[str, Any]:
    """A config dataclass as nested plain values (dicts, lists, str, int, float, bool, None): what YAML holds."""
    return {item.name: _plain(getattr(config, item.name)) for item in fields(config)}


def config_hash(config: Any) -> str:
    """64 hex digits that are equal for equal configs, whatever wrote them."""
    text = json.dumps(to_mapping(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def dotted_names(cls: type[Any], prefix: str = "") -> tuple[str, ...]:
    """The full dotted name of every node and value of the dataclass `cls`."""
    names: list[str] = []
    for name, hint in get_type_hints(cls).items():
        names.append(prefix + name)
        if is_dataclass(hint):
            names.extend(dotted_names(cast(type[Any], hint), f"{prefix}{name}."))
    return tuple(names)


def unknown_key(dotted: str, known: Sequence[str]) -> str:
    """The message for a key that the config does not have, with the nearest names it does have."""
    node, _, leaf = dotted.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == node]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    near = [f"{node}." * bool(node) + name for name in _close(leaf, [_leaf(name) for name in siblings])]
    # Else the right name in another node, as in num_microbatches for schedule.num_microbatches, or a slip in both.
    near = near or same_leaf or difflib.get_close_matches(dotted, known, n=1, cutoff=0.7)
    if near:
        remedy = f"did you mean {' or '.join(near[:3])}?"
    elif node and siblings:
        remedy = f"{node} has {', '.join(_leaf(name) for name in siblings)}"
    else:
        remedy = "`counterflow train --cfg job` prints every key"
    return f"{dotted}: the config has no such key; {remedy}"


def _leaf(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _close(word: str, names: Sequence[str]) -> list[str]:
    """The names that look like `word`, else those it is a part of (`lr` for `base_lr`)."""
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return close or [name for name in names if f"_{word}" in f"_{name}" and name.endswith(word)]


def _did_you_mean(value: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(value, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in cast(tuple[Any, ...], value)]
    return value


def _read(
    cls: type[Any], mapping: Mapping[str, Any], prefix: str, known: Sequence[str], problems: list[str]
) -> Any:
    """One dataclass of the tree, or None once `problems` has something to say about it."""
    hints = get_type_hints(cls)
    before = len(problems)
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        dotted = f"{prefix}{key}"
        if key not in hints:
            problems.append(unknown_key(dotted, known))
        elif is_dataclass(hints[key]):
            if isinstance(value, Mapping):
                node = cast(Mapping[str, Any], value)
                values[key] = _read(cast(type[Any], hints[key]), node, f"{dotted}.", known, problems)
            else:
                node_names = [name for name in known if name.startswith(f"{dotted}.")]
                problems.append(
                    f"{dotted}={value!r}: a group of values; set {', '.join(node_names[:3])}, ..."
                )
        else:
            values[key] = _read_value(hints[key], value, dotted, _default(cls, key), problems)
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ValueError as error:
        problems.append(str(error))
        return None


def _default(cls: type[Any], key: str) -> Any:
    return next(item.default for item in fields(cls) if item.name == key)


def _read_value(hint: Any, value: Any, dotted: str, default: Any, problems: list[str]) -> Any:
    from pydantic import TypeAdapter, ValidationError

    if isinstance(value, list) and any(get_origin(arm) is tuple for arm in (hint, *get_args(hint))):
        value = tuple(cast(list[Any], value))
    # pydantic takes True for Literal[1] and 1.0 as well, for they compare equal.
    same_type = get_origin(hint) is not Literal or any(type(value) is type(item) for item in get_args(hint))
    if not _is_finite(value):
        problems.append(
            f"{dotted}={_as_text(value)}: must be finite, as every number is{_usual(dotted, default)}"
        )
        return None
    try:
        if same_type:
            return TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError:
        pass
    options = [str(item) for item in get_args(hint)] if get_origin(hint) is Literal else []
    near = _did_you_mean(value, options) if isinstance(value, str) else ""
    problems.append(f"{dotted}={_as_text(value)}: must be {_describe(hint)}{near}{_usual(dotted, default)}")
    return None


def _usual(dotted: str, default: Any) -> str:
    return "" if default is MISSING else f"; the default is {dotted}={_as_text(default)}"


def _is_finite(value: Any) -> bool:
    """Whether no number in `value`, plain or a tuple, is infinite or NaN."""
    if isinstance(value, tuple):
        return all(map(_is_finite, cast(tuple[Any, ...], value)))
    return not isinstance(value, float) or isfinite(value)


def _as_text(value: Any) -> str:
    """A value as it stands on the command line; text is quoted, so that '8' and 8 are told apart."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(cast(tuple[Any, ...], value))) if isinstance(value, tuple) else repr(value)


def _describe(hint: Any) -> str:
    """A type as a newcomer reads it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return str(args[0]) if len(args) == 1 else f"one of {', '.join(map(str, args))}"
    if origin in (Union, UnionType):
        return " or ".join(_describe(arg) for arg in args)
    if origin is tuple:
        return "a list, as in [a,b]"
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
    return plain.get(hint, str(hint))
