"""From the command line to a checked TrainConfig: the only module that sees Hydra and OmegaConf.

Overrides are looked at before Hydra composes, so that a mistake is told in the words of this config; Hydra then
composes over a schema of the dataclasses' defaults, and `counterflow.framework.checks.rules` checks the result.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from counterflow.framework.config.mapping import (
    config_hash,
    current_key,
    dotted_names,
    from_mapping,
    to_mapping,
    unknown_key,
)
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError
from counterflow.framework.redaction import redacted, without_secrets
from counterflow.launch.printing import did_you_mean
from counterflow.parallel.pipeline.schedules.registry import all_schedules

_CONF = "counterflow.conf"
_ROOT = "train"
# A folder of `conf` that is no group of a run's config: what `counterflow plan cluster=` chooses from.
_NO_GROUP = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Config groups and the options of each, as the search path has them."""

    groups: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A config as it may be written down. values: what the environment said, and the interpolation to write for it.

    resolved: the config itself, which may hold secrets.
    """

    mapping: Mapping[str, Any]
    values: Mapping[str, str]
    resolved: Mapping[str, Any] = field(repr=False)

    def config(self) -> TrainConfig:
        """As `compose_config`. Raises ConfigError: naming every mistake."""
        return from_mapping(TrainConfig, self.resolved)


def find_choices(config_dir: Path | None = None) -> Choices:
    """The groups of the package `conf`, every schedule there is, and what the user's `config_dir` adds."""
    from counterflow import conf

    options: dict[str, set[str]] = {"schedule": set(all_schedules())}
    roots = [Path(folder) for folder in conf.__path__] + ([config_dir] if config_dir else [])
    for root in roots:
        for path in root.glob("*/*.yaml"):
            if path.parent.name == _NO_GROUP:
                continue
            options.setdefault(path.parent.name, set()).add(path.stem)
    return Choices(groups={group: tuple(sorted(names)) for group, names in sorted(options.items())})


def with_current_keys(overrides: Sequence[str]) -> list[str]:
    """`overrides` with keys that were renamed under the names they have now."""
    keys = [text.partition("=")[0] for text in overrides]
    return [current_key(key) + text[len(key) :] for key, text in zip(keys, overrides, strict=True)]


def expand_sweep(overrides: Sequence[str], choices: Choices) -> list[list[str]]:
    """Every combination of the overrides' values: `a=1,2 b=3` is [a=1, b=3], [a=2, b=3].

    Knows Hydra's sweeps: `a=1,2`, `choice(...)`, `range(...)`, and `glob(...)` over a group's options.
    Raises ConfigError: for an override that does not parse.
    """
    from hydra.core.override_parser.types import Glob

    axes: list[list[str]] = []
    overrides = with_current_keys(overrides)
    for text, override in zip(overrides, _parse(overrides), strict=True):
        if not override.is_sweep_override():
            axes.append([text])
            continue
        key = override.get_key_element()
        value: Any = override.value()
        if isinstance(value, Glob):
            names = choices.groups.get(override.key_or_group, ())
            names = [
                name
                for name in names
                if any(fnmatch(name, pattern) for pattern in value.include)
                and not any(fnmatch(name, pattern) for pattern in value.exclude)
            ]
            if not names:
                raise ConfigError([f"{text}: no option of this group matches; {_options(choices, key)}"])
            axes.append([f"{key}={name}" for name in names])
        else:
            axes.append([f"{key}={item}" for item in override.sweep_string_iterator()])
    return [list(combination) for combination in itertools.product(*axes)]


def compose_mapping(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """The composed config as nested plain values, not yet checked.

    Raises ConfigError: for an override that does not parse, or that names what the config does not have.
    """
    return _compose(overrides, config_dir)[0]


def compose_recorded(overrides: Sequence[str], config_dir: Path | None = None) -> Recorded:
    """The same as it may be written down: a value that came from the environment as its interpolation.

    Raises ConfigError: as `compose_mapping` does.
    """
    resolved, raw = _compose(overrides, config_dir)
    values: dict[str, str] = {}
    mapping = _as_written(resolved, raw, raw, values)
    return Recorded(mapping=without_secrets(mapping), values=values, resolved=resolved)


def _compose(
    overrides: Sequence[str], config_dir: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config with its interpolations resolved, and as it is written."""
    from hydra import compose, initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError([f"--config-dir {config_dir}: no such folder; name one laid out like conf/"])
    overrides = with_current_keys(overrides)
    _check_overrides(overrides, find_choices(config_dir))
    # OmegaConf makes frozen dataclasses read-only and has no Literal, hence plain values.
    store = ConfigStore.instance()
    store.store(name="schema", node=to_mapping(TrainConfig()))
    for name in all_schedules():
        store.store(group="schedule", name=name, node={"name": name})
    search_path = [f"hydra.searchpath=[file://{config_dir.resolve()}]"] if config_dir else []
    try:
        with initialize_config_module(_CONF, version_base="1.3"):
            config = compose(_ROOT, [*overrides, *search_path])
        raw = OmegaConf.to_container(config, resolve=False)
        mapping = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_hydra_problem(error)]) from error
    assert isinstance(mapping, dict)
    assert isinstance(raw, dict)
    return {str(key): value for key, value in mapping.items()}, {str(key): raw[key] for key in raw}


def _as_written(resolved: Any, raw: Any, root: Mapping[str, Any], values: dict[str, str]) -> Any:
    """`resolved` with the text of `raw` in place of what the environment said; such values are noted in `values`."""
    if isinstance(resolved, Mapping) and isinstance(raw, Mapping):
        return {key: _as_written(value, raw[key], root, values) for key, value in resolved.items()}
    if isinstance(resolved, list) and isinstance(raw, list):
        return [_as_written(value, text, root, values) for value, text in zip(resolved, raw, strict=True)]
    if not isinstance(raw, str) or not _reads_environment(raw, root):
        return resolved
    for value in _texts(resolved) or [str(resolved)]:
        values[value] = raw
    for variable in re.findall(r"\$\{oc\.env:\s*([^,}\s]+)", raw):
        if os.environ.get(variable):
            values[os.environ[variable]] = f"${{oc.env:{variable}}}"
    return raw


def _reads_environment(text: str, root: Mapping[str, Any], depth: int = 8) -> bool:
    """Whether an interpolation in `text`, or in a value that it names, reads a variable of the environment."""
    if "${" in text and "oc.env" in text:
        return True
    for name in re.findall(r"\$\{\s*([\w.]+)\s*\}", text) if depth else ():
        value: Any = root
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if any(_reads_environment(leaf, root, depth - 1) for leaf in _texts(value)):
            return True
    return False


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def compose_config(overrides: Sequence[str], config_dir: Path | None = None) -> TrainConfig:
    """The config of these overrides, its names, types and each node's rules checked.

    Rules that cross nodes are `counterflow.framework.checks.rules.check`: not every command needs a model that fits.
    Raises ConfigError: naming every mistake.
    """
    return from_mapping(TrainConfig, compose_mapping(overrides, config_dir))


def to_yaml(mapping: Mapping[str, Any]) -> str:
    """`mapping` as YAML that Hydra and `from_mapping` read back unchanged."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(mapping)))


def config_file_text(
    config: TrainConfig, command: Sequence[str], recorded: Mapping[str, Any] | None = None
) -> str:
    """What a run's config.yaml holds: the config, headed by its hash and the command that made it, without secrets.

    recorded: the config as it may be written down (`compose_recorded`); None: as it is, but for passwords.
    """
    head = [f"# config hash {config_hash(config)}", f"# {redacted(' '.join(command))}"]
    return "\n".join(head) + "\n" + to_yaml(recorded or without_secrets(to_mapping(config)))


def _parse(overrides: Sequence[str]) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[Any] = []
    problems: list[str] = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException:
            problems.append(_syntax_problem(text))
    if problems:
        raise ConfigError(problems)
    return parsed


def _syntax_problem(text: str) -> str:
    if "=" not in text:
        return f"{text!r}: not an override; write KEY=VALUE, as in schedule.num_microbatches=8 or schedule=dualpipe"
    key, _, value = text.partition("=")
    return (
        f"{text!r}: {value!r} does not parse as a value of {key.lstrip('+~')}; quote text with spaces or any of "
        f"[]{{}}(),:= for Hydra and for the shell, as in '{key}=\"two words\"'"
    )


def _check_overrides(overrides: Sequence[str], choices: Choices) -> None:
    known = dotted_names(TrainConfig)
    problems: list[str] = []
    for text, override in zip(overrides, _parse(overrides), strict=True):
        key = override.key_or_group
        if override.is_sweep_override():
            problems.append(
                f"{text}: several values; add --multirun to run each of them, or quote the value if the comma is "
                "part of it"
            )
        elif key.partition(".")[0] == "hydra":
            problems.append(
                f"{text}: Hydra's own settings are not used here; --out chooses the output folder"
            )
        elif override.is_add() or override.is_force_add() or override.is_delete():
            problems.append(
                f"{text}: keys are neither added nor deleted, every key is there already; write KEY=VALUE, or "
                "KEY=null for a value that may be empty"
            )
        elif override.package is not None:
            problems.append(f"{text}: packages (@) are not used here; write {key}=VALUE")
        elif key in choices.groups:
            name = override.value()
            if str(name) not in choices.groups[key]:
                hint = did_you_mean(str(name), choices.groups[key])
                problems.append(f"{text}: no such choice{hint}; {_options(choices, key)}")
        elif key not in known:
            problems.append(unknown_key(key, [*choices.groups, *known]))
        elif isinstance(override.value(), dict):
            inner = [f"{key}.{name}" for name in override.value()]
            problems += [unknown_key(name, known) for name in inner if name not in known]
    if problems:
        raise ConfigError(problems)


def _options(choices: Choices, group: str) -> str:
    return f"{group} is one of {', '.join(choices.groups.get(group, ()))}"


def _hydra_problem(error: Exception) -> str:
    """What is left for Hydra or OmegaConf to find: interpolations, files of a --config-dir, values of ???."""
    key = getattr(error, "full_key", None)
    lines = [
        line
        for line in str(error).strip().splitlines()
        if "full_key:" not in line and "object_type" not in line
    ]
    text = " ".join(line.strip() for line in lines[:3])
    return f"{key}: {text}; give it a value that stands by itself" if key else text
